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
    """Means of 0-dim tensors that stay on their device until the iteration is over.

    Attributes:
        skipped: optimizer steps that had nothing to learn from.
        updates: optimizer steps made.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.weights: dict[str, list[Tensor]] = defaultdict(list)
        self.ratios: list[Tensor] = []
        self.skipped = self.updates = 0

    def add(self, weight: int | Tensor, **values: Tensor) -> None:
        """Take one more value of each, a mean over `weight` things; the mean of nothing may be nan."""
        for name, value in values.items():
            self.values[name].append(value.detach())
            self.weights[name].append(torch.as_tensor(weight))

    def worst(self, ratio: Tensor) -> None:
        """Keep the ratio [B] that is furthest from 1; before the first update all must be 1."""
        self.ratios.append(ratio[(ratio - 1).abs().argmax()])

    def means(self, dist: Dist) -> Row:
        """One number each, over all processes; a name with nothing to it is left out."""
        own = {}
        for name, values in self.values.items():
            value = torch.stack([v.double().cpu() for v in values])
            weight = torch.stack([w.double().cpu() for w in self.weights[name]])
            own[name] = (value[weight > 0] @ weight[weight > 0]).item(), weight.sum().item()
        rows = dist.gather_objects(own)
        names = sorted(set(itertools.chain.from_iterable(rows)))
        means = {}
        for name in names:
            total, weight_sum = (sum(r[name][k] for r in rows if name in r) for k in (0, 1))
            if weight_sum:
                means[name] = total / weight_sum
        return means

    def first_ratio(self, dist: Dist) -> float:
        """The ratio furthest from 1 of all processes; nan where none was kept."""
        ratios = itertools.chain.from_iterable(dist.gather_objects([r.item() for r in self.ratios]))
        return max(ratios, key=lambda ratio: abs(ratio - 1), default=float("nan"))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; nan of nothing."""
    return sum(values) / len(values) if values else float("nan")
