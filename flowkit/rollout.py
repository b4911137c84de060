"""Walk trajectories by a law, keep what training needs, and replay a kept step.

A `Walk` is the one description of how a trajectory is walked: rollout and replay both go through
`Walk.gaussian`, so the old and the new log-probability come from the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowkit.flow.laws import LAWS, Reduction, log_prob, rate
from flowkit.flow.path import expand

Velocity = Callable[[Tensor, Tensor], Tensor]  # x [B, ...], t [B] -> v [B, ...]


@dataclass(frozen=True)
class Walk:
    """How a trajectory is walked.

    Attributes:
        grid: times [N + 1], float32, falling from at most 1 to 0.
        law: name in LAWS; what a noisy step draws from. Every other step is the plain ODE.
        level: the law's noise level.
        t_at_one: time that flow-sde takes for 1 - t at t = 1 (None: the next grid time).
        reduction: how log-probabilities are reduced, see `log_prob`.
        length: noisy steps in a row; the first is chosen per trajectory.
    """

    grid: Tensor  # [N + 1]
    law: str
    level: float
    t_at_one: float | None
    reduction: Reduction
    length: int

    @property
    def steps(self) -> int:
        """Number of steps N."""
        return len(self.grid) - 1

    def gaussian(self, x: Tensor, v: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, ...] and std [B, 1, ...] of step j [B] (int64) from state x with velocity v."""
        return LAWS[self.law](x, v, self.grid[j], self.grid[j + 1], self.level, t_at_one=self.t_at_one)

    def rate(self, std: Tensor, j: Tensor) -> Tensor:
        """The diffusion coefficient g of step j [B], shaped like std."""
        return rate(self.law, std, self.grid[j], self.grid[j + 1])


@dataclass(frozen=True)
class Trajectories:
    """What is kept of a batch of walks: K = walk.length noisy steps in a row, and where each ended.

    Attributes:
        x0: the end of each walk, [B, ...].
        states: the K + 1 states around the noisy steps, [B, K + 1, ...], float32.
        first: index of the first noisy step, [B], int64.
        logp: log-probability of each noisy step under the policy that walked it, [B, K].
    """

    x0: Tensor
    states: Tensor
    first: Tensor
    logp: Tensor


@torch.no_grad()
def walk_out(
    velocity: Velocity, x: Tensor, walk: Walk, starts: Sequence[int], noise: Callable[[int], Tensor]
) -> Trajectories:
    """Walk from noise x [B, ...] to the data, noisy in steps [first, first + walk.length) of each trajectory.

    Args:
        velocity: the policy, called once a step with the whole batch.
        x: states at grid[0], float32.
        walk: how to walk.
        starts: first noisy step of each trajectory, [B].
        noise: step index -> standard normal noise [B, ...]; asked only for steps in which some walk is noisy.
    """
    batch, kept = len(x), walk.length
    states = x.new_empty(batch, kept + 1, *x.shape[1:])
    logp = x.new_empty(batch, kept)
    lo, hi = min(starts), max(starts) + kept
    for step in range(walk.steps):
        j = torch.full((batch,), step, device=x.device)
        v = velocity(x, walk.grid[j])
        flat = x + v * expand(walk.grid[j + 1] - walk.grid[j], x)
        if not lo <= step < hi:
            x = flat
            continue
        mean, std = walk.gaussian(x, v, j)
        drawn = mean + std * noise(step)
        density = log_prob(drawn, mean, std, walk.reduction)
        inside = [0 <= step - s < kept for s in starts]
        before, x = x, drawn
        if not all(inside):
            here = torch.tensor(inside, device=x.device).view(-1, *[1] * (x.ndim - 1))
            x = torch.where(here, drawn, flat)
        rows = [b for b, yes in enumerate(inside) if yes]
        slots = [step - starts[b] for b in rows]
        states[rows, slots] = before[rows]
        states[rows, [k + 1 for k in slots]] = x[rows]
        logp[rows, slots] = density[rows]
    return Trajectories(x, states, torch.tensor(list(starts), device=x.device), logp)


@dataclass(frozen=True)
class Replay:
    """One noisy step seen again under the present policy: all that a policy loss can ask for."""

    logp: Tensor  # [B]
    mean: Tensor  # [B, ...]
    std: Tensor  # [B, 1, ...]
    velocity: Tensor  # [B, ...]
    step: Tensor  # [B]


def replay(velocity: Velocity, kept: Trajectories, k: int, walk: Walk) -> Replay:
    """The k-th noisy step of each trajectory under `velocity`, with gradient."""
    j = kept.first + k
    x, y = kept.states[:, k], kept.states[:, k + 1]
    v = velocity(x, walk.grid[j])
    mean, std = walk.gaussian(x, v, j)
    return Replay(log_prob(y, mean, std, walk.reduction), mean, std, v, j)
