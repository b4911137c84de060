"""`flowkit distill` as a user runs it, on tiny bundles of the real classes, and the students that it leaves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests import tiny
from tests.e2e import runs

pytestmark = pytest.mark.slow
LAST = "step-000007"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def undisturbed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody kills, through three stages; its folder."""
    folder = tmp_path_factory.mktemp("whole")
    done = runs.flowkit("distill", "--config", runs.distill_config(folder, str(bundle)))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_a_run_leaves_what_the_conventions_name(undisturbed: Path) -> None:
    names = {p.name for p in undisturbed.iterdir()}
    assert {"config.yaml", "env.json", "metrics.jsonl", "previews", "checkpoints", "report.html"} <= names
    rows = runs.rows_of(undisturbed)
    assert [row["step"] for row in rows] == list(range(8))
    mean = "tests.e2e.bright:score_mean"
    assert {f"eval/teacher-3_{mean}", f"eval/teacher-1_{mean}"} <= rows[0].keys()
    for n in (1, 2):
        assert [row["step"] for row in rows if f"eval/student-{n}_{mean}" in row] == [0, 4, 7]
    assert {p.name for p in (undisturbed / "previews").iterdir()} == {f"step-{n:06d}.png" for n in (0, 4, 7)}


def test_the_stages_follow_each_other_and_the_critic_has_its_turns_in_the_last(undisturbed: Path) -> None:
    rows = runs.rows_of(undisturbed)[1:]
    assert [sorted(k for k in row if k.startswith("loss/")) for row in rows] == [
        ["loss/consistency"],
        ["loss/consistency"],
        ["loss/consistency"],
        ["loss/consistency", "loss/dmd"],
        ["loss/fake"],
        ["loss/consistency", "loss/dmd"],
        ["loss/fake"],
    ]
    for row in rows:
        assert row["frac_dropped"] == 0.0
        if "loss/consistency" in row:
            assert {"g_norm", "cos_g", "grad_norm"} <= row.keys()
    probes = [row["probe/J_error"] for row in rows if "probe/J_error" in row]
    # a difference in float32 at its best step: percents, not parts of ten thousand
    assert len(probes) == 1
    assert 0 < probes[0] < 0.3


@pytest.mark.parametrize(
    "patch",
    [runs.KILL_IN_UPDATE.format(call=1), runs.KILL_IN_UPDATE.format(call=6), runs.KILL_BEFORE_RENAME],
    ids=["in the first step", "in a critic's step", "between write and rename"],
)
def test_a_run_that_was_killed_ends_with_the_same_weights_bit_for_bit(
    patch: str, bundle: Path, undisturbed: Path, tmp_path: Path
) -> None:
    quiet = {"eval__every": 99, "preview__every": 99}
    path = runs.distill_config(tmp_path, str(bundle), **quiet)
    killed = runs.flowkit("distill", "--config", path, patch=patch)
    assert killed.returncode == -signal.SIGKILL
    again = runs.flowkit("distill", "--config", path)
    assert again.returncode == 0, again.stderr
    mine, theirs = (runs.tensors(folder / "checkpoints" / LAST) for folder in (tmp_path / "run", undisturbed))
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert [row["step"] for row in runs.rows_of(tmp_path / "run")] == list(range(8))


def test_two_processes_reach_the_weights_of_one(bundle: Path, undisturbed: Path, tmp_path: Path) -> None:
    path = runs.distill_config(tmp_path, str(bundle))
    both = runs.flowkit("distill", "--config", path, "--processes", 2)
    assert both.returncode == 0, both.stderr
    mine = runs.tensors(tmp_path / "run" / "checkpoints" / LAST)
    theirs = runs.tensors(undisturbed / "checkpoints" / LAST)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if not name.startswith(("optimizer", "fake/optimizer")):
            # gradients are summed in another order; at most five steps of Adam with eps 1e-6
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-5)
    for part in ("raw", "fake/fake"):
        moved = [v.abs().max().item() for n, v in theirs.items() if n.startswith(part) and "lora_B" in n]
        assert max(moved) > 1e-3  # the weights have moved by far more than the tolerance
    for a, b in zip(runs.rows_of(tmp_path / "run"), runs.rows_of(undisturbed), strict=True):
        assert a.keys() == b.keys()
        # times are times, and the probe is of the samples that the first process holds
        for name in a.keys() - {"step_time", "step_time/train", "images/s", "probe/J_error"}:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


FULL: dict[str, object] = {"train": "full", "networks": "three", "preview__every": 99}


