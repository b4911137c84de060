from __future__ import annotations

import json

import pytest

from flowkit.assemble.plan_distill import plan, told
from flowkit.cli.app import main
from flowkit.config.distill import DistillConfig
from flowkit.config.load import resolve
from flowkit.config.presets import find
from flowkit.errors import UsageError


def preset(name: str, *overrides: str) -> DistillConfig:
    return resolve(DistillConfig, find(name), list(overrides)).config


def test_the_plan_of_fourteen_billion_parameters_says_stages_times_turns_and_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["distill", "--preset", "wan-14b-lora", "--fd-type", "1", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["parameters"]["transformer"] == pytest.approx(14.3e9, rel=0.01)
    (stage,) = found["stages"]
    assert (stage["iterations"], stage["student"], stage["critic"]) == (6000, 600, 5400)
    assert found["student"]["thetas"][0] == pytest.approx(1.565796, abs=1e-6)  # atan 200
    assert found["derivative"]["fd_type"] == 1
    # one copy of the weights in bfloat16
    assert found["memory_bytes"]["weights"] == 2 * found["model"]["parameters"]["transformer"]
    assert "teacher" not in found["memory_bytes"]


def test_three_networks_hold_their_weights_three_times() -> None:
    one, three = (
        plan(preset("wan-14b-lora", f"networks={n}"), 1)["memory_bytes"] for n in ("one base", "three")
    )
    assert three["total"] - one["total"] == 2 * one["weights"]


def test_the_moments_of_the_one_that_waits_are_not_counted_when_they_are_parked() -> None:
    held, parked = (
        plan(preset("wan-14b-lora", f"optim.offload={o}"), 1)["memory_bytes"] for o in ("false", "true")
    )
    assert parked["total"] < held["total"]


def test_the_plan_of_full_weights_says_what_a_process_holds_in_shards() -> None:
    cfg = preset("wan-14b", "scm.fd_type=1")
    one, many = plan(cfg, 1), plan(cfg, 32)
    weights = one["model"]["parameters"]["transformer"]
    # three networks, a gradient, two moments of two, an average, all in float32
    split = ("trained", "gradients", "optimizer", "ema", "critic", "teacher")
    assert sum(one["memory_bytes"][name] for name in split) == 10 * 4 * weights
    for name in split:
        assert many["memory_bytes"][name] == pytest.approx(one["memory_bytes"][name] / 32, rel=1e-6)
    assert many["shards"]["memory_bytes"]["32"] == many["memory_bytes"]["total"]
    assert [*many["shards"]["memory_bytes"]] == ["8", "16", "32", "64"]
    text = told(many, as_json=False)
    assert "over 32 process(es)" in text
    assert "64: 3" in text
    assert plan(preset("wan-1.3b"), 2)["shards"] is None


def test_shards_need_as_many_samples_in_every_process() -> None:
    with pytest.raises(UsageError, match=r"batch 64 does not deal 5 processes .* use batch=65"):
        plan(preset("wan-14b"), 5)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("scm.fd_step=0.01", r"scm.fd_step: .* drowns in the rounding of bfloat16: use h >= 0.093"),
        ("size=832x480x80", "nearest"),
        ("size=830x480x81", "nearest legal size is 832x480x81"),
        ("eval.prompts=builtin:shape-test", "did you mean 'builtin:shapes-test'"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        plan(preset("wan-14b-lora", "scm.fd_type=1", override), 1)


def test_a_step_of_the_differences_below_the_dtype_names_one_that_would_do() -> None:
    with pytest.raises(UsageError) as error:
        plan(preset("tiny-flux-rcm", "scm.fd_type=2", "scm.fd_step=1.0e-9"), 1)
    named = float(str(error.value).split("use h >= ")[1].rstrip("."))
    assert (
        plan(preset("tiny-flux-rcm", "scm.fd_type=2", f"scm.fd_step={named}"), 1)["derivative"]["fd_step"]
        == named
    )
    # an exact derivative takes no step, so none is refused
    plan(preset("tiny-flux-rcm", "scm.fd_type=0", "scm.fd_step=1.0e-9"), 1)


def test_the_plan_is_told_in_a_few_lines() -> None:
    text = told(plan(preset("tiny-flux-rcm"), 2), as_json=False)
    assert "scm+dmd" in text
    assert "24 a process" in text
    assert len(text.splitlines()) < 15
