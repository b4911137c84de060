"""A run goes on where it stopped, says everything once, and ends as it should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowkit.errors import UserError
from flowkit.run import drive, open_folder
from flowkit.runtime import checkpoint, seeds
from flowkit.runtime.log import Metrics, Row, read_rows
from flowkit.runtime.progress import Progress

WAIT = 200.0  # seconds that a busy machine may take to start a process
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _subprocesses_find_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Toy:
    """Weights that walk at random, by address: the smallest trainer there is."""

    def __init__(self) -> None:
        self.step = 0
        self.weights = torch.zeros(3)
        self.momentum = torch.zeros(3)

    def rows(self, *, nan_at: int = -1) -> Iterator[Row]:
        while True:
            self.momentum = 0.9 * self.momentum + seeds.noise((3,), 0, self.step)
            self.weights = self.weights + self.momentum
            self.step += 1
            loss = float("nan") if self.step == nan_at else self.weights.sum().item()
            yield {"reward": self.weights.mean().item(), "loss": loss}

    def save(self, folder: Path) -> None:
        torch.save({"w": self.weights, "m": self.momentum, "step": self.step}, folder / "toy.pt")

    def load(self, folder: Path) -> None:
        held = torch.load(folder / "toy.pt", weights_only=True)
        self.weights, self.momentum, self.step = held["w"], held["m"], held["step"]


def toy_run(
    out: Path,
    steps: int = 7,
    *,
    stop_in: str = "",
    nap: float = 0.0,
    nan_at: int = -1,
    checkpoint_every: int = 3,
    eval_every: int = 2,
    preview_every: int = 4,
    evaluations: list[int] | None = None,
) -> Toy:
    """One process's worth of a run; `stop_in` 'step 2' or 'eval 2' sends a SIGTERM there."""
    state = Toy()

    def stop(where: str) -> None:
        if where == stop_in:
            for _ in range(2):  # schedulers repeat themselves; only a second Ctrl-C is a hurry
                os.kill(os.getpid(), signal.SIGTERM)

    def rows() -> Iterator[Row]:
        for row in state.rows(nan_at=nan_at):
            (out / f"in-step-{state.step}").touch()
            time.sleep(nap)
            stop(f"step {state.step}")
            yield row

    def evaluate() -> dict[str, float]:
        stop(f"eval {state.step}")
        if evaluations is not None:
            evaluations.append(state.step)
        return {"eval/sum": state.weights.sum().item()}

    with open_folder(out, "optim: {lr: 1}") as opened:
        if opened.checkpoint:
            state.load(opened.checkpoint)
        metrics = Metrics(out, after=opened.step)
        with Progress(steps, start=state.step, main=False) as progress:
            drive(
                rows(),
                state,
                folder=out,
                steps=steps,
                checkpoint_every=checkpoint_every,
                keep=2,
                evaluate=evaluate,
                eval_every=eval_every,
                preview=lambda path: path.write_text(f"picture of step {state.step}"),
                preview_every=preview_every,
                metrics=metrics,
                progress=progress,
            )
        metrics.close()
    return state


def pictures(out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (out / "previews").iterdir()}


def test_a_run_logs_every_step_once_with_its_evaluation_in_it(tmp_path: Path) -> None:
    toy_run(tmp_path)
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in rows if "eval/sum" in row] == [0, 2, 4, 6, 7]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6, 7]
    assert checkpoint.steps(tmp_path) == [6, 7]
    assert pictures(tmp_path) == {f"step-{step:06d}.png": f"picture of step {step}" for step in (0, 4, 7)}
    assert (tmp_path / "report.html").exists()


PLACES = ["step 1", "step 2", "step 4", "step 6", "step 7", "eval 2", "eval 4", "eval 6", "eval 7"]


@pytest.mark.parametrize("stop_in", PLACES)
def test_stop_and_resume_is_the_run_that_was_never_stopped(tmp_path: Path, stop_in: str) -> None:
    whole, evaluations = toy_run(tmp_path / "whole"), list[int]()
    broken = tmp_path / "broken"
    with pytest.raises(SystemExit) as stopped:
        toy_run(broken, stop_in=stop_in, evaluations=evaluations)
    assert stopped.value.code == 143
    reached = int(stop_in.split()[1])
    assert checkpoint.newest(broken) == checkpoint.path_of(broken, reached)
    assert (reached in evaluations) == stop_in.startswith("eval")  # who waits for the end wants it soon
    again = toy_run(broken, evaluations=evaluations)
    assert torch.equal(whole.weights, again.weights)
    assert evaluations == [0, 2, 4, 6, 7]  # each once, none lost to the signal
    assert read_rows(broken) == read_rows(tmp_path / "whole")
    assert pictures(broken) == pictures(tmp_path / "whole")


