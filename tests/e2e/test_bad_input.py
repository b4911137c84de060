"""What goes wrong before or in a run is one sentence, an exit code, and nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowkit.cli.app import main
from tests import tiny
from tests.e2e import runs


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_flux(tmp_path_factory.mktemp("flux"))


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """Run a command line that has to fail: its one sentence."""
    assert main([str(a) for a in arguments]) == code
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["grpo"], "Give one of --preset NAME and --config FILE"),
        (["grpo", "--preset", "tiny-orc"], "did you mean 'tiny-ocr'"),
        (["grpo", "--preset", "tiny-ocr", "reward={ocl: 1.0}", "--dry-run"], "did you mean 'ocr'"),
        (["grpo", "--preset", "tiny-ocr", "rollout.law=flow-sd", "--dry-run"], "rollout.law"),
        (["grpo", "--preset", "tiny-ocr", "size=100x32", "--dry-run"], "nearest legal size is 96x32"),
        (["grpo", "--preset", "tiny-ocr", "--steps", "0", "--dry-run"], "steps"),
        (["grpo", "--preset", "tiny-ocr-fast", "rollout.steps=2", "--dry-run"], "window"),
        (["grpo", "--preset", "tiny-ocr", "rollout.samples=1", "--dry-run"], "rollout.samples"),
        (["grpo", "--preset", "tiny-ocr", "optim.lrr=1", "--dry-run"], "did you mean"),
        (["grpo", "--preset", "tiny-ocr", "--config", "x.yaml"], "Give one of"),
        (["sample"], "Give prompts by --prompt"),
        (["sample", "-p", "a", "--steps", "0"], "at least 1 step"),
        (["sample", "-p", "a", "--law", "flowsde"], "did you mean 'flow-sde'"),
        (
            ["sample", "-p", "a", "--size", "100x32", "--model", "builtin:tiny-flux"],
            "nearest legal size is 96x32",
        ),
        (["sample", "-p", " "], "the prompt is empty"),
        (["sample", "-p", "a", "--size", "abc"], "--size: size 'abc' is not WIDTHxHEIGHT"),
        (["sample", "-p", "a", "--size", "96x32", "--resolution", "480p"], "one of --size and --resolution"),
        (["sample", "-p", "a", "--resolution", "480"], "did you mean '480p'"),
        (["sample", "-p", "a", "--resolution", "480p", "--aspect", "16x9"], "did you mean '16:9'"),
        (["sample", "-p", "a", "--aspect", "16:9"], "--aspect goes with --resolution"),
        (["sample", "-p", "a", "--size", "96x32x5", "--frames", "9"], "say different numbers of frames"),
        (["sample", "-p", "a", "--frames", "5"], "draws single pictures"),
        (["sample", "-p", "a", "--fps", "5"], "--fps goes with clips"),
        (["sample", "-p", "a", "--law", "cps", "--noise-level", "3"], "law cps takes at most 1"),
        (["sample", "-p", "a", "--law", "consistency", "--noise-level", "1"], "has no noise level"),
        (["sample", "-p", "a", "--schedule", "static"], "--schedule static needs --shift"),
        (["sample", "-p", "a", "--schedule", "power"], "needs smin"),
        (["sample", "-p", "a", "--model", "builtin:tiny-flix"], "did you mean builtin:tiny-flux"),
        (["sample", "-p", "a", "--noise-level", "0.5"], "--noise-level goes with a noisy law"),
        (["sample", "--prompts", "no/such.txt"], "no such prompt file"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, 2, *arguments)


def test_fewer_prompts_than_groups_are_refused_before_the_run(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.config(tmp_path, str(bundle), rollout__groups=8)
    for extra in ([], ["--dry-run"]):
        assert "use rollout.groups=6" in refused(capsys, 2, "grpo", "--config", path, *extra)
    assert not (tmp_path / "run").exists()


def test_a_prompt_without_a_target_stops_before_the_run(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.config(tmp_path, str(bundle), reward={"ocr": 1.0})
    (tmp_path / "train.txt").write_text('a "B"\nno target here\n' * 3)
    assert "train.txt:2" in refused(capsys, 2, "grpo", "--config", path)
    assert not (tmp_path / "run").exists()


def broken_loras(folder: Path) -> dict[str, tuple[Path, str]]:
    """File kinds that people hand over as a LoRA, and what is said of each."""
    good = {
        "transformer.x_embedder.lora_A.weight": torch.zeros(2, 64),
        "transformer.x_embedder.lora_B.weight": torch.zeros(32, 2),
    }
    save_file(good, folder / "whole.safetensors")
    whole = (folder / "whole.safetensors").read_bytes()
    contents = {
        "empty": (b"", "empty"),
        "truncated": (whole[:-100], "truncated"),
        "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "LFS"),
        "pickle": (b"\x80\x02}q\x00." + b"0" * 100, "pickle"),
        "html": (b"<!DOCTYPE html><html></html>" + b" " * 100, "HTML"),
    }
    found = {}
    for name, (data, word) in contents.items():
        (folder / f"{name}.safetensors").write_bytes(data)
        found[name] = (folder / f"{name}.safetensors", word)
    save_file({k.replace("x_embedder", "nowhere"): v for k, v in good.items()}, folder / "lost.safetensors")
    save_file({k: v * torch.nan for k, v in good.items()}, folder / "nan.safetensors")
    found["lost"] = (folder / "lost.safetensors", "match no layer")
    found["nan"] = (folder / "nan.safetensors", "nan")
    found["missing"] = (folder / "missing.safetensors", "does not exist")
    return found


def test_every_broken_lora_is_named_and_draws_nothing(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (path, word) in broken_loras(tmp_path).items():
        out = tmp_path / f"out-{name}"
        error = refused(
            capsys, 1, "sample", "-p", "a", "--model", bundle, "--size", "32x32", "--lora", path, "--out", out
        )
        assert path.name in error
        assert word in error, (name, error)
        assert not list(out.glob("*.png"))


def test_pictures_are_not_overwritten_without_force(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["sample", "-p", "a", "--model", bundle, "--size", "32x32", "--steps", 1, "--out", tmp_path / "s"]
    assert main([str(a) for a in ask]) == 0
    capsys.readouterr()
    assert "--force" in refused(capsys, 2, *ask)
    (tmp_path / "s" / "2024-12.png").write_bytes(b"a holiday")
    assert main([str(a) for a in [*ask, "--force"]]) == 0
    assert (tmp_path / "s" / "2024-12.png").read_bytes() == b"a holiday"  # no manifest names it


def test_a_folder_that_cannot_be_written_is_said(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    error = refused(
        capsys, 1, "sample", "-p", "a", "--model", bundle, "--size", "32x32", "--out", tmp_path / "file" / "s"
    )
    assert str(tmp_path / "file") in error


def test_a_full_disk_ends_a_run_in_one_sentence_and_keeps_what_is_there(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import errno

    from flowkit.trainers.state import TrainState

    saved, real = [], TrainState.save

    def save(self: TrainState, folder: Path) -> None:
        if saved:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "optimizer.safetensors"))
        saved.append(folder)
        real(self, folder)

    monkeypatch.setattr(TrainState, "save", save)
    monkeypatch.chdir(runs.ROOT)
    error = refused(capsys, 1, "grpo", "--config", runs.config(tmp_path, str(bundle), steps=3))
    assert "No space left" in error
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if "partial" not in p.name] == [
        "step-000001"
    ]


def test_a_model_that_is_not_here_names_the_way_to_get_it_and_what_runs_now(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = refused(capsys, 1, "grpo", "--preset", "flux-ocr", "--out", tmp_path / "run")
    assert "black-forest-labs/FLUX.1-dev" in error
    assert "hf download" in error
    assert "--preset tiny-ocr" in error
    assert not (tmp_path / "run").exists()