def test_two_processes_with_shards_reach_the_weights_of_one_without(
    bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found, folders = {}, {}
    for name, changes, extra in (
        ("alone", {}, ()),
        ("shards", {"shard": True}, ("--processes", 2)),
        ("resumed", {"shard": True}, ("--processes", 2)),
    ):
        folders[name] = tmp_path_factory.mktemp(name)
        path = runs.distill_config(folders[name], str(bundle), **{**FULL, **changes})
        made = runs.flowkit("distill", "--config", path, "--make-data")
        assert made.returncode == 0, made.stderr
        if name == "resumed":
            first = runs.flowkit("distill", "--config", path, "--steps", 4, *extra)
            assert first.returncode == 0, first.stderr
        done = runs.flowkit("distill", "--config", path, *extra)
        assert done.returncode == 0, done.stderr
        found[name] = runs.tensors(folders[name] / "run" / "checkpoints" / LAST)
    alone, shards, resumed = (found[name] for name in ("alone", "shards", "resumed"))
    assert alone.keys() == shards.keys() == resumed.keys()
    assert [name for name in shards if not torch.equal(shards[name], resumed[name])] == []
    start = load_file(bundle / "transformer" / "diffusion_pytorch_model.safetensors")
    moved = 0.0
    for name, value in alone.items():
        if "optimizer" in name:
            continue
        # gradients are summed in another order; at most five steps of Adam with eps 1e-6
        torch.testing.assert_close(shards[name], value, rtol=0, atol=1e-5)
        if name.startswith("raw/"):
            moved = max(moved, (value - start[name.split(":")[1]]).abs().max().item())
    assert moved > 1e-3  # by far more than the tolerance
    for a, b in zip(
        runs.rows_of(folders["shards"] / "run"), runs.rows_of(folders["alone"] / "run"), strict=True
    ):
        assert a.keys() == b.keys()
        for name in a.keys() - {"step_time", "step_time/train", "images/s", "probe/J_error"}:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


def test_the_student_is_sampled_with_nothing_but_its_file(undisturbed: Path, tmp_path: Path) -> None:
    student = undisturbed / "checkpoints" / LAST / "pytorch_lora_weights.safetensors"
    seen = set()
    for name, extra in (("own", []), ("one", ["--steps", 1]), ("raw", [])):
        place = student.parent / "raw" / student.name if name == "raw" else student
        done = runs.flowkit("sample", "-p", "a", "--student", place, "--out", tmp_path / name, *extra)
        assert done.returncode == 0, done.stderr
        recipe = json.loads((tmp_path / name / "recipe.json").read_text())
        assert (recipe["law"], recipe["schedule"]) == ("consistency", "student")
        assert recipe["steps"] == (1 if name == "one" else 4)
        seen.add((tmp_path / name / "00000-0.png").read_bytes())
    assert len(seen) == 3


def test_a_student_is_sampled_by_the_times_that_are_asked_for(undisturbed: Path, tmp_path: Path) -> None:
    student = undisturbed / "checkpoints" / LAST
    asked = ["--sigma-max", "20", "--thetas", "1.3,0.9", "--steps", "3"]
    done = runs.flowkit("sample", "-p", "a", "--student", student, "--out", tmp_path / "s", *asked)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "s" / "recipe.json").read_text())["settings"]
    assert settings == {"sigma_max": 20.0, "thetas": [1.3, 0.9]}


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--guidance", "5"], "is distilled into it"),
        (["--steps", "5"], "has times for 1 to 4 steps"),
        (["--thetas", "1.0,1.4"], "thetas"),
        (["--law", "flow-sde"], "--law does not go with --student"),
    ],
)
def test_a_student_refuses_what_would_be_silently_wrong(
    extra: list[str], sentence: str, undisturbed: Path, tmp_path: Path
) -> None:
    student = undisturbed / "checkpoints" / LAST
    done = runs.flowkit("sample", "-p", "a", "--student", student, "--out", tmp_path / "s", *extra)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert not (tmp_path / "s").exists()


def test_a_student_goes_onto_its_own_base_alone(bundle: Path, undisturbed: Path, tmp_path: Path) -> None:
    other = tiny.write_flux(tmp_path / "other", seed=1)
    student = undisturbed / "checkpoints" / LAST
    done = runs.flowkit("sample", "-p", "a", "--student", student, "--model", other, "--out", tmp_path / "s")
    assert done.returncode == 1
    assert "give its own base by --model" in done.stderr
    file = load_file(student / "pytorch_lora_weights.safetensors")
    from safetensors.torch import save_file

    save_file(file, tmp_path / "pytorch_lora_weights.safetensors", {"format": "pt"})
    nameless = tmp_path / "pytorch_lora_weights.safetensors"
    done = runs.flowkit("sample", "-p", "a", "--student", nameless, "--out", tmp_path / "s")
    assert done.returncode == 1
    assert "does not say what it holds" in done.stderr


