"""Consistency distillation: continuous (sCM, arXiv:2410.11081; rCM, arXiv:2510.08431) and discrete (dCM).

A student f(x, theta) = c x - s F(x, theta) is consistent when f does not change along the teacher's path
dx/dtheta = F_T. In TrigFlow coordinates (`flow.wrappers`), with J = c s dF/dtheta along that path,

    g = c df/dtheta = -c^2 (F - F_T) - (c s x + J),

and the loss moves F by g: its gradient is -2 g where g is small, and bounded where it is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flowkit.flow.path import expand
from flowkit.flow.schedule import shift, unshift
from flowkit.flow.wrappers import Trig, t_of, theta_of, x0_of

NORM_OFFSET = 0.1  # the c of g / (|g| + c)


class Tangent(NamedTuple):
    """Where F should move.

    Attributes:
        g: the normalised tangent [B, ...], in the dtype of F, without gradient.
        norm: |g| before it was normalised [B], float64; nan or infinite for a sample that must be dropped.
    """

    g: Tensor
    norm: Tensor


Scope = Literal["data", "all"]


@torch.no_grad()
def tangent(
    F_minus: Tensor, F_T: Tensor, x: Tensor, theta: Tensor, J: Tensor, r: float, *, scope: Scope = "data"
) -> Tangent:
    """Normalise g to g / (|g| + .1), where r is its warm-up; at r = 1 both scopes have g = c df/dtheta.

    `data`: g = -c sqrt(1 - r^2 s^2) (F^- - F_T) - (r c s x + J): r scales x alone, as in the present code
    of rCM (its earlier code scaled J with it). At r = 0 that is c (F_T - F^-) - J.
    `all`: g = -c^2 (F^- - F_T) - r (c s x + J): r scales x and J and there is no root, as in the sCM paper
    and FastGen's code. At r = 0 the teacher's F alone is learnt.

    float64 inside; the norm is over all dims of a sample.

    Args:
        F_minus: the student's F, frozen [B, ...].
        F_T: the teacher's, guided [B, ...].
        x: where both were asked [B, ...].
        theta: the angle [B].
        J: c s dF/dtheta along the teacher's path [B, ...]: see `DERIVATIVES`.
        r: min(1, step / warm-up) in [0, 1].
        scope: what r scales.

    Raises:
        ValueError: for an r outside [0, 1] or an unknown scope.
    """
    if not 0 <= r <= 1:
        raise ValueError(f"the warm-up of the tangent must be in [0, 1], not {r}")
    wide = F_minus.double()
    apart, theta = wide - F_T.double(), theta.double()
    c, s = expand(theta.cos(), wide), expand(theta.sin(), wide)
    if scope == "data":
        g = -c * (1 - r**2 * s**2).sqrt() * apart - (r * c * s * x.double() + J.double())
    elif scope == "all":
        g = -(c**2) * apart - r * (c * s * x.double() + J.double())
    else:
        raise ValueError(f"the scope of the warm-up must be data or all, not {scope!r}")
    return _normalised(g, F_minus)


def scm_loss(F: Tensor, F_minus: Tensor, g: Tensor) -> Tensor:
    """The loss sum (F - sg F^- - g)^2 [B], float64: |g|^2 whatever the student does, but its gradient is -2 g.

    F^- is F of the same weights without gradient; pass them apart, since their bits need not be equal.
    """
    return ((F.double() - F_minus.detach().double() - g.double()) ** 2).flatten(1).sum(1)


# --- J ----------------------------------------------------------------------------------------------------

# (fn, primals, tangents) -> (fn(*primals), its derivative along tangents): forward-mode differentiation.
Derivative: TypeAlias = Callable[
    [Callable[..., Tensor], tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, Tensor]
]


@torch.no_grad()
def J_exact(
    F: Trig, x: Tensor, theta: Tensor, F_T: Tensor, h: float, derivative: Derivative
) -> tuple[Tensor, Tensor]:
    """F and J = c s dF/dtheta along the teacher's path, in one forward-mode call; h is not used.

    The tangents are (c s F_T, c s), scaled before the network so that J stays bounded (sCM, section on
    rearranging the derivative).

    Args:
        F: the student.
        x: where it is asked [B, ...].
        theta: the angle [B].
        F_T: dx/dtheta, the teacher's F [B, ...].
        h: the step of the difference in radians; theta itself where theta is smaller.
        derivative: forward-mode differentiation, such as `flowkit.jvp.derivative` or `torch.func.jvp`.
    """
    cs = _cs(theta)
    return derivative(F, (x, theta), (expand(cs, x) * F_T, cs.to(theta)))


@torch.no_grad()
def J_time_difference(
    F: Trig, x: Tensor, theta: Tensor, F_T: Tensor, h: float, derivative: Derivative
) -> tuple[Tensor, Tensor]:
    """F and J, exact in x and by a difference in theta: JVP(c s F_T, 0) + c s [cos h F - F(x, theta - h)]/sin h.

    For a network whose embedding of time has no forward-mode rule. First order in h; see `J_exact`.
    """
    h_ = _step(theta, h)
    value, J = derivative(F, (x, theta), (expand(_cs(theta), x) * F_T, torch.zeros_like(theta)))
    before = F(x, (theta.double() - h_).clamp(min=0).to(theta))
    return value, J + _difference(value, before, theta, h_)


@torch.no_grad()
def J_difference(
    F: Trig, x: Tensor, theta: Tensor, F_T: Tensor, h: float, derivative: Derivative
) -> tuple[Tensor, Tensor]:
    """F and J by a difference in both: c s [cos h F - F(cos h x - sin h F_T, theta - h)]/sin h.

    Two plain calls, no derivative. First order in h, and exact for any h where F is that of one point of
    data: on its path F(theta - h) = cos h F - sin h dF/dtheta. See `J_exact`.
    """
    h_ = _step(theta, h)
    value = F(x, theta)
    before = F(ddim(x, F_T, h_), (theta.double() - h_).clamp(min=0).to(theta))
    return value, _difference(value, before, theta, h_)


DERIVATIVES: dict[int, Callable[[Trig, Tensor, Tensor, Tensor, float, Derivative], tuple[Tensor, Tensor]]] = {
    0: J_exact,
    1: J_time_difference,
    2: J_difference,
}


def smallest_h(dtype: torch.dtype) -> float:
    """The step below which a difference loses more to the rounding of `dtype` than it gains: sqrt(eps).

    Numbers of order 1 are rounded by eps, so their difference over h is off by eps / h; a first-order
    difference is off by h anyway. The two are equal at h = sqrt(eps), and the sum is least there. `dtype` is
    the narrowest that x, the time or the network's values pass through.

    >>> [round(smallest_h(d), 5) for d in (torch.bfloat16, torch.float32)]
    [0.08839, 0.00035]
    """
    return math.sqrt(torch.finfo(dtype).eps)


def check_h(h: float, dtype: torch.dtype) -> None:
    """Refuse a step that drowns in rounding.

    Raises:
        ValueError: when h is below `smallest_h(dtype)`, or is no small angle.
    """
    least, name = smallest_h(dtype), str(dtype).removeprefix("torch.")
    enough = f"{1.05 * least:.2g}"  # not below it after rounding
    if not h >= least:
        raise ValueError(f"a difference over h = {h:g} drowns in the rounding of {name}: use h >= {enough}")
    if h > 0.2:
        raise ValueError(f"h = {h:g} is too long for a first-order difference: use {enough} to 0.2")


# --- discrete consistency ---------------------------------------------------------------------------------


def ddim(x: Tensor, F_T: Tensor, h: float | Tensor) -> Tensor:
    """One step of the TrigFlow ODE from theta to theta - h: cos h x - sin h F_T [B, ...]; h is a number or [B].

    It turns (x, F) by h, so it is exact where x0 and eps stay the same.
    """
    h = torch.as_tensor(h, dtype=torch.float64, device=x.device)
    return expand(h.cos(), x) * x - expand(h.sin(), x) * F_T


def dcm_next(theta: Tensor, n: int, k: float = 5.0) -> Tensor:
    """The angle [B] one of n equal steps below theta, equal in rectified-flow time before its shift by k.

    Raises:
        ValueError: for n below 1.
    """
    if n < 1:
        raise ValueError(f"discrete consistency needs at least one step, not {n}")
    t = unshift(t_of(theta), k)
    assert isinstance(t, Tensor)
    after = shift((t - 1 / n).clamp(min=0), k)
    return theta_of(after)


@torch.no_grad()
def dcm_target(F: Trig, x: Tensor, theta: Tensor, theta_next: Tensor, F_T: Tensor) -> Tensor:
    """The frozen student's x0 [B, ...] after one step of the teacher from theta to theta_next < theta."""
    after = ddim(x, F_T, theta.double() - theta_next.double())
    return x0_of(after, theta_next, F(after, theta_next))


