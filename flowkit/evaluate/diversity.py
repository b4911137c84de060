"""How much of the world's choice is left in clips of one prompt, by what the reward `shapes` saw in them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PLACES = ("x", "y", "size", "speed")


@dataclass(frozen=True)
class Diversity:
    """Each 1 where the clips choose as freely as the world does, 0 where they are all alike.

    Attributes:
        x: standard deviation of where the thing begins, over that of the world.
        y: the same for its height in the frame.
        size: of its size.
        speed: of its speed.
        ground: 1 - the total variation between the shares of the grounds and the world's.
        seen: how many clips showed one thing of the world; the others say nothing of the choice.
    """

    x: float
    y: float
    size: float
    speed: float
    ground: float
    seen: int

    @property
    def mean(self) -> float:
        """Mean of the five, none counted above 1: a wider spread in one does not make up for another."""
        parts = [self.x, self.y, self.size, self.speed, self.ground]
        return float(np.minimum(parts, 1.0).mean())  # nan stays nan


def diversity(details: Sequence[Mapping[str, Any]], world: Sequence[Mapping[str, Any]]) -> Diversity:
    """Compare the details that `shapes` gives for clips of one prompt with those of rendered scenes of that prompt.

    Few clips miss grounds by chance, so compare models by equally many. All parts are nan where fewer than two
    clips show one thing throughout.

    Raises:
        ValueError: fewer than two scenes of the world.
    """
    ours, theirs = ([d for d in seen if "error" not in d and "fault" not in d] for seen in (details, world))
    if len(theirs) < 2:
        raise ValueError("the world needs two scenes or more to have a spread")
    if len(ours) < 2:
        return Diversity(math.nan, math.nan, math.nan, math.nan, math.nan, len(ours))
    spreads = {name: _deviation(ours, name) / _deviation(theirs, name) for name in PLACES}
    counts, shares = (Counter(d["ground"] for d in seen) for seen in (ours, theirs))
    apart = [abs(counts[g] / len(ours) - shares[g] / len(theirs)) for g in counts | shares]
    return Diversity(**spreads, ground=1 - 0.5 * math.fsum(apart), seen=len(ours))


def _deviation(details: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.std([d[name] for d in details], ddof=1))
