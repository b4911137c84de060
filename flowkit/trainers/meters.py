"""What a trainer measures of itself: seconds, and means of numbers that stay on their device until asked for."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from flowkit.runtime.dist import Dist

Row = dict[str, float]


class Clock:
    """Seconds spent in the named parts of a round."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.parts: dict[str, float] = defaultdict(float)

    def lap(self, part: str) -> None:
        """Book the time since the last lap to `part`."""
        now = time.perf_counter()
        self.parts[part] += now - self.last
        self.last = now

    def row(self, images: int) -> Row:
        """step_time, its parts, and images per second."""
        whole = time.perf_counter() - self.start
        return {
            "step_time": whole,
            **{f"step_time/{part}": seconds for part, seconds in self.parts.items()},
            "images/s": images / whole,
        }


class Meter:
    """Means of 0-dim tensors that stay on their device until the round is over."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.weights: dict[str, list[int]] = defaultdict(list)
        self.ratios: list[Tensor] = []
        self.skipped = self.updates = 0

    def add(self, weight: int, **values: Tensor) -> None:
        """Take one more value of each, a mean over `weight` things."""
        for name, value in values.items():
            self.values[name].append(value)
            self.weights[name].append(weight)

    def worst(self, ratio: Tensor) -> None:
        """Keep the ratio [B] that is furthest from 1; before the first update all must be 1."""
        self.ratios.append(ratio[(ratio - 1).abs().argmax()])

    def means(self, dist: Dist) -> Row:
        """One number each, over all processes."""
        own = {
            name: (torch.stack(v).double().cpu() @ torch.tensor(self.weights[name]).double()).item()
            for name, v in self.values.items()
        }
        rows = dist.gather_objects({name: (total, sum(self.weights[name])) for name, total in own.items()})
        names = sorted(set(itertools.chain.from_iterable(rows)))
        means = {
            name: sum(r[name][0] for r in rows if name in r) / sum(r[name][1] for r in rows if name in r)
            for name in names
        }
        ratios = itertools.chain.from_iterable(dist.gather_objects([r.item() for r in self.ratios]))
        first = max(ratios, key=lambda ratio: abs(ratio - 1), default=float("nan"))
        return {**means, "ratio_first": first, "skipped_updates": float(self.skipped)}


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; nan of nothing."""
    return sum(values) / len(values) if values else float("nan")
