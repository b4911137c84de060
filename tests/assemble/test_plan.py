from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowkit.assemble.common import harmless
from flowkit.assemble.plan import arithmetic, plan, told
from flowkit.cli.app import main
from flowkit.config.load import resolve
from flowkit.config.presets import algorithm_of, find, names
from flowkit.config.schema import GrpoConfig
from flowkit.errors import UsageError, UserError
from flowkit.models.weights import LORA_FILE


def preset(name: str, *overrides: str) -> GrpoConfig:
    return resolve(GrpoConfig, find(name), list(overrides)).config


@pytest.mark.parametrize("name", names())
def test_every_preset_has_a_plan_without_its_weights(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb = algorithm_of(find(name))
    if name == "tiny-student-ocr":  # its student is what another preset makes
        assert main([verb, "--preset", name, "--dry-run"]) == 1
        assert "tiny-flux-rcm" in capsys.readouterr().err
        return
    assert main([verb, "--preset", name, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    schedule = found["schedule"] if verb == "grpo" else found["teacher"]["schedule"]
    assert (schedule[0], schedule[-1]) == (1.0, 0.0)
    assert found["memory_bytes"]["total"] > 0


def test_the_arithmetic_of_a_round_counts_pictures_chunks_and_calls() -> None:
    cfg = preset("flux-ocr")
    found = arithmetic(cfg, 1)
    assert found["pictures"] == 48 * 24
    assert found["pictures_per_optimizer_step"] == 576
    assert found["trained_steps_per_trajectory"] == 5
    assert found["chunks_per_optimizer_step"] == 576 // cfg.optim.micro
    assert found["rollout_calls_of_micro"] == 2 * 576 // cfg.optim.micro * 6


def test_chunks_that_do_not_share_out_are_said_with_a_micro_that_does() -> None:
    cfg = preset("tiny-ocr", "rollout.groups=2", "rollout.samples=6", "policy.updates=1", "optim.micro=12")
    assert arithmetic(cfg, 1).get("uneven") is None
    uneven = arithmetic(cfg, 2)["uneven"]
    assert "1 chunks" in uneven
    micro = int(uneven.split("optim.micro=")[1].split()[0])
    assert "uneven" not in arithmetic(preset("tiny-ocr", "rollout.groups=2", "rollout.samples=6",
                                             "policy.updates=1", f"optim.micro={micro}"), 2)  # fmt: skip


def test_flux_is_as_large_as_flux_is() -> None:
    found = plan(preset("flux-ocr"), 8)
    assert found["model"]["parameters"]["transformer"] == pytest.approx(11.9e9, rel=0.01)
    assert found["memory_bytes"]["weights"] == 2 * found["model"]["parameters"]["transformer"]
    assert found["schedule"] == pytest.approx(
        [1.0, 0.903736, 0.78970, 0.652489, 0.484218, 0.273003, 0], abs=1e-5
    )


def test_two_velocities_a_call_take_twice_the_activations() -> None:
    once, twice = (plan(preset("sd3-ocr", f"rollout.guidance={g}"), 1)["memory_bytes"] for g in (1.0, 4.5))
    assert twice["activations"] == 2 * once["activations"]


def test_a_resumed_run_may_change_its_length_only_where_the_rate_does_not_depend_on_it() -> None:
    decaying = preset("tiny-ocr", "optim.decay=linear")
    assert "steps" not in harmless(decaying.optim)
    assert harmless(preset("tiny-ocr", "optim.decay=none").optim) == {*harmless(decaying.optim), "steps"}


def test_a_dry_run_refuses_a_lora_that_is_not_there_and_a_tracker_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"pytorch_lora_weights.safetensors"):
        plan(preset("flux-ocr", f"lora.path={tmp_path}"), 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"report_to: trackio is not installed"):
        plan(preset("tiny-ocr", "report_to=[trackio]"), 1)


def test_a_dry_run_refuses_a_lora_of_another_family(tmp_path: Path) -> None:
    header = {"flowkit": json.dumps({"kind": "lora", "family": "sd3", "base_model": "another"})}
    save_file({"transformer.x.lora_A.weight": torch.ones(1, 1)}, tmp_path / LORA_FILE, header)
    with pytest.raises(UserError, match=r"holds lora weights of family sd3 for base another"):
        plan(preset("flux-ocr", f"lora.path={tmp_path}"), 1)


def test_a_dry_run_remarks_on_texts_that_stand_twice(tmp_path: Path) -> None:
    file = tmp_path / "twice.txt"
    file.write_text('"CAT"\n"DOG"\n"CAT"\n"CAT"\n', encoding="utf-8")
    found = plan(preset("tiny-ocr", f"prompts.train={file}", "rollout.groups=2", "policy.updates=1"), 1)
    assert len(found["prompts"]["remarks"]) == 2
    assert "twice.txt:3: the same text as in" in told(found, as_json=False)
    assert "(and 1 more)" in told(found, as_json=False)
