"""`flowkit grpo` as a user runs it, on tiny bundles of the real classes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.e2e import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def undisturbed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody kills; its folder."""
    folder = tmp_path_factory.mktemp("whole")
    done = runs.flowkit("grpo", "--config", runs.config(folder, str(bundle)))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_a_run_leaves_what_the_conventions_name(undisturbed: Path) -> None:
    names = {p.name for p in undisturbed.iterdir()}
    assert {"config.yaml", "env.json", "metrics.jsonl", "previews", "checkpoints", "report.html"} <= names
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["ratio_first"] == 1.0 for row in rows[1:])
    assert [row["step"] for row in rows if "eval/tests.e2e.bright:score_mean" in row] == [0, 2, 4]
    assert {p.name for p in (undisturbed / "previews").iterdir()} == {f"step-{n:06d}.png" for n in (0, 2, 4)}
    assert (undisturbed / "checkpoints" / "step-000004" / "pytorch_lora_weights.safetensors").exists()
    for name in ("loss", "grad_norm", "approx_kl", "clip_ratio/low_mean", "images/s", "step_time/reward"):
        assert name in rows[1]


@pytest.mark.parametrize(
    "patch",
    [runs.KILL_IN_UPDATE.format(call=1), runs.KILL_IN_UPDATE.format(call=6), runs.KILL_BEFORE_RENAME],
    ids=["in the first step", "in a later step", "between write and rename"],
)
def test_a_run_that_was_killed_ends_with_the_same_weights_bit_for_bit(
    patch: str, bundle: Path, undisturbed: Path, tmp_path: Path
) -> None:
    path = runs.config(tmp_path, str(bundle))
    killed = runs.flowkit("grpo", "--config", path, patch=patch)
    assert killed.returncode == -signal.SIGKILL
    again = runs.flowkit("grpo", "--config", path)
    assert again.returncode == 0, again.stderr
    mine, theirs = (
        runs.tensors(folder / "checkpoints" / "step-000004") for folder in (tmp_path / "run", undisturbed)
    )
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    rows = [
        json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == [0, 1, 2, 3, 4]


def test_two_processes_reach_the_weights_of_one(bundle: Path, undisturbed: Path, tmp_path: Path) -> None:
    path = runs.config(tmp_path, str(bundle))
    both = runs.flowkit("grpo", "--config", path, "--processes", 2)
    assert both.returncode == 0, both.stderr
    mine = runs.tensors(tmp_path / "run" / "checkpoints" / "step-000004")
    theirs = runs.tensors(undisturbed / "checkpoints" / "step-000004")
    for name, value in theirs.items():
        if not name.startswith("optimizer"):
            # gradients are summed in another order; four rounds of Adam with eps 1e-6
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-5)
    moved = [v.abs().max().item() for name, v in theirs.items() if "lora_B" in name and "raw" in name]
    assert max(moved) > 1e-3  # the weights have moved by far more than the tolerance


def test_two_processes_with_uneven_chunks_refills_history_and_full_weights_reach_the_weights_of_one(
    bundle: Path, tmp_path: Path
) -> None:
    ends = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        path = runs.config(
            folder,
            str(bundle),
            steps=3,
            train="full",
            reward={"tests.e2e.bright:odd_only": 1.0},
            rollout__groups=3,
            optim__micro=4,  # chunks of 4 and 2
            policy={"updates": 1, "refill": 2, "history": "run", "std": "global", "kl": 0.01},
            eval={"every": 99},
            preview={"every": 99},
        )
        for steps in (1, 3):  # the second command goes on from the first
            done = runs.flowkit("grpo", "--config", path, "--processes", processes, "--steps", steps)
            assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        assert max(row["frac_reward_zero_std"] for row in rows if "reward" in row) > 0  # there were refills
        checkpoint = folder / "run" / "checkpoints" / "step-000003"
        ends.append((runs.tensors(checkpoint), json.loads((checkpoint / "state.json").read_text()), rows))
    (one, state, rows), (two, state_of_two, rows_of_two) = ends
    assert state["history"]["count"] == state_of_two["history"]["count"]
    for name, value in one.items():
        if not name.startswith("optimizer"):
            # sums in another order, and Adam divides by the size of a gradient that may be rounding alone:
            # a weight may step lr = 1e-3 either way in each round, all but a few must agree
            apart = (two[name] - value).abs()
            assert apart.max() <= 3 * 2e-3
            assert (apart > 1e-5).float().mean() < 0.01
    for a, b in zip(rows, rows_of_two, strict=True):
        if "loss" in a:
            assert a["kl"] == pytest.approx(b["kl"], rel=0.01, abs=1e-9)
            assert a["reward"] == pytest.approx(b["reward"], rel=1e-4)


