"""Matching the student's distribution to the teacher's: DMD with a fake score, and who learns when.

A critic (fake score) learns to denoise what the student makes; the difference between its guess of x0 and
the teacher's points from the student's distribution to the teacher's (DMD2, arXiv:2405.14867; rCM,
arXiv:2510.08431). Angles are those of TrigFlow, networks F(x, theta) as in `flow.wrappers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flowkit.flow.path import Time, as_time, expand
from flowkit.flow.wrappers import Trig, x0_of


def guide(F_u: Tensor, F_c: Tensor, w: float) -> Tensor:
    """Guidance F_u + w (F_c - F_u), for F, v or x0 alike; w = 1 is the conditional one."""
    return F_u + w * (F_c - F_u)


def simulation_thetas(draws: Tensor) -> Tensor:
    """The angles [N, B] of a backward simulation: pi/2, then the N - 1 rows drawn, each at most the one before.

    Args:
        draws: angles [N - 1, B], float64, from the sampler of the DMD times; no row for one step.
    """
    first = (
        torch.full_like(draws[:1], math.pi / 2)
        if len(draws)
        else draws.new_full((1, draws.shape[1]), math.pi / 2)
    )
    return torch.cat([first, draws]).cummin(0).values


class Simulated(NamedTuple):
    """What a student makes of noise.

    Attributes:
        G: its x0 [B, ...], with the gradient of the last call alone.
        x: what the last call was given [B, ...], without gradient.
        theta: its angle [B].
    """

    G: Tensor
    x: Tensor
    theta: Tensor


def simulate(F: Trig, noise_of_step: Callable[[int], Tensor], thetas: Tensor) -> Simulated:
    """Sample with the student in N steps from pure noise; the last call alone carries a gradient.

    Args:
        F: the student.
        noise_of_step: step -> fresh standard noise [B, ...]; step 0 is the start.
        thetas: angles [N, B], falling, from pi/2: see `simulation_thetas`. There is no last 0.
    """
    x = noise_of_step(0)
    for step, (theta, after) in enumerate(pairwise(thetas)):
        with torch.no_grad():
            x0 = x0_of(x, theta, F(x, theta))
            x = renoise(x0, noise_of_step(step + 1), after)
    last = thetas[-1]
    return Simulated(x0_of(x, last, F(x, last)), x, last)


def renoise(x0: Tensor, eps: Tensor, theta: Time) -> Tensor:
    """The point c x0 + s eps [B, ...] of the TrigFlow path."""
    theta = as_time(theta).double()
    return expand(theta.cos(), x0) * x0 + expand(theta.sin(), x0) * eps


class Dmd(NamedTuple):
    """The loss [B] and the w [B] that its gradient was divided by."""

    loss: Tensor
    weight: Tensor


def dmd_loss(G: Tensor, x0_fake: Tensor, x0_teacher: Tensor) -> Dmd:
    """The loss sum (G - sg(G - grad))^2 [B] with grad = (x0_fake - x0_teacher) / w.

    w = max(mean |G - x0_teacher|, 1e-5) of each sample. The gradient is 2 grad: zero where the critic and
    the teacher agree. float64 inside and out. A sum over all dims of a sample: against a tangent of unit
    norm its weight grows with the size of the latent.

    Args:
        G: what the student made [B, ...].
        x0_fake: the critic's x0 of G noised to some angle [B, ...]; no gradient is taken of it.
        x0_teacher: the (guided) teacher's x0 of the same [B, ...].
    """
    wide = G.double()
    with torch.no_grad():
        teacher = x0_teacher.double()
        weight = (wide - teacher).abs().flatten(1).mean(1).clamp(min=1e-5)
        target = wide - (x0_fake.double() - teacher) / expand(weight, wide)
    return Dmd(_sum((wide - target) ** 2), weight)


def critic_loss(G: Tensor, x0_fake: Tensor, theta: Tensor) -> Tensor:
    """The loss sum (G - x0_fake)^2 / sin^2 theta [B]: the error of F, since x0 = c x - s F. No gradient to G."""
    s = theta.double().sin()
    return _sum((G.detach() - x0_fake).double() ** 2 / expand(s**2, G.double()))


@dataclass(frozen=True)
class Turns:
    """Whose turn iteration i is: the student's alone for `warmup` ones, then one in `freq`, else the critic's.

    Attributes:
        warmup: iterations of the student alone, without DMD (the tangent's warm-up).
        freq: the student moves at each freq-th iteration from `warmup` on, the critic at the others.

    >>> ["student" if Turns(2, 3).student(i) else "critic" for i in range(6)]
    ['student', 'student', 'student', 'critic', 'critic', 'student']
    """

    warmup: int
    freq: int

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.freq < 1:
            raise ValueError(f"turns need warmup >= 0 and freq >= 1, not {self.warmup} and {self.freq}")

    def student(self, i: int) -> bool:
        """Whether the student moves at iteration i (from 0); otherwise the critic does."""
        return i < self.warmup or (i - self.warmup) % self.freq == 0

    def dmd(self, i: int) -> bool:
        """Whether iteration i is the student's and has the DMD loss in it."""
        return i >= self.warmup and self.student(i)

    def student_step(self, i: int) -> int:
        """The student's optimizer step, from 0, at its latest turn up to i."""
        return i if i < self.warmup else self.warmup + (i - self.warmup) // self.freq

    def critic_step(self, i: int) -> int:
        """The critic's optimizer step, from 0, at its latest turn up to i; -1 before its first one."""
        return i - self.student_step(i) - 1


def _sum(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1)
