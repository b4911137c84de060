"""Laws: one sampling step from time t to s < t as a Gaussian, given by its mean and std.

Each law maps (x, v, t, s, level) to (mean [B, ...], std). x and v are [B, ...] of one float dtype; t and s
are numbers, 0-dim or [B] tensors; std is 0-dim or [B, 1, ..., 1], as the times are. Coefficients are
computed in the dtype of the times (float64 for plain numbers) and cast once, to the dtype of x.
A sampler draws mean + std * noise. Level 0 of every law that has a level is `ode`, bit for bit.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
from torch import Tensor

from flowkit.flow.path import Time, as_time, eps_of, expand, x0_of


class Law(Protocol):
    """The signature that all laws share.

    Args:
        x: the state at time t, [B, ...].
        v: its velocity, eps - x0, [B, ...].
        t: the time of x.
        s: the time to step to, below t.
        level: how much noise is put in; each law says in which unit.
        t_at_one: what `flow-sde` takes for t in 1 - t at t == 1 exactly; None is s, the next time.
    """

    def __call__(
        self, x: Tensor, v: Tensor, t: Time, s: Time, level: float, *, t_at_one: Time | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mean [B, ...] and the std, which broadcasts against it, of the state at time s."""
        ...


def ode(
    x: Tensor, v: Tensor, t: Time, s: Time, level: float = 0.0, *, t_at_one: Time | None = None
) -> tuple[Tensor, Tensor]:
    """Euler's step x + v dt, with std 0 whatever the level."""
    dt = as_time(s) - as_time(t)
    return x + v * expand(dt, x), expand(torch.zeros_like(dt), x)


def flow_sde(
    x: Tensor, v: Tensor, t: Time, s: Time, level: float, *, t_at_one: Time | None = None
) -> tuple[Tensor, Tensor]:
    """Euler-Maruyama step of the flow's SDE with g = level sqrt(t / (1 - t)) (Flow-GRPO, arXiv:2505.05470).

    It keeps the whole marginal as steps grow: on Gaussian data at level .5 the variance of the samples is
    .85 of the data's at 10 equal steps and 1.00 at 400. g is infinite at t = 1, so there 1 - t is taken at
    `t_at_one`: at s by default, as the reference does. Clamping it at .99 instead moves the .85 to 1.43.

    Raises:
        ValueError: for a negative level.
    """
    _check(level)
    t, s = as_time(t), as_time(s)
    tilde = torch.where(t == 1, s if t_at_one is None else as_time(t_at_one).to(t), t)
    return _sde(x, v, t, s, level * (t / (1 - tilde)).sqrt())


def dance(
    x: Tensor, v: Tensor, t: Time, s: Time, level: float, *, t_at_one: Time | None = None
) -> tuple[Tensor, Tensor]:
    """The step of `flow_sde` with a constant g = level (DanceGRPO, arXiv:2505.07818).

    Raises:
        ValueError: for a negative level.
    """
    _check(level)
    t = as_time(t)
    return _sde(x, v, t, as_time(s), level * torch.ones_like(t))


def cps(
    x: Tensor, v: Tensor, t: Time, s: Time, level: float, *, t_at_one: Time | None = None
) -> tuple[Tensor, Tensor]:
    """Coefficients-preserving step: fresh noise for a share of the predicted (Flow-CPS, arXiv:2509.05952).

    mean = (1-s) x0 + s cos(level pi/2) eps, std = s sin(level pi/2), level in [0, 1]. The noise level is
    kept exactly, (s cos)^2 + std^2 = s^2. The variance of the samples is not, however many the steps: on
    Gaussian data at level .5 it is .84 of the data's at 400. Level 1 is `consistency`.

    Raises:
        ValueError: for a level outside [0, 1].
    """
    _check(level, most=1.0)
    mean, _ = ode(x, v, t, s)
    s = as_time(s)
    # (1-s) x0 + s eps is x + v dt. Written as that less s (1 - cos) eps, level 0 is Euler's step to the bit.
    lost = s * (2 * math.sin(level * math.pi / 4) ** 2)
    return mean - expand(lost, x) * eps_of(x, v, t), expand(s * math.sin(level * math.pi / 2), x)


def consistency(
    x: Tensor, v: Tensor, t: Time, s: Time, level: float = 1.0, *, t_at_one: Time | None = None
) -> tuple[Tensor, Tensor]:
    """Predict x0 and noise it again to s: a few-step student's own sampler (arXiv:2303.01469).

    mean = (1-s) x0, std = s. It has no level: all noise is fresh, whatever is passed.
    """
    return expand(1 - as_time(s), x) * x0_of(x, v, t), expand(s, x)


LAWS: dict[str, Law] = {
    "ode": ode,
    "flow-sde": flow_sde,
    "dance": dance,
    "cps": cps,
    "consistency": consistency,
}


def rate(law: str, std: Tensor, t: Time, s: Time) -> Tensor:
    """The g that `kl_path` divides by: std / sqrt(t - s) for the two SDEs, std itself for the other laws.

    Shaped like std. This is what the Flow-GRPO code calls std_dev_t.
    """
    if law not in ("flow-sde", "dance"):
        return std
    root = (as_time(t) - as_time(s)).sqrt().to(std)
    return std / (root if root.ndim == 0 else root.reshape(-1, *[1] * (std.ndim - 1)))


Reduction = Literal["mean", "sum", "unit"]


def log_prob(y: Tensor, mean: Tensor, std: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Log-density [B] of y [B, ...] under the Gaussian of one step.

    `mean` averages over all dims but the batch (Flow-GRPO; it sets the scale of clip ranges, 1e-5 to 1e-3),
    `sum` adds them up, and `unit` is -mean (y - mean)^2, without variance and constants (Flow-CPS).

    Raises:
        ValueError: when any std is not positive (a step without noise has no density; on CUDA it is an
            assertion of the device), or for an unknown reduction.
    """
    positive = (std > 0).all()
    if std.is_cuda:
        torch._assert_async(positive)  # fails on the device, without waiting for it here
    elif not positive:
        raise ValueError("a step with std 0 has no log-probability: train noisy steps only")
    square = (y - mean) ** 2
    if reduction == "unit":
        return -square.reshape(len(y), -1).mean(1)
    density = -square / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    flat = density.reshape(len(y), -1)
    if reduction == "sum":
        return flat.sum(1)
    if reduction == "mean":
        return flat.mean(1)
    raise ValueError(f"reduction must be mean, sum or unit, not {reduction!r}")


def _sde(x: Tensor, v: Tensor, t: Tensor, s: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Euler-Maruyama of dx = [v + g^2/(2t) (x + (1-t) v)] dt + g dw; x + (1-t) v is the predicted noise."""
    dt = s - t
    pull = g**2 / (2 * t)
    mean = x * expand(1 + pull * dt, x) + v * expand(dt * (1 + pull * (1 - t)), x)
    return mean, expand(g * (-dt).sqrt(), x)


def _check(level: float, most: float = math.inf) -> None:
    if not 0 <= level <= most:
        raise ValueError(f"the level of this law must be in [0, {most:g}], not {level}")