def test_the_checkpoint_of_a_run_is_a_lora_that_sample_takes(undisturbed: Path, tmp_path: Path) -> None:
    for name, extra in (("with", ["--lora", undisturbed / "checkpoints" / "step-000004"]), ("without", [])):
        model = [] if extra else ["--model", json.loads(_header(undisturbed))["base_model"]]
        done = runs.flowkit(
            "sample", "-p", "a", "--steps", 2, "--size", "32x32", "--out", tmp_path / name, *model, *extra
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "with" / "00000-0.png").read_bytes() != (
        tmp_path / "without" / "00000-0.png"
    ).read_bytes()


def test_sample_takes_steps_and_schedule_from_the_header_of_what_was_trained(
    undisturbed: Path, tmp_path: Path
) -> None:
    lora = undisturbed / "checkpoints" / "step-000004"
    for given, steps in (((), 3), (("--steps", 2), 2)):
        out = tmp_path / str(steps)
        done = runs.flowkit("sample", "-p", "a", "--size", "32x32", "--out", out, "--lora", lora, *given)
        assert done.returncode == 0, done.stderr
        assert json.loads((out / "recipe.json").read_text())["steps"] == steps


def _header(run: Path) -> str:
    from safetensors import safe_open

    file = run / "checkpoints" / "step-000004" / "pytorch_lora_weights.safetensors"
    with safe_open(file, "pt") as opened:
        return opened.metadata()["flowkit"]


def test_a_changed_config_is_refused_with_the_difference(bundle: Path, undisturbed: Path) -> None:
    path = undisturbed.parent / "config.yaml"
    refused = runs.flowkit("grpo", "--config", path, "rollout.level=0.5")
    assert refused.returncode == 2
    assert "rollout.level 0.7 -> 0.5" in refused.stderr
    further = runs.flowkit("grpo", "--config", path, "--steps", 5)
    assert further.returncode == 0, further.stderr
    assert (undisturbed / "checkpoints" / "step-000005").is_dir()


def test_the_resolved_config_of_a_run_is_the_same_run(
    bundle: Path, undisturbed: Path, tmp_path: Path
) -> None:
    done = runs.flowkit(
        "grpo", "--config", undisturbed / "config.yaml", "--out", tmp_path / "again", "--steps", 2
    )
    assert done.returncode == 0, done.stderr
    mine = runs.tensors(tmp_path / "again" / "checkpoints" / "step-000002")
    theirs = runs.tensors(undisturbed / "checkpoints" / "step-000002")
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_full_weights_of_sd3_with_true_guidance_and_a_reference_are_trained(tmp_path: Path) -> None:
    model = tiny.write_sd3(tmp_path / "sd3")
    path = runs.config(
        tmp_path,
        str(model),
        train="full",
        steps=2,
        rollout__guidance=2.0,
        policy__kl=0.01,
        policy__kl_kind="exact",
    )
    done = runs.flowkit("grpo", "--config", path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["ratio_first"] == rows[2]["ratio_first"] == 1.0
    assert rows[2]["kl"] > 0
    weights = tmp_path / "run" / "checkpoints" / "step-000002" / "transformer"
    drawn = runs.flowkit(
        "sample", "-p", "a", "--steps", 2, "--size", "32x32", "--weights", weights, "--out", tmp_path / "s"
    )
    assert drawn.returncode == 0, drawn.stderr


def test_a_wan_model_is_trained_on_clips_and_its_checkpoint_draws_one(tmp_path: Path) -> None:
    from PIL import Image

    from flowkit.runtime.clips import read_mp4

    model = tiny.write_wan(tmp_path / "wan")
    path = runs.config(
        tmp_path, str(model), size="32x32x5", steps=2, rollout__guidance=2.0, reward={"jpeg": 1.0}
    )
    done = runs.flowkit("grpo", "--config", path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["ratio_first"] == rows[2]["ratio_first"] == 1.0
    assert rows[2]["eval/jpeg_mean"] < 0
    with Image.open(tmp_path / "run" / "previews" / "step-000002.png") as preview:
        assert preview.n_frames == 5
    assert "previews/step-000002.png" in (tmp_path / "run" / "report.html").read_text()
    weights = tmp_path / "run" / "checkpoints" / "step-000002"
    assert max(v.abs().max().item() for n, v in runs.tensors(weights).items() if "lora_B" in n) > 1e-4
    drawn = runs.flowkit(
        "sample", "-p", "a", "--steps", 2, "--size", "32x48x5", "--lora", weights, "--out", tmp_path / "s"
    )
    assert drawn.returncode == 0, drawn.stderr
    assert read_mp4(tmp_path / "s" / "00000-0.mp4").shape == (5, 3, 48, 32)


def test_ctrl_c_finishes_the_step_saves_and_exits_130(bundle: Path, tmp_path: Path) -> None:
    patch = """
import os, signal
from flowkit.trainers.state import TrainState
real, calls = TrainState.update, []
def update(self):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return real(self)
TrainState.update = update
"""
    path = runs.config(tmp_path, str(bundle), checkpoint__every=100)
    stopped = runs.flowkit("grpo", "--config", path, patch=patch)
    assert stopped.returncode == 130, stopped.stderr
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]
    assert "Traceback" not in stopped.stderr
