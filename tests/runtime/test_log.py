"""Every row stands in metrics.jsonl once, and everywhere else it is wanted."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowkit.errors import UsageError, UserError
from flowkit.runtime import log
from flowkit.runtime.log import Metrics, read_rows
from flowkit.runtime.progress import Progress


def test_rows_are_on_the_disk_at_once_and_as_they_were(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.log(1, {"reward": 0.1 + 0.2, "n": 3})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward": 0.30000000000000004, "n": 3}\n'


def test_what_is_not_finite_becomes_null_and_the_file_stays_json(tmp_path: Path) -> None:
    Metrics(tmp_path).log(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    assert read_rows(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1.0}]


def test_a_resume_cuts_the_rows_after_its_step(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in range(5):
        metrics.log(step, {"x": step})
    resumed = Metrics(tmp_path, after=2)
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 1, 2]
    resumed.log(3, {"x": 30})
    assert read_rows(tmp_path)[-1] == {"step": 3, "x": 30}


def test_a_new_run_has_no_rows_from_before(tmp_path: Path) -> None:
    Metrics(tmp_path).log(0, {"x": 1})
    Metrics(tmp_path)
    assert read_rows(tmp_path) == []


def test_a_torn_last_line_is_cut(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 2, "x"')
    assert read_rows(tmp_path) == [{"step": 1, "x": 1}]
    Metrics(tmp_path, after=2).log(2, {"x": 2})
    assert read_rows(tmp_path) == [{"step": 1, "x": 1}, {"step": 2, "x": 2}]


def test_a_step_logged_again_is_one_row(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.log(1, {"x": 1})
    metrics.log(2, {"x": 2})
    assert not metrics.evaluated(2)
    resumed = Metrics(tmp_path, after=2)
    resumed.log(2, {"eval/y": 0.5})
    assert read_rows(tmp_path) == [{"step": 1, "x": 1}, {"step": 2, "x": 2, "eval/y": 0.5}]
    assert resumed.evaluated(2)
    assert Metrics(tmp_path, after=2).evaluated(2)
    assert not resumed.evaluated(1)


def test_a_step_before_the_last_is_a_bug(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.log(2, {})
    with pytest.raises(ValueError, match="step 1 comes after step 2"):
        metrics.log(1, {})


def test_the_other_ranks_write_nothing(tmp_path: Path) -> None:
    Metrics(tmp_path, ["tensorboard"], enabled=False).log(1, {"x": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.path.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: No space left on device"):
        metrics.log(1, {"x": 1})


def points(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return [(point.step, round(point.value, 3)) for point in events.Scalars("x")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own imports
def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, ["tensorboard"])
    for step in range(1, 6):
        metrics.log(step, {"x": step, "y": math.nan})
    metrics.close()
    os.utime(next((tmp_path / "tb").iterdir()), (0, 0))
    resumed = Metrics(tmp_path, ["tensorboard"], after=3)
    resumed.log(4, {"x": 40})
    assert points(tmp_path) == [(1, 1), (2, 2), (3, 3), (4, 40)]
    resumed.close()


class FakeTracker:
    """Both wandb's and trackio's module, as far as they are used."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> FakeTracker:
        print("begun")
        self.begun.append(arguments)
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self.rows.append((step, row))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_an_optional_tracker_gets_the_rows_under_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fake = FakeTracker()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "found")
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for after, step in ((None, 1), (1, 2), (None, 1)):
        metrics = Metrics(tmp_path, [name], after=after)
        metrics.log(step, {"x": step, "bad": math.nan})
        metrics.close()
    assert fake.rows == [(1, {"x": 1.0}), (2, {"x": 2.0}), (1, {"x": 1.0})]
    assert fake.finished == 3
    first, second, anew = fake.begun
    identity = "id" if name == "wandb" else "name"
    assert first[identity] == second[identity] != anew[identity]
    assert (first["resume"], second["resume"]) == ("never", "allow")
    assert name != "wandb" or first["mode"] == "offline"
    assert name != "trackio" or capsys.readouterr().out == ""  # it talks; stdout is for results


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_missing_tracker_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    extra = "tensorboard" if name == "tensorboard" else "'flowkit[trackers]'"
    with pytest.raises(UsageError) as error:
        Metrics(tmp_path, [name])
    assert str(error.value) == f"report_to: {name} is not installed; pip install {extra}, or drop it"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tracker_is_named() -> None:
    with pytest.raises(UsageError, match="no tracker is called 'tb'; there are tensorboard, wandb, trackio"):
        log.check(["tensorboard", "tb"])


class Clock(SimpleNamespace):
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(seconds: float, steps: int, *, terminal: bool = False, main: bool = True, **rows: Any) -> str:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    clock, stream = Clock(), Stream()
    with Progress(steps, main=main, stream=stream, clock=clock) as progress:
        for step in range(1, steps + 1):
            clock.now += seconds
            progress.update(step, rows.get(f"step{step}", {"reward": step / 10, "images/s": 12.34, "lr": 1}))
    return stream.getvalue()


def test_slow_steps_have_a_line_each_with_speed_and_time_left() -> None:
    assert told(20.0, 3).splitlines() == [
        "step 1/3  reward 0.1  12.3 images/s  40s left",
        "step 2/3  reward 0.2  12.3 images/s  20s left",
        "step 3/3  reward 0.3  12.3 images/s",
    ]


def test_fast_steps_share_a_line_in_ten_seconds_and_the_end_is_told() -> None:
    steps = [int(re.findall(r"step (\d+)/", line)[0]) for line in told(1.0, 25).splitlines()]
    assert steps == [1, 11, 21, 25]


def test_an_evaluation_is_always_told() -> None:
    assert "step 3/9  eval/ocr_exact 0.25" in told(0.1, 9, step3={"eval/ocr_exact": 0.25})


def test_the_other_ranks_are_silent() -> None:
    assert told(20.0, 3, main=False) == told(20.0, 3, main=False, terminal=True) == ""


def test_a_terminal_gets_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = told(0.1, 3, terminal=True)
    assert "3/3" in text
    assert "\x1b[" in text


def test_plain_lines_hold_no_escape_codes() -> None:
    assert "\x1b" not in told(20.0, 3)
    json.dumps(told(20.0, 3))
