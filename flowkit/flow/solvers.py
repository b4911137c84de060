"""Solvers of the flow's ODE: from x at grid[0] to x at grid[-1]."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

from torch import Tensor

from flowkit.flow.laws import ode
from flowkit.flow.path import expand

Velocity: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # x [B, ...], t [B] in the dtype of x -> v [B, ...]


def euler(velocity: Velocity, x: Tensor, grid: Tensor) -> Tensor:
    """First order: n calls for a grid [n + 1]. x [B, ...] -> [B, ...]."""
    for t, s in pairwise(grid):
        x, _ = ode(x, velocity(x, _batch(t, x)), t, s)
    return x


def heun(velocity: Velocity, x: Tensor, grid: Tensor) -> Tensor:
    """Second order: 2n - 1 calls for a grid [n + 1] that ends at 0. x [B, ...] -> [B, ...].

    The trapezoidal rule around an Euler step (arXiv:2206.00364). A step to 0 is Euler's alone, since a
    network is hardly trained at t = 0; one such step costs h^2, which leaves the order at two.
    """
    for t, s in pairwise(grid):
        v = velocity(x, _batch(t, x))
        ahead, _ = ode(x, v, t, s)
        if s > 0:
            v = (v + velocity(ahead, _batch(s, x))) / 2
        x, _ = ode(x, v, t, s)
    return x


SOLVERS: dict[str, Callable[[Velocity, Tensor, Tensor], Tensor]] = {"euler": euler, "heun": heun}


def _batch(t: Tensor, x: Tensor) -> Tensor:
    """One time for all samples, [B]."""
    return expand(t, x).to(x.device).expand(len(x))
