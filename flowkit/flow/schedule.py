"""Time grids: which noise levels a sampler visits.

Every schedule returns [n + 1] times that fall strictly from at most 1 to exactly 0, computed in
float64 and cast once, on request, to `dtype`. Rollout, replay, preview and evaluation share one grid.
All raise ValueError for n < 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowkit.flow.path import Time
from flowkit.flow.student import student_grid


def shift(t: Time, k: float) -> Time:
    """The static shift k t / (1 + (k - 1) t), which moves time towards noise for k > 1 (arXiv:2403.03206).

    Inverse: `unshift`. Keeps 0 and 1. Shifting by k and then by m is shifting by k m.
    """
    # The denominator is written so that 1 goes to exactly 1, which laws compare with.
    return k * t / (k * t + (1 - t))


def unshift(t: Time, k: float) -> Time:
    """The inverse of `shift`: t / (k - (k - 1) t)."""
    return t / (t + k * (1 - t))


def mu_of(
    tokens: int, *, tokens_lo: int = 256, mu_lo: float = 0.5, tokens_hi: int = 4096, mu_hi: float = 1.15
) -> float:
    """The mu of `dynamic` for a picture of so many tokens, (H/16)(W/16): a line that goes on at both ends.

    The defaults are FLUX's (512 px: 0.63, 1024 px: 1.15); Qwen-Image has tokens_hi 8192 and mu_hi 0.9.

    >>> round(mu_of(1024), 2)
    0.63
    """
    return mu_lo + (tokens - tokens_lo) * (mu_hi - mu_lo) / (tokens_hi - tokens_lo)


def stretch(grid: Tensor, terminal: float) -> Tensor:
    """Stretch a grid [n + 1] away from 1 so that its last time before 0 is `terminal` (Qwen-Image: .02).

    A grid of one step has nothing between its ends: it is returned as it is.
    """
    inner = grid[:-1]
    if len(inner) == 1:
        return grid
    scale = (1 - terminal) / (1 - inner[-1])
    return torch.cat([1 - (1 - inner) * scale, grid[-1:]])


def unshifted(n: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Equal steps: 1, (n-1)/n, ..., 1/n, 0."""
    return _close(_base(n), dtype)


def static(n: int, shift: float, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Equal steps, shifted once by `shift` (SD3: 3; arXiv:2403.03206).

    >>> static(4, 3.0).tolist()
    [1.0, 0.9, 0.75, 0.5, 0.0]
    """
    return _close(_shifted(_base(n), shift), dtype)


def dynamic(
    n: int, mu: float, *, terminal: float | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Equal steps, shifted by e^mu: e^mu / (e^mu + 1/t - 1) (FLUX; mu from `mu_of`).

    With `terminal` the grid is then stretched (Qwen-Image).
    """
    grid = logit_exponential(n, mu)
    return (grid if terminal is None else stretch(grid, terminal)).to(dtype)


def logit_exponential(n: int, a: float, b: float = 1.0, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Equal steps through e^a / (e^a + (1/t - 1)^b): the logit of time times b, plus a."""
    return logit_linear(n, math.exp(a), b, dtype=dtype)


def logit_linear(n: int, a: float, b: float = 1.0, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Equal steps through a / (a + (1/t - 1)^b): the logit of time times b, plus log a."""
    # Both sides divided by a, since torch has a / x as a * (1 / x), which makes a / a one ulp off 1.
    return _close(1 / (1 + (1 / _base(n) - 1) ** b / a), dtype)


def power(
    n: int, smin: float, smax: float = 1.0, rho: float = 7.0, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """From smax to smin in equal steps of t^(1/rho), then 0 (Karras et al., arXiv:2206.00364)."""
    return _close(_line(smax ** (1 / rho), smin ** (1 / rho), n) ** rho, dtype)


def exponential(n: int, smin: float, smax: float = 1.0, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """From smax to smin in equal steps of log t, then 0."""
    return _close(_line(math.log(smax), math.log(smin), n).exp(), dtype)


def sd3_rl(n: int, shift: float = 3.0, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """What a bare diffusers `set_timesteps(n)` makes of a static shift, which Flow-GRPO trained SD3.5 on.

    The line runs from 1 to an already shifted 1/1000 and is shifted again: 4 steps at shift 3 are
    1, .858, .602, .0089, 0. Kept under its own name for runs that must match; `static` is what was meant.
    """
    return _close(_shifted(_line(1.0, shift * 1e-3 / (1 + (shift - 1) * 1e-3), n), shift), dtype)


def rcm_teacher(
    n: int, shift: float = 5.0, sigma_max: float = 5000.0, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """From sigma_max / (1 + sigma_max) to 0 in equal unshifted steps: rCM's teacher (arXiv:2510.08431)."""
    if n < 1:
        raise ValueError(f"a schedule needs at least one step, not {n}")
    start = unshift(sigma_max / (1 + sigma_max), shift)
    return _shifted(_line(float(start), 0.0, n + 1), shift).to(dtype)


def student(
    n: int,
    sigma_max: float = 80.0,
    thetas: Sequence[float] = (1.5, 1.4, 1.0),
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The times of a distilled student, for law `consistency`: see `flow.student.student_grid`."""
    if n < 1:
        raise ValueError(f"a schedule needs at least one step, not {n}")
    return student_grid(n, sigma_max, thetas).to(dtype)


SCHEDULES: dict[str, Callable[..., Tensor]] = {
    "static": static,
    "dynamic": dynamic,
    "unshifted": unshifted,
    "power": power,
    "exponential": exponential,
    "logit-exponential": logit_exponential,
    "logit-linear": logit_linear,
    "sd3-rl": sd3_rl,
    "rcm-teacher": rcm_teacher,
    "student": student,
}


def _shifted(times: Tensor, k: float) -> Tensor:
    moved = shift(times, k)
    assert isinstance(moved, Tensor)
    return moved


def _line(start: float, end: float, n: int) -> Tensor:
    """[n] equally spaced float64 numbers with both ends; for n = 1 the start alone."""
    if n < 1:
        raise ValueError(f"a schedule needs at least one step, not {n}")
    return torch.linspace(start, end, n, dtype=torch.float64)


def _base(n: int) -> Tensor:
    return _line(1.0, 1 / max(n, 1), n)


def _close(inner: Tensor, dtype: torch.dtype) -> Tensor:
    """Append the 0 that ends every grid."""
    return torch.cat([inner, inner.new_zeros(1)]).to(dtype)
