"""Metrics on disk and to trackers: one row a step, none twice after a resume."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from flowkit.errors import UsageError
from flowkit.runtime.files import disk_errors, write_text

Row = dict[str, float]


class Tracker(Protocol):
    """A place besides metrics.jsonl that rows go to."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Takes the finite numbers of a step."""

    def close(self) -> None:
        """Writes what is still held back."""


class Metrics:
    """The rows of a run: `metrics.jsonl` always, and the trackers of `report_to`.

    Args:
        folder: the run folder.
        report_to: names of `TRACKERS`.
        after: the step that the run goes on from; later rows, and a torn last line, are cut off. None for
            a new run, which has none.
        enabled: False on the ranks that write nothing.

    Raises:
        UsageError: see `check`.
        UserError: the disk is full or read-only.
    """

    def __init__(
        self, folder: Path, report_to: Sequence[str] = (), *, after: int | None = None, enabled: bool = True
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self._enabled = enabled
        self._step, self._row = -1, Row()
        self._trackers: list[Tracker] = []
        if not enabled:
            return
        check(report_to)
        kept = [line for line in self._lines() if line[0] <= (-1 if after is None else after)]
        if self.path.exists():
            write_text(self.path, "".join(text for _, text in kept))
        if kept:
            row = json.loads(kept[-1][1])
            self._step, self._row = row.pop("step"), row
        self._trackers = [TRACKERS[name](folder, after) for name in report_to]

    def evaluated(self, step: int) -> bool:
        """Whether the row of this step is the last one and holds an evaluation."""
        return step == self._step and any(name.startswith("eval/") for name in self._row)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Adds the row of a step; for the last step again, adds to its row. nan and infinity become null."""
        if not self._enabled:
            return
        if step < self._step:
            raise ValueError(f"step {step} comes after step {self._step}")
        same = step == self._step
        self._row = {**self._row, **row} if same else dict(row)
        self._step = step
        text = _json_line(step, self._row)
        if same:
            earlier = "".join(line for number, line in self._lines() if number < step)
            write_text(self.path, earlier + text)
        else:
            with disk_errors("write", self.path), self.path.open("a", encoding="utf-8") as handle:
                handle.write(text)
        finite = {name: float(value) for name, value in row.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.log(step, finite)

    def close(self) -> None:
        """Closes the trackers."""
        for tracker in self._trackers:
            tracker.close()

    def _lines(self) -> list[tuple[int, str]]:
        """Step and text of every whole line; a kill may have torn the last one."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [(json.loads(line)["step"], line) for line in lines if line.endswith("\n")]


def read_rows(folder: Path) -> list[dict[str, float | None]]:
    """The rows of a run folder's metrics.jsonl, each with its 'step'; a torn last line is left out."""
    return [json.loads(line) for _, line in Metrics(folder, enabled=False)._lines()]


def _json_line(step: int, row: Mapping[str, float]) -> str:
    values = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return json.dumps({"step": step, **values}, ensure_ascii=False, allow_nan=False) + "\n"


class TensorBoard:
    """Scalars under `tb/`; after a resume TensorBoard forgets the points past the resumed step."""

    def __init__(self, folder: Path, after: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with disk_errors("write", folder / "tb"):
            self._writer = SummaryWriter(str(folder / "tb"), purge_step=(-1 if after is None else after) + 1)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Adds one point to each curve."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class Wandb:
    """A wandb run in the run folder, offline unless WANDB_MODE says so; `wandb sync` sends it."""

    def __init__(self, folder: Path, after: int | None) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project="flowkit",
            name=folder.resolve().name,
            id=_run_id(folder, "wandb", after),
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="never" if after is None else "allow",
        )

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Adds the row to the run's history."""
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


class Trackio:
    """A trackio run, kept on this machine (`trackio show` opens it)."""

    def __init__(self, folder: Path, after: int | None) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        with redirect_stdout(sys.stderr):  # where what is no result belongs
            self._trackio.init(
                project="flowkit",
                name=f"{folder.resolve().name}-{_run_id(folder, 'trackio', after)}",
                resume="never" if after is None else "allow",
            )

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Adds the row to the run."""
        self._trackio.log(dict(row), step=step)

    def close(self) -> None:
        """Ends the run."""
        with redirect_stdout(sys.stderr):
            self._trackio.finish()


TRACKERS: dict[str, Callable[[Path, int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def check(report_to: Sequence[str]) -> None:
    """Refuses trackers that `Metrics` would refuse, before anything is loaded or written.

    Raises:
        UsageError: no such tracker, or its package is not installed.
    """
    for name in report_to:
        if name not in TRACKERS:
            raise UsageError(f"report_to: no tracker is called {name!r}; there are {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            extra = "tensorboard" if name == "tensorboard" else "'flowkit[trackers]'"
            raise UsageError(f"report_to: {name} is not installed; pip install {extra}, or drop it")


def _run_id(folder: Path, tracker: str, after: int | None) -> str:
    """The tracker's own name of this run: made at its start, kept in the run folder for the resumes."""
    path = folder / f".{tracker}-id"
    if after is None or not path.exists():
        write_text(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")