def test_making_the_data_goes_on_where_it_was_killed(bundle: Path, undisturbed: Path, tmp_path: Path) -> None:
    path = runs.distill_config(tmp_path, str(bundle))
    kill = """
import os
from flowkit.assemble import latents
real, calls = latents.write_shard, []
def write(*a, **k):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), 9)
    return real(*a, **k)
latents.write_shard = write
"""
    killed = runs.flowkit("distill", "--config", path, "--make-data", patch=kill)
    assert killed.returncode == -signal.SIGKILL
    first = tmp_path / "latents" / "shard-00000.safetensors"
    before = first.stat().st_mtime_ns
    for processes in (1, 2):
        again = runs.flowkit("distill", "--config", path, "--make-data", "--processes", processes)
        assert again.returncode == 0, again.stderr
    assert first.stat().st_mtime_ns == before
    for k in range(2):
        name = f"shard-{k:05d}.safetensors"
        theirs = undisturbed.parent / "latents" / name
        assert torch.equal(load_file(tmp_path / "latents" / name)["latents"], load_file(theirs)["latents"])
    other = runs.flowkit("distill", "--config", path, "--make-data", "teacher.guidance=5")
    assert other.returncode == 1
    assert "was made with another recipe" in other.stderr


@pytest.mark.parametrize("family", ["sd3", "wan"])
def test_three_networks_with_full_weights_distil_true_guidance(family: str, tmp_path: Path) -> None:
    write, size = (tiny.write_sd3, "32x32") if family == "sd3" else (tiny.write_wan, "32x32x5")
    path = runs.distill_config(
        tmp_path,
        str(write(tmp_path / family)),
        train="full",
        networks="three",
        size=size,
        steps=3,
        stages={"scm+dmd": 3},
        optim__offload=True,
        gradient_checkpointing=True,
        scm__fd_type=1,
        reward={},
    )
    done = runs.flowkit("distill", "--config", path)
    assert done.returncode == 0, done.stderr
    student = tmp_path / "run" / "checkpoints" / "step-000003" / "transformer"
    drawn = runs.flowkit("sample", "-p", "a", "--student", student, "--out", tmp_path / "s")
    assert drawn.returncode == 0, drawn.stderr  # at the size that it was trained on
    made = next((tmp_path / "s").glob("00000-0.*"))
    assert made.suffix == (".png" if family == "sd3" else ".mp4")


def test_prompts_alone_are_enough_for_dmd(bundle: Path, tmp_path: Path) -> None:
    data = {"kind": "prompts", "prompts": str(tmp_path / "train.txt")}
    path = runs.distill_config(tmp_path, str(bundle), data=data, stages={"dmd": 3}, steps=3)
    done = runs.flowkit("distill", "--config", path)
    assert done.returncode == 0, done.stderr
    assert [("loss/dmd" in row, "loss/fake" in row) for row in runs.rows_of(tmp_path / "run")[1:]] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    refused = runs.flowkit("distill", "--config", path, "stages={scm: 3}")
    assert refused.returncode == 2
    assert "nothing for stage 'scm' to noise" in refused.stderr