@torch.no_grad()
def dcm_tangent(F_minus: Tensor, x: Tensor, theta: Tensor, theta_next: Tensor, x0_target: Tensor) -> Tangent:
    """The tangent of discrete consistency: c (c x - s F^- - x0_target)/(theta - theta_next), normalised.

    It is c df/dtheta as a difference and goes to `tangent` at r = 1 as theta_next goes to theta, at first
    order. Like that it is 0 at theta = pi/2 exactly, so draw times below.
    """
    theta, theta_next = theta.double(), theta_next.double()
    f = x0_of(x.double(), theta, F_minus.double())
    rate = theta.cos() / (theta - theta_next)
    return _normalised(expand(rate, f) * (f - x0_target.double()), F_minus)


def dcm_loss(
    F: Tensor, F_minus: Tensor, x: Tensor, theta: Tensor, theta_next: Tensor, x0_target: Tensor
) -> Tensor:
    """The loss [B] of discrete consistency on F, in the scale of `scm_loss`; x0_target from `dcm_target`."""
    return scm_loss(F, F_minus, dcm_tangent(F_minus, x, theta, theta_next, x0_target).g)


def _normalised(g: Tensor, like: Tensor) -> Tangent:
    norm = torch.linalg.vector_norm(g.flatten(1), dim=1)
    return Tangent((g / expand(norm + NORM_OFFSET, g)).to(like.dtype), norm)


def _cs(theta: Tensor) -> Tensor:
    theta = theta.double()
    return theta.cos() * theta.sin()


def _step(theta: Tensor, h: float) -> Tensor:
    """The step h [B], cut to theta: no network knows times below 0, and c s / sin h stays below 1 all the same."""
    return theta.double().clamp(min=1e-30, max=h)


def _difference(value: Tensor, before: Tensor, theta: Tensor, h: Tensor) -> Tensor:
    """The difference c s [cos h F - F_before] / sin h, in float64."""
    wide = value.double()
    apart = expand(h.cos(), wide) * wide - before.double()
    return (expand(_cs(theta) / h.sin(), wide) * apart).to(value.dtype)
