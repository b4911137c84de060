"""The times that a few-step student samples at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from flowkit.flow.wrappers import t_of


def student_thetas(n: int, sigma_max: float = 80.0, mids: Sequence[float] = (1.5, 1.4, 1.0)) -> Tensor:
    """The angles [n + 1] of n steps: [atan(sigma_max), *mids][:n], then 0; float64 (rCM, arXiv:2510.08431).

    A student is bound to the sigma_max that it was trained with: 80 for Wan 1.3B, 200 for 14B.

    >>> [round(theta, 4) for theta in student_thetas(2).tolist()]
    [1.5583, 1.5, 0.0]

    Raises:
        ValueError: for more steps than there are times, fewer than one, or times that do not fall.
    """
    if not 1 <= n <= 1 + len(mids):
        raise ValueError(f"this student samples in 1 to {1 + len(mids)} steps, not {n}: give it more mids")
    thetas = [*[math.atan(sigma_max), *mids][:n], 0.0]
    if any(a <= b for a, b in pairwise(thetas)):
        raise ValueError(f"the angles of a student must fall from atan(sigma_max) to 0, not be {thetas}")
    return torch.tensor(thetas, dtype=torch.float64)


def student_grid(n: int, sigma_max: float = 80.0, mids: Sequence[float] = (1.5, 1.4, 1.0)) -> Tensor:
    """The same as rectified-flow times [n + 1]: `LAWS["consistency"]` on this grid is the student's sampler.

    It starts from `to_rf(noise, theta)`, which is noise / (c + s): at sigma_max 80 that is .988 noise, and
    noise itself would be an x of a little more noise than its time says.

    Raises:
        ValueError: as `student_thetas`.
    """
    return t_of(student_thetas(n, sigma_max, mids))
