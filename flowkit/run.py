"""Drive a trainer: rows to the log, evaluations, previews, checkpoints, signals."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from flowkit import report
from flowkit.errors import UserError
from flowkit.runtime import checkpoint
from flowkit.runtime.dist import Dist
from flowkit.runtime.files import disk_errors
from flowkit.runtime.folder import HARMLESS, Opened, open_folder
from flowkit.runtime.log import Metrics, Row
from flowkit.runtime.progress import Progress

__all__ = ["HARMLESS", "Opened", "State", "drive", "open_folder"]


class State(Protocol):
    """What a trainer carries from one step to the next."""

    @property
    def step(self) -> int:
        """Finished steps."""

    def save(self, folder: Path) -> object:
        """Fills an empty folder with all that the next step depends on; called on rank 0."""


def drive(
    rows: Iterator[Row],
    state: State,
    *,
    folder: Path,
    steps: int,
    checkpoint_every: int,
    keep: int,
    evaluate: Callable[[], Mapping[str, float]],
    eval_every: int,
    preview: Callable[[Path], object],
    preview_every: int,
    metrics: Metrics,
    progress: Progress,
    dist: Dist | None = None,
    collect: Callable[[], object] = lambda: None,
) -> None:
    """Runs a trainer to `steps`; every `..._every` of 0 means never.

    Each step gives one row, with its evaluation in it. Evaluations and previews come at step 0, every N and
    at the end, and are made up for at a resume if a signal cut them off. Checkpoints come every N, at the
    end and at a signal.

    Args:
        rows: yields the row of a step once `state.step` counts it. All ranks yield at the same steps.
        state: see `State`; what it was resumed from is loaded already.
        folder: the run folder.
        steps: the run ends when `state.step` is there.
        checkpoint_every: steps between two checkpoints.
        keep: complete checkpoints that stay.
        evaluate: called on all ranks; rank 0's numbers ('eval/...') count.
        eval_every: steps between two evaluations.
        preview: called on all ranks with a path ending in .png; rank 0 writes it.
        preview_every: steps between two previews.
        metrics: where rows go; on rank 0.
        progress: what the user sees; on rank 0.
        dist: the processes that run this together.
        collect: called on all ranks before rank 0 saves the state.

    Raises:
        UserError: a loss or gradient norm is not finite (the checkpoints stay), or the disk is full.
        SystemExit: 130 or 143 after SIGINT or SIGTERM: the step is finished and saved. A second SIGINT
            drops the step and exits at once.
    """
    dist = dist or Dist()

    def due(row: Row, *, again: bool) -> Row:
        """The row with the evaluation of this step, if any, and the preview drawn.

        `again` leaves out what the process before this one has done.
        """
        step, end = state.step, state.step >= steps
        if _due(step, eval_every, end) and not (again and dist.on_main(lambda: metrics.evaluated(step))):
            row = {**row, **evaluate()}
        picture = folder / "previews" / f"step-{step:06d}.png"
        if _due(step, preview_every, end) and not (again and dist.on_main(picture.exists)):
            _draw(preview, picture, dist)
        return row

    def log(row: Row) -> None:
        metrics.log(state.step, row)
        progress.update(state.step, row)
        if state.step >= steps or any(name.startswith("eval/") for name in row):
            report.write(folder)

    def save() -> None:
        checkpoint.save(folder, state.step, state.save, keep)

    with _Signals(talk=dist.main) as signals:
        if row := due({}, again=True):
            dist.on_main(partial(log, row))
        (stopped,) = dist.all_max([signals.received])
        while state.step < steps and not stopped:
            row = next(rows)
            stopped, broken = dist.all_max([signals.received, len(_not_finite(row))])
            if not stopped and not broken:
                row = due(row, again=False)
                (stopped,) = dist.all_max([signals.received])  # one that came meanwhile
            dist.on_main(partial(log, row))
            if broken:
                raise UserError(_diagnosis(folder, state.step, row))
            if stopped or state.step >= steps or _due(state.step, checkpoint_every, False):
                collect()
                dist.on_main(save)
    if stopped:
        raise SystemExit(128 + stopped)


def _due(step: int, every: int, end: bool) -> bool:
    return every > 0 and (end or step % every == 0)


def _draw(preview: Callable[[Path], object], picture: Path, dist: Dist) -> None:
    """Draws a preview so that its file is whole or absent."""
    unfinished = picture.with_name(f".partial-{picture.name}")

    def make_folder() -> None:
        with disk_errors("write", picture):
            picture.parent.mkdir(parents=True, exist_ok=True)

    def publish() -> None:
        with disk_errors("write", picture):
            unfinished.replace(picture)

    dist.on_main(make_folder)
    preview(unfinished)
    dist.on_main(publish)


def _not_finite(row: Row) -> list[str]:
    """The losses and gradient norms ('loss', 'loss/x', 'grad_norm', ...) that are nan or infinite."""
    watched = [name for name in row if name.split("/")[0] in ("loss", "grad_norm")]
    return [name for name in watched if not math.isfinite(row[name])]


def _diagnosis(folder: Path, step: int, row: Row) -> str:
    what = (
        " and ".join(f"{name} is {row[name]}" for name in _not_finite(row))
        or "another rank's loss is not finite"
    )
    last = checkpoint.newest(folder)
    kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been written"
    return f"step {step}: {what}; {kept}; lower optim.lr or optim.grad_clip"


class _Signals:
    """Remembers the first SIGINT or SIGTERM instead of dying of it; a SIGINT after that ends at once."""

    def __init__(self, *, talk: bool) -> None:
        self.received = 0
        self._talk = talk
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():  # Python's rule for handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise SystemExit(128 + number)
        self.received = self.received or number
        if self._talk:  # not through sys.stderr, which the signal may have interrupted
            os.write(2, b"\nstopping: finishing this step and saving it (Ctrl-C again drops it)\n")
