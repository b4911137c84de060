"""The straight path between data and noise, and what a velocity says of its two ends."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Time: TypeAlias = float | Tensor  # a number, a 0-dim tensor, or [B]


def as_time(t: Time) -> Tensor:
    """A time as a tensor: a plain number becomes float64, a tensor stays as it is.

    Raises:
        TypeError: for a tensor of another dtype than float32 or float64. Half precision has fewer
            than 1000 values near t = 1, and an integer has two.
    """
    if not isinstance(t, Tensor):
        return torch.tensor(t, dtype=torch.float64)
    if t.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"a time must be float32 or float64, not {t.dtype}")
    return t


def expand(t: Time, x: Tensor) -> Tensor:
    """A number per sample, shaped to multiply x [B, ...]: 0-dim stays 0-dim, [B] becomes [B, 1, ..., 1].

    The result has the dtype of x, and its device unless it is 0-dim.

    Raises:
        ValueError: when t is neither 0-dim nor [B].
    """
    t = as_time(t)
    if t.ndim == 0:
        return t.to(x.dtype)
    if t.ndim != 1 or x.ndim < 1 or len(t) != len(x):
        raise ValueError(f"a time must be a scalar or [B]: got {list(t.shape)} for x of {list(x.shape)}")
    return t.to(x.dtype).to(x.device).reshape(-1, *[1] * (x.ndim - 1))


def interpolate(x0: Tensor, eps: Tensor, t: Time) -> Tensor:
    """The point x_t = (1 - t) x0 + t eps [B, ...] of the straight path (Liu et al., arXiv:2209.03003)."""
    t = expand(t, x0)
    return (1 - t) * x0 + t * eps


def velocity_of(x0: Tensor, eps: Tensor) -> Tensor:
    """The velocity v = eps - x0 [B, ...] of the straight path: the target of flow matching."""
    return eps - x0


def x0_of(x: Tensor, v: Tensor, t: Time) -> Tensor:
    """The data end of the path, x0 = x - t v [B, ...]; with a network's v, its guess of it."""
    return x - expand(t, x) * v


def eps_of(x: Tensor, v: Tensor, t: Time) -> Tensor:
    """The noise end of the path, eps = x + (1 - t) v [B, ...]; with a network's v, its guess of it."""
    return x + (1 - expand(t, x)) * v
