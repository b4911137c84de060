"""Progress on stderr: a live line on a terminal, plain lines elsewhere, silence on all ranks but one."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

_EVERY = 10.0  # seconds between two plain lines
_SHOWN = ("reward", "loss", "kl", "grad_norm")


class Progress:
    """What a run tells its user while it works; use it as a context manager.

    Args:
        total: steps of the whole run.
        start: steps that were done before.
        main: False on the ranks that stay silent.
        stream: stderr unless told otherwise; rich draws on it if it is a terminal.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        main: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._main, self._clock = total, main, clock
        self._console = Console(file=stream or sys.stderr, soft_wrap=True, highlight=False)
        self._recent: deque[tuple[float, int]] = deque([(clock(), start)], maxlen=21)
        self._said = -_EVERY
        self._bar: Bar | None = None
        if main and self._console.is_terminal:
            self._bar = Bar(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(24), TextColumn("{task.description}"),
                console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=total, completed=start)

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Says a sentence at once."""
        if self._main:
            self._console.print(text, markup=False)

    def update(self, step: int, row: Mapping[str, float]) -> None:
        """Shows a finished step; plain lines at most every ten seconds, evaluations and the end always."""
        now = self._clock()
        self._recent.append((now, step))
        if not self._main:
            return
        text = self._describe(row)
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
        evaluation = any(name.startswith("eval/") for name in row)
        if evaluation or (not self._bar and (step >= self._total or now >= self._said + _EVERY)):
            self._said = now
            self.note(f"step {step}/{self._total}  {text}")

    def _describe(self, row: Mapping[str, float]) -> str:
        names = [name for name in row if name in _SHOWN or name.startswith("eval/")]
        parts = [f"{name} {row[name]:.4g}" for name in names]
        if "images/s" in row:
            parts.append(f"{row['images/s']:.3g} images/s")
        (begun, first), (now, last) = self._recent[0], self._recent[-1]
        if last > first and self._total > last:
            parts.append(f"{span((now - begun) / (last - first) * (self._total - last))} left")
        return "  ".join(parts)


def span(seconds: float) -> str:
    """A time span in its two largest units.

    >>> span(5), span(65), span(7384)
    ('5s', '1m05s', '2h03m')
    """
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m{whole % 60:02}s" if minutes else f"{whole}s"
