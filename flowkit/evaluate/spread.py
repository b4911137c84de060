"""How far apart samples of one prompt are, and how far two sets of them are from each other."""

from __future__ import annotations

import torch
from torch import Tensor


def spread(x: Tensor) -> float:
    """Mean distance between two different samples of x [N, ...], N >= 2, over sqrt(d): 0 where one mode is left.

    In the unit of the values, as a root mean square per number. Without diversity DMD alone shows here.
    """
    return float(_distances(x, x).sum() / (len(x) * (len(x) - 1)))


def energy_distance(x: Tensor, y: Tensor) -> float:
    """Energy distance 2 E|X - Y| - E|X - X'| - E|Y - Y'| of samples x [N, ...] and y [M, ...] over sqrt(d).

    Without bias: 0 on average where both are of one distribution (then it may be below 0), above it where they
    are not (Szekely and Rizzo, Energy statistics, 2013).
    """
    return 2 * float(_distances(x, y).mean()) - spread(x) - spread(y)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean distances [N, M] over sqrt(d), float64."""
    a, b = (z.flatten(1).double() for z in (x, y))
    apart: Tensor = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    scaled: Tensor = apart / a.shape[1] ** 0.5
    return scaled
