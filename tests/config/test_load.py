from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkit.config.load import dump, load_yaml, override, print_config, resolve
from flowkit.config.schema import GrpoConfig
from flowkit.config.strict_yaml import parse_document
from flowkit.errors import UsageError
from tests.config.small import SMALL


def config(*overrides: str) -> GrpoConfig:
    return resolve(GrpoConfig, parse_document(SMALL, "c.yaml"), overrides).config


def sources(*overrides: str) -> dict[str, str]:
    return dict(resolve(GrpoConfig, parse_document(SMALL, "c.yaml"), overrides).sources)


def refusal(*overrides: str, text: str = SMALL) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(GrpoConfig, parse_document(text, "c.yaml"), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_override_is_split_at_its_first_equals_sign() -> None:
    assert config("out=runs/a=b").out == "runs/a=b"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("steps=7", "steps", 7),
        ("gradient_checkpointing=true", "gradient_checkpointing", True),
        ("out='3'", "out", "3"),
        ("out=16:9", "out", "16:9"),
        ("out=on", "out", "on"),
        ("optim.betas=[0.5, 0.6]", "optim.betas", (0.5, 0.6)),
        ("lora.targets=[to_q, to_k]", "lora.targets", ("to_q", "to_k")),
        ("lora.path=null", "lora.path", None),
        ("rollout.guidance=2", "rollout.guidance", 2.0),
    ],
)
def test_override_values_have_the_types_of_the_file(text: str, key: str, value: Any) -> None:
    found: Any = config(text)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_the_last_of_two_overrides_holds() -> None:
    assert config("steps=4", "steps=5").steps == 5


def test_an_override_makes_the_blocks_that_it_needs() -> None:
    window = config("rollout.window.size=2", "rollout.window.hi=4").rollout.window
    assert window is not None
    assert (window.size, window.lo, window.hi) == (2, 0, 4)


def test_an_override_of_a_block_replaces_the_block() -> None:
    assert config("reward.jpeg=0.1").reward == {"ocr": 1.0, "jpeg": 0.1}
    assert config("reward={jpeg: 0.1}").reward == {"jpeg": 0.1}
    assert config("rollout.window={size: 1, hi: 2}", "rollout.window=null").rollout.window is None


def test_names_of_rewards_may_hold_dots() -> None:
    assert config("reward.my_pkg.mod:fn=0.5").reward == {"ocr": 1.0, "my_pkg.mod:fn": 0.5}


def test_every_value_knows_its_source() -> None:
    found = sources("steps=4", "reward.jpeg=0.1", "rollout.window={size: 2, hi: 3}")
    assert found["model"] == "c.yaml:2"
    assert found["rollout.samples"] == "c.yaml:9"
    assert found["optim.lr"] == "c.yaml:12"
    assert found["optim.eps"] == "default"
    assert found["seed"] == "default"
    assert found["steps"] == "override"
    assert found["reward.ocr"] == "c.yaml:11"
    assert found["reward.jpeg"] == "override"
    assert found["rollout.window.size"] == "override"
    assert found["rollout.window.lo"] == "default"


def test_a_block_that_was_replaced_forgets_the_lines_of_the_file() -> None:
    text = SMALL + "ema:\n  decay: 0.5\n  interval: 2\n"
    found = resolve(GrpoConfig, parse_document(text, "c.yaml"), ["ema={decay: 0.6}"]).sources
    assert (found["ema.decay"], found["ema.interval"]) == ("override", "default")


def test_the_document_given_is_not_changed_by_overrides() -> None:
    document = parse_document(SMALL, "c.yaml")
    resolve(GrpoConfig, document, ["steps=9", "rollout.groups=4"])
    assert (document.data["steps"], document.data["rollout"]["groups"]) == (3, 2)


def test_print_config_shows_every_value_with_its_source_and_is_yaml_itself() -> None:
    resolved = resolve(GrpoConfig, parse_document(SMALL, "c.yaml"), ["steps=4"])
    text = print_config(resolved)
    assert re.search(r"^steps: 4 +# override$", text, re.M)
    assert re.search(r"^  samples: 4 +# c.yaml:9$", text, re.M)
    assert re.search(r"^  eps: 1.0e-08 +# default$", text, re.M)
    assert len(re.findall("  # ", text)) == len(resolved.sources)
    assert resolve(GrpoConfig, parse_document(text, "again")).config == resolved.config


@settings(deadline=None, max_examples=20)  # the machine may be busy
@given(
    st.floats(min_value=1e-300, max_value=10),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.floats(1e-3, 1e3), min_size=1
    ),
)
def test_what_dump_writes_reads_back_bit_for_bit(lr: float, out: str, reward: dict[str, float]) -> None:
    before = config(override("optim.lr", lr), override("out", out), override("reward", reward))
    assert (before.optim.lr, before.out, before.reward) == (lr, out, reward)
    assert resolve(GrpoConfig, parse_document(dump(before), "again")).config == before


