from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import flowkit
from flowkit.config import presets
from flowkit.config.distill import DistillConfig
from flowkit.config.load import dump, resolve
from flowkit.config.schema import SCHEMAS, GrpoConfig
from flowkit.config.strict_yaml import parse_document
from flowkit.errors import UsageError, UserError

EXPECTED = {"tiny-ocr", "tiny-ocr-fast", "flux-ocr", "flux-ocr-fast", "sd3-ocr", "sd3-ocr-1gpu"}
COMMON = (
    "algorithm",
    "model",
    "seed",
    "steps",
    "out",
    "report_to",
    "checkpoint.every",
    "checkpoint.keep",
    "eval.every",
    "preview.every",
)


def load(name: str) -> GrpoConfig | DistillConfig:
    path = presets.find(name)
    return resolve(SCHEMAS[presets.algorithm_of(path)], path).config


def test_the_presets_of_the_foundation_are_there() -> None:
    assert set(presets.names()) >= EXPECTED


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_loads_names_the_common_keys_and_reads_back_from_its_dump(name: str) -> None:
    path = presets.find(name)
    resolved = resolve(SCHEMAS[presets.algorithm_of(path)], path)
    written = {key for key, source in resolved.sources.items() if source != "default"}
    assert set(COMMON) <= written
    assert resolved.config.out == f"runs/{name}"
    again = resolve(type(resolved.config), parse_document(dump(resolved.config), "dump")).config
    assert again == resolved.config


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_short_commented_and_says_what_it_is(name: str) -> None:
    lines = presets.find(name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert presets.about(presets.find(name)).endswith(".")


@pytest.mark.parametrize("name", presets.names())
def test_the_prompt_lists_of_every_preset_exist(name: str) -> None:
    cfg = load(name)
    grpo = isinstance(cfg, GrpoConfig)
    sources = (cfg.prompts.train, cfg.prompts.test) if grpo else (cfg.data.prompts, cfg.eval.prompts)
    for source in sources:
        if source is None:  # shards bring their own prompts
            assert not grpo
            assert cfg.data.kind == "shards"
            continue
        assert presets.prompt_file(source.removeprefix("builtin:")).is_file()


@pytest.mark.parametrize("name", ["flux-ocr", "flux-ocr-fast", "sd3-ocr"])
def test_the_big_presets_hold_the_published_settings(name: str) -> None:
    c = resolve(GrpoConfig, presets.find(name)).config
    flux = name.startswith("flux")
    assert (c.rollout.groups, c.rollout.samples, c.size) == (48, 24, "512x512")
    assert (c.rollout.steps, c.eval.steps, c.rollout.guidance) == ((6, 28, 3.5) if flux else (10, 40, 4.5))
    assert (c.lora.rank, c.lora.alpha) == ((64, 128) if flux else (32, 64))
    assert c.lora.targets == ("attention+ff" if flux else "attention")
    assert (c.optim.lr, c.ema.decay, c.ema.interval, c.policy.updates) == (3e-4, 0.9, 8, 2)
    assert c.rollout.schedule.name == ("auto" if flux else "sd3-rl")
    assert c.policy.clip == (1e-5 if name.endswith("fast") else 1e-4)


def test_an_unknown_preset_is_refused_with_the_closest_name() -> None:
    with pytest.raises(UsageError, match=r"^there is no preset 'tiny-orc'; did you mean 'tiny-ocr'\?$"):
        presets.find("tiny-orc")
    with pytest.raises(UsageError, match="there is no preset"):
        presets.find("../presets/tiny-ocr")


def test_presets_inside_the_package_come_before_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flowkit, "__file__", str(tmp_path / "flowkit" / "__init__.py"))
    shutil.copytree(Path(presets.__file__).parents[2] / "presets", tmp_path / "presets")
    assert presets.folder() == tmp_path / "presets"
    shutil.copytree(tmp_path / "presets", tmp_path / "flowkit" / "presets")
    assert presets.folder() == tmp_path / "flowkit" / "presets"
    assert set(presets.names()) >= EXPECTED


def test_a_copy_is_the_same_bytes_and_replaces_nothing_without_force(tmp_path: Path) -> None:
    target = presets.copy("tiny-ocr", tmp_path / "mine.yaml")
    assert target.read_bytes() == presets.find("tiny-ocr").read_bytes()
    target.write_text("mine")
    with pytest.raises(UserError, match=r"mine\.yaml exists already.*--force"):
        presets.copy("tiny-ocr", target)
    assert target.read_text() == "mine"
    presets.copy("tiny-ocr", target, force=True)
    assert target.read_text() != "mine"
    assert presets.copy("tiny-ocr", tmp_path) == tmp_path / "tiny-ocr.yaml"


def test_a_copy_into_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        presets.copy("tiny-ocr", tmp_path / "no" / "x.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n", r"c\.yaml: the key 'algorithm' is missing; it says which verb runs this file"),
        ("a: 1\nalgorithm: grop\n", r"c\.yaml:2: there is no algorithm 'grop'; did you mean 'grpo'\?"),
        ("a: 1\nalgorithm: [grpo]\n", r"c\.yaml:2: there is no algorithm"),
    ],
)
def test_a_file_that_names_no_algorithm_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        presets.algorithm_of(tmp_path / "c.yaml")