def test_a_folder_of_pictures_is_encoded_once(bundle: Path, tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    rng = np.random.default_rng(0)
    for k in range(3):
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(media / f"{k}.png")
    (media / "prompts.txt").write_text("a\nb\nc\n", encoding="utf-8")
    path = runs.distill_config(
        tmp_path,
        str(bundle),
        data={"kind": "media", "path": str(media), "prompts": str(media / "prompts.txt"), "shard": 2},
        stages={"scm": 2},
        steps=1,
    )
    times = []
    for steps in (1, 2):
        done = runs.flowkit("distill", "--config", path, "--steps", steps)
        assert done.returncode == 0, done.stderr
        shards = sorted(media.glob("latents-flux-32x32/*.safetensors"))
        assert [p.name for p in shards] == ["shard-00000.safetensors", "shard-00001.safetensors"]
        times.append([os.stat(p).st_mtime_ns for p in shards])
    assert times[0] == times[1]
    Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(media / "3.png")
    (media / "prompts.txt").write_text("a\nb\nc\nd\n", encoding="utf-8")
    other = runs.flowkit("distill", "--config", path, "--steps", 2)
    assert other.returncode == 2
    assert "data.path" in other.stderr


NAN = """
from flowkit.models import latents
real = latents.Latents.__getitem__
def get(self, rows):
    found = real(self, rows)
    bad = [k for k, row in enumerate(rows) if {which}]
    found[bad] = float("nan")
    return found
latents.Latents.__getitem__ = get
"""


def test_a_sample_that_is_not_finite_is_dropped_and_counted(bundle: Path, tmp_path: Path) -> None:
    path = runs.distill_config(tmp_path, str(bundle), stages={"scm": 2}, steps=2, max_dropped=0.5)
    done = runs.flowkit("distill", "--config", path, patch=NAN.format(which="row == 0"))
    assert done.returncode == 0, done.stderr
    # 8 latents, 4 an iteration: latent 0 comes once in two iterations
    assert sorted(row["frac_dropped"] for row in runs.rows_of(tmp_path / "run")[1:]) == [0.0, 0.25]
    weights = runs.tensors(tmp_path / "run" / "checkpoints" / "step-000002")
    assert all(value.isfinite().all() for value in weights.values())


def test_nothing_but_nans_stops_the_run_and_keeps_the_last_checkpoint(bundle: Path, tmp_path: Path) -> None:
    path = runs.distill_config(tmp_path, str(bundle), stages={"scm": 3}, steps=1)
    assert runs.flowkit("distill", "--config", path).returncode == 0
    before = runs.tensors(tmp_path / "run" / "checkpoints" / "step-000001")
    stopped = runs.flowkit("distill", "--config", path, "--steps", 3, patch=NAN.format(which="True"))
    assert stopped.returncode == 1
    assert "iteration 2: 100% of the samples were not finite" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    after = runs.tensors(tmp_path / "run" / "checkpoints" / "step-000001")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def rl_config(folder: Path, model: Path, student: object, **changes: object) -> Path:
    rollout = {"groups": 4, "samples": 2, "steps": 2, "guidance": 2.0, "law": "consistency"}
    policy = {"updates": 1, "kl": 0.01}
    return runs.config(
        folder,
        str(model),
        student=str(student),
        rollout=rollout,
        policy=policy,
        steps=2,
        ema={"interval": 1},
        **changes,
    )


def test_a_student_is_trained_further_by_rl_and_stays_a_student(
    bundle: Path, undisturbed: Path, tmp_path: Path
) -> None:
    path = rl_config(tmp_path, bundle, undisturbed)
    for steps in (1, 2):
        done = runs.flowkit("grpo", "--config", path, "--steps", steps)
        assert done.returncode == 0, done.stderr
    rows = runs.rows_of(tmp_path / "run")
    assert [row["ratio_first"] for row in rows[1:]] == [1.0, 1.0]
    # the reference is the student as it came, not the teacher: before the first update nothing is apart
    assert rows[1]["kl"] == 0 < rows[2]["kl"]
    trained = tmp_path / "run" / "checkpoints" / "step-000002"
    before = load_file(undisturbed / "checkpoints" / LAST / "pytorch_lora_weights.safetensors")
    after = load_file(trained / "pytorch_lora_weights.safetensors")
    assert after.keys() == before.keys()
    moved = max((after[n] - v).abs().max().item() for n, v in before.items())
    assert 0 < moved < 0.1  # from where the student was, not from a new LoRA
    pictures = []
    for name, student in (("rl", trained), ("run folder", tmp_path / "run"), ("before", undisturbed)):
        drawn = runs.flowkit(
            "sample", "-p", "a", "--steps", 2, "--student", student, "--out", tmp_path / name
        )
        assert drawn.returncode == 0, drawn.stderr
        with Image.open(tmp_path / name / "00000-0.png") as picture:
            pictures.append(picture.tobytes())
    assert pictures[0] == pictures[1] != pictures[2]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train=full", "holds lora weights, but train is full: use train=lora"),
        ("rollout.guidance=1", "use rollout.guidance=2"),
        ("rollout.law=flow-sde", "use rollout.law=consistency"),
        ("rollout.schedule={name: static, shift: 3.0}", "a student has times of its own"),
        ("rollout.steps=5", "samples in 1 to 4 steps"),
        ("lora.path=x", "brings its own weights"),
    ],
)
def test_rl_of_a_student_refuses_another_sampler(
    override: str, sentence: str, bundle: Path, undisturbed: Path, tmp_path: Path
) -> None:
    for extra in ([], ["--dry-run"]):
        done = runs.flowkit("grpo", "--config", rl_config(tmp_path, bundle, undisturbed), override, *extra)
        assert done.returncode == 2
        assert sentence in done.stderr
    assert not (tmp_path / "run").exists()