def test_a_file_is_read_from_disk_and_named_by_the_path_below_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    assert load_yaml(tmp_path / "c.yaml").name == "c.yaml"
    assert resolve(GrpoConfig, tmp_path / "c.yaml").config == config()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stepz: 3", "c.yaml:13: unknown key 'stepz'; did you mean 'steps'?"),
        ("lr: 3", "c.yaml:13: unknown key 'lr'; did you mean 'optim.lr'?"),
        ("ema: {decai: 1}", "c.yaml:13: unknown key 'ema.decai'; did you mean 'ema.decay'?"),
        ("ema: {zzz: 1}", "c.yaml:13: unknown key 'ema.zzz'; there are: decay, interval"),
        ("ema: 3", "c.yaml:13: 'ema' needs keys below it (decay, interval), not 3"),
        ("ema:", "c.yaml:13: 'ema' needs keys below it (decay, interval), not null"),
        ("ema: {decay: 2}", "c.yaml:13: 'ema.decay' is 2, it must be less than 1"),
        ("seed: 1.5", "c.yaml:13: 'seed' is 1.5, it must be a whole number"),
        ("seed: true", "c.yaml:13: 'seed' is true, it must be a whole number"),
        ("seed: '3'", "c.yaml:13: 'seed' is '3', it must be a whole number"),
        ("dtype: 3", "c.yaml:13: 'dtype' is 3, it must be float32, bfloat16"),
        (
            "dtype: float23",
            "c.yaml:13: 'dtype' is float23, it must be float32, bfloat16; did you mean 'float32'?",
        ),
        ("max_failed: .nan", "c.yaml:13: 'max_failed' is .nan, it must be a finite number"),
        (
            "gradient_checkpointing: yes",
            "c.yaml:13: 'gradient_checkpointing' is yes, it must be true or false",
        ),
        (
            "report_to: [tensorbord]",
            "c.yaml:13: 'report_to' is tensorbord, it must be tensorboard, wandb, trackio; "
            "did you mean 'tensorboard'?",
        ),
        (
            "lora: {targets: x}",
            "c.yaml:13: 'lora.targets' is x, it must be attention, attention+ff or a list",
        ),
        (
            "lora: {targets: []}",
            "c.yaml:13: 'lora.targets' is [], it must be attention, attention+ff or one entry at least",
        ),
        (
            "lora: {alpha: 0, rank: 0}",
            "c.yaml:13: 'lora.rank' is 0, it must be 1 or more (and 1 more wrong value)",
        ),
    ],
)
def test_a_wrong_line_gives_place_key_value_and_fix(line: str, message: str) -> None:
    assert refusal(text=f"{SMALL}{line}\n") == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps", "override 'steps': an override is KEY=VALUE, such as steps=10"),
        ("stepz=1", "override 'stepz=1': unknown key 'stepz'; did you mean 'steps'?"),
        (
            "rollout.grops=1",
            "override 'rollout.grops=1': unknown key 'rollout.grops'; did you mean 'rollout.groups'?",
        ),
        ("=1", "override '=1': unknown key ''; there are: "),
        ("steps.x=1", "override 'steps.x=1': 'steps' holds one value and has no keys below it"),
        ("steps=[", "override 'steps=[': not valid YAML"),
        ("steps={", "override 'steps={': not valid YAML"),
        ("steps=ten", "override 'steps=ten': 'steps' is ten, it must be a whole number"),
        ("steps=", "override 'steps=': 'steps' is null, it must be a whole number"),
        ("ema=3", "override 'ema=3': 'ema' needs keys below it (decay, interval), not 3"),
        ("ema={decai: 1}", "override 'ema={decai: 1}': unknown key 'ema.decai'; did you mean 'ema.decay'?"),
        ("optim.betas=[0.9]", "override 'optim.betas=[0.9]': 'optim.betas' has too few items"),
        ("optim.betas=[0, 0, 0]", "override 'optim.betas=[0, 0, 0]': 'optim.betas' has too many items"),
        ("reward={}", "override 'reward={}': 'reward' is {}, it must be one entry at least"),
        ("reward.ocr=x", "override 'reward.ocr=x': 'reward.ocr' is x, it must be a number"),
    ],
)
def test_a_wrong_override_names_itself_and_the_fix(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


def test_a_missing_key_is_named() -> None:
    assert refusal(text=SMALL.replace("out: runs/x\n", "")) == "c.yaml: the key 'out' is missing"
    assert refusal(text=SMALL.replace("lr: 1e-4, ", "")) == "c.yaml:12: the key 'optim.lr' is missing"


def test_a_rule_over_two_keys_points_at_the_override_that_broke_it() -> None:
    assert refusal("reward.ocr=0").startswith("override 'reward.ocr=0': every reward has weight 0")