def test_a_signal_during_the_first_evaluation_ends_the_run_with_nothing_saved(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        toy_run(tmp_path, stop_in="eval 0")
    assert stopped.value.code == 143
    assert checkpoint.newest(tmp_path) is None
    toy_run(tmp_path)
    assert [row["step"] for row in read_rows(tmp_path)] == list(range(8))


def test_a_complete_run_is_left_as_it_is(tmp_path: Path) -> None:
    toy_run(tmp_path)
    rows, evaluations = read_rows(tmp_path), list[int]()
    toy_run(tmp_path, evaluations=evaluations)
    assert (read_rows(tmp_path), evaluations) == (rows, [])


def test_a_run_can_be_made_longer(tmp_path: Path) -> None:
    toy_run(tmp_path / "long", 9)
    toy_run(tmp_path / "short", 5)
    assert torch.equal(toy_run(tmp_path / "short", 9).weights, toy_run(tmp_path / "long", 9).weights)
    assert [row["step"] for row in read_rows(tmp_path / "short")] == list(range(10))


def test_zero_means_never(tmp_path: Path) -> None:
    toy_run(tmp_path, checkpoint_every=0, eval_every=0, preview_every=0)
    assert [row["step"] for row in read_rows(tmp_path)] == list(range(1, 8))
    assert not (tmp_path / "previews").exists()
    assert checkpoint.steps(tmp_path) == [7]  # the end is always saved


def test_a_nan_loss_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"step 5: loss is nan; the last good checkpoint is .*step-000003"
    ) as error:
        toy_run(tmp_path, nan_at=5)
    assert error.value.code == 1
    assert checkpoint.steps(tmp_path) == [3]
    assert read_rows(tmp_path)[-1]["loss"] is None  # the row that shows it is logged, as valid JSON


def test_handlers_are_as_they_were_after_a_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    toy_run(tmp_path)
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def start(out: Path, nap: float, steps: int = 7) -> subprocess.Popen[bytes]:
    code = f"from tests.test_run import *; toy_run(Path({str(out)!r}), {steps}, nap={nap})"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_and_saves_the_step(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with start(tmp_path, nap=0.1, steps=1000) as process:
        wait_for(checkpoint.path_of(tmp_path, 3))
        process.send_signal(number)
        _, said = process.communicate(timeout=WAIT)
    assert process.returncode == code, said
    assert b"finishing this step" in said
    assert b"Traceback" not in said
    (last,) = read_rows(tmp_path)[-1:]
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert checkpoint.step_of(newest) == last["step"]


def test_a_second_interrupt_drops_the_step_and_exits_at_once(tmp_path: Path) -> None:
    with start(tmp_path, nap=10 * WAIT) as process:
        wait_for(tmp_path / "in-step-1")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while b"finishing this step" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert checkpoint.newest(tmp_path) is None


def test_kill_at_any_moment_then_the_same_command_gives_the_same_weights(tmp_path: Path) -> None:
    whole = toy_run(tmp_path / "whole", 30)
    out = tmp_path / "killed"
    for step in (3, 9, 21):
        with start(out, nap=0.02, steps=30) as process:
            wait_for(checkpoint.path_of(out, step))
            process.kill()
    assert torch.equal(toy_run(out, 30).weights, whole.weights)
    assert read_rows(out) == read_rows(tmp_path / "whole")


TWO = """
import sys
from tests.test_run import *
from flowkit.runtime import dist
out = Path(sys.argv[1])
with dist.init("cpu") as d, open_folder(out, "a: 1", dist=d) as opened:
    state = Toy()
    called = []
    def rows():
        for row in state.rows():
            if sys.argv[2] == "stop" and state.step == 4 and d.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            if sys.argv[2] == "nan" and state.step == 4 and d.rank == 1:
                row["grad_norm"] = float("inf")
            yield row
    def save(folder):
        if sys.argv[2] == "full": raise OSError(28, "No space left on device")
        Toy.save(state, folder)
    state.save = save
    def preview(path):
        called.append(1)
        if d.main: path.write_text("picture")
    try:
        drive(rows(), state, folder=out, steps=6, checkpoint_every=2, keep=9,
              evaluate=lambda: {"eval/sum": d.all_max([state.step])[0]}, eval_every=3,
              preview=preview, preview_every=3,
              metrics=Metrics(out, enabled=d.main), progress=Progress(6, main=d.main), dist=d)
    except UserError as error:
        (out / f"error{d.rank}").write_text(str(error)); sys.exit(1)
    finally:
        (out / f"rank{d.rank}").write_text(f"{state.step} {len(called)}")
"""


@pytest.mark.parametrize(
    ("event", "code", "steps", "saved"),
    [
        ("none", 0, "6 3", [2, 4, 6]),
        ("stop", 130, "4 2", [2, 4]),
        ("nan", 1, "4 2", [2]),
        ("full", 1, "2 1", []),
    ],
)
def test_two_ranks_do_all_at_the_same_step(
    tmp_path: Path, event: str, code: int, steps: str, saved: list[int]
) -> None:
    from flowkit.runtime.dist import launch

    assert launch(2, [sys.executable, "-c", TWO, str(tmp_path), event]) == code
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [steps, steps]
    assert checkpoint.steps(tmp_path) == saved
    errors = [(tmp_path / f"error{rank}").read_text() for rank in (0, 1) if code == 1]
    assert len(set(errors)) <= 1 or event == "nan"
    if event == "nan":
        assert "another rank's loss is not finite" in errors[0]
        assert "grad_norm is inf" in errors[1]
    if event == "full":
        assert "step-000002: No space left" in errors[0]
