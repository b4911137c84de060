"""TrigFlow coordinates, and networks of other parameterisations seen in them (sCM, arXiv:2410.11081).

x = c x0 + s eps with c = cos theta, s = sin theta and theta in [0, pi/2]: 0 = data, pi/2 = noise. A network in
these coordinates says F = c eps - s x0 = dx/dtheta, so x0 = c x - s F. Data is measured so that its std is
about 1. Coefficients are computed in float64 and cast once, to the dtype of x. Nothing here works in place
or reads a value, so every wrapped network can be differentiated forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flowkit.flow.path import Time, as_time, expand
from flowkit.flow.solvers import Velocity

Trig: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # x [B, ...], theta [B] -> F [B, ...]


def t_of(theta: Time) -> Tensor:
    """The rectified-flow time s / (c + s) of an angle, float64.

    >>> round(float(t_of(1.0)), 4)
    0.609
    """
    c, s = _cos_sin(theta)
    return s / (c + s)


def theta_of(t: Time) -> Tensor:
    """The angle atan(t / (1 - t)) of a rectified-flow time, float64: the inverse of `t_of`."""
    t = as_time(t).double()
    return torch.atan2(t, 1 - t)


def to_trig(x: Tensor, t: Time) -> tuple[Tensor, Tensor]:
    """(x [B, ...], theta) in TrigFlow of (x, t) in rectified flow: x divided by sqrt(t^2 + (1 - t)^2)."""
    theta = theta_of(t)
    c, s = _cos_sin(theta)
    return expand(c + s, x) * x, theta


def to_rf(x: Tensor, theta: Time) -> tuple[Tensor, Tensor]:
    """(x [B, ...], t) in rectified flow of (x, theta) in TrigFlow: x divided by c + s."""
    c, s = _cos_sin(theta)
    return expand(1 / (c + s), x) * x, s / (c + s)


def x0_of(x: Tensor, theta: Time, F: Tensor) -> Tensor:
    """The data end c x - s F [B, ...]; with a network's F, its guess of it."""
    c, s = _cos_sin(theta)
    return expand(c, x) * x - expand(s, x) * F


def velocity_of(x: Tensor, theta: Time, F: Tensor) -> Tensor:
    """The rectified-flow velocity eps - x0 = (c + s) F - (c - s) x [B, ...] of x and F in TrigFlow."""
    c, s = _cos_sin(theta)
    return expand(c + s, x) * F - expand(c - s, x) * x


def trigflow(velocity: Velocity) -> Trig:
    """A rectified-flow network velocity(x, t) -> v, seen in TrigFlow: F = [(c - s) x + v] / (c + s).

    The network is given x / (c + s) in the dtype of x and t = s / (c + s) [B] in float32, or in float64
    when x is. There is no division by s, so theta = 0 is fine. Inverse: `rectified`.
    """
    return wrap(RECTIFIED_FLOW, velocity)


def rectified(F: Trig) -> Velocity:
    """A TrigFlow network seen in rectified flow: the inverse of `trigflow`.

    The network is given theta [B] in float64, whatever the dtype of t.
    """

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        y, theta = to_trig(x, t)
        return velocity_of(y, theta, F(y, theta))

    return velocity


# --- teachers of any parameterisation ---------------------------------------------------------------------


class Coefficients(NamedTuple):
    """What stands between TrigFlow and a network N: x0 = c_skip x + c_out N(c_in x, c_noise).

    All float64, shaped like theta. `f_skip` and `f_out` say the same of F = f_skip x + f_out N, without
    the division by s that (c x - x0) / s would have.
    """

    c_in: Tensor
    c_skip: Tensor
    c_out: Tensor
    c_noise: Tensor
    f_skip: Tensor
    f_out: Tensor


@dataclass(frozen=True)
class Process:
    """How a teacher noises data: x_raw = alpha(t_raw) x0 + sigma(t_raw) eps, sigma / alpha rising.

    Attributes:
        alpha: t_raw -> float64.
        sigma: t_raw -> float64.
        raw_of: theta (float64) -> the t_raw with sigma / alpha = tan theta, in the network's own unit.
    """

    alpha: Callable[[Tensor], Tensor]
    sigma: Callable[[Tensor], Tensor]
    raw_of: Callable[[Tensor], Tensor]


Prediction = Literal["flow", "v", "eps", "x0"]


@dataclass(frozen=True)
class Wrapper:
    """A network that takes (x_raw, t_raw) of a process and predicts one of four things.

    Attributes:
        process: how its data was noised.
        prediction: `flow` eps - x0, `v` alpha eps - sigma x0 (arXiv:2202.00512), `eps` or `x0`. F of `eps`
            divides by c and is useless at pure noise; F of `x0` divides by s and is useless at theta = 0.
    """

    process: Process
    prediction: Prediction

    def __call__(self, theta: Tensor) -> Coefficients:
        """Coefficients at theta, float64."""
        c, s = _cos_sin(theta)
        raw = self.process.raw_of(theta.double())
        # The process has x_raw = k (c x0 + s eps): rescaling x by k is all that a change of schedule takes.
        k = (self.process.alpha(raw) ** 2 + self.process.sigma(raw) ** 2).sqrt()
        f_skip, f_out = {
            "flow": lambda: ((c - s) / (c + s), 1 / (c + s)),
            "v": lambda: (torch.zeros_like(c), 1 / k),
            "eps": lambda: (-s / c, 1 / c),
            "x0": lambda: (c / s, -1 / s),
        }[self.prediction]()
        if self.prediction == "x0":
            return Coefficients(k, torch.zeros_like(c), torch.ones_like(c), raw, f_skip, f_out)
        return Coefficients(k, c - s * f_skip, -s * f_out, raw, f_skip, f_out)


@dataclass(frozen=True)
class Edm:
    """EDM's raw network, between its own preconditioners, in TrigFlow (arXiv:2206.00364).

    With d^2 = s^2 + sigma_data^2 c^2: c_in = 1/d, F = c s (1 - sigma_data^2)/d^2 x - sigma_data/d N, c_noise =
    log(tan theta)/4. x is data plus noise at c : s; data keeps its std sigma_data.
    """

    sigma_data: float = 0.5

    def __call__(self, theta: Tensor) -> Coefficients:
        """Coefficients at theta, float64."""
        c, s = _cos_sin(theta)
        d = (s**2 + self.sigma_data**2 * c**2).sqrt()
        f_skip, f_out = c * s * (1 - self.sigma_data**2) / d**2, -self.sigma_data / d
        return Coefficients(1 / d, c - s * f_skip, -s * f_out, (s / c).log() / 4, f_skip, f_out)


def table(betas: Tensor) -> Process:
    """The process of a DDPM table of N betas: t_raw is an index, between two of which log tan is a line.

    Outside of what the table reaches t_raw stays at its ends, 0 and N - 1 (arXiv:2006.11239).
    """
    kept = (1 - betas.double()).cumprod(0)
    angles = ((1 - kept).sqrt() / kept.sqrt()).log()  # log tan theta of each index, rising
    top = len(angles) - 1

    def line(raw: Tensor) -> Tensor:
        i = raw.detach().floor().long().clamp(0, top - 1)
        at = angles.to(raw.device)
        return (at[i] + (raw - i) * (at[i + 1] - at[i])).exp().atan()

    def raw_of(theta: Tensor) -> Tensor:
        at, seen = angles.to(theta.device), theta.tan().log()
        i = (torch.searchsorted(at, seen.detach()) - 1).clamp(0, top - 1)
        return (i + (seen - at[i]) / (at[i + 1] - at[i])).clamp(0, top)

    return Process(lambda raw: line(raw).cos(), lambda raw: line(raw).sin(), raw_of)


RECTIFIED_FLOW = Wrapper(Process(lambda t: 1 - t, lambda t: t, t_of), "flow")
_COSINE = Process(
    lambda t: (t * torch.pi / 2).cos(), lambda t: (t * torch.pi / 2).sin(), lambda theta: theta * 2 / torch.pi
)
# The linear table of DDPM and the table, linear in sqrt(beta), of Stable Diffusion 1 and 2.
_DDPM = table(torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64))
_SD = table(torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2)
_SIGMA = Process(torch.ones_like, lambda sigma: sigma, torch.tan)

WRAPPERS: dict[str, Callable[[Tensor], Coefficients]] = {
    "rectified-flow": RECTIFIED_FLOW,
    "vp-cosine-v": Wrapper(_COSINE, "v"),
    "vp-cosine-eps": Wrapper(_COSINE, "eps"),
    "ddpm-eps": Wrapper(_DDPM, "eps"),
    "sd-eps": Wrapper(_SD, "eps"),
    "sd-v": Wrapper(_SD, "v"),
    "edm": Edm(),
    "edm-x0": Wrapper(_SIGMA, "x0"),
}


def coefficients(name: str, theta: Time) -> Coefficients:
    """The coefficients of `WRAPPERS[name]` at theta, float64, shaped like theta.

    c_noise is in the network's own unit: t in [0, 1] for rectified flow and the cosine, an index for the
    tables, log(sigma)/4 for EDM's raw network and sigma for its denoiser.

    >>> [round(float(c), 4) for c in coefficients("rectified-flow", 1.0)[:4]]
    [0.7237, 0.7237, -0.609, 0.609]

    Raises:
        ValueError: for an unknown name.
    """
    if name not in WRAPPERS:
        raise ValueError(f"the parameterisation must be one of {', '.join(WRAPPERS)}, not {name!r}")
    return WRAPPERS[name](as_time(theta))


def wrap(wrapper: Callable[[Tensor], Coefficients], network: Callable[[Tensor, Tensor], Tensor]) -> Trig:
    """A network N(x_raw [B, ...], t_raw [B]) seen in TrigFlow; `wrapper` is one of `WRAPPERS` or another.

    It is given x_raw in the dtype of x and t_raw in float32, or in float64 when x is.
    """

    def F(x: Tensor, theta: Tensor) -> Tensor:
        k = wrapper(theta)
        # Half precision has eight bits of time; float32 is what networks embed.
        raw = k.c_noise.to(torch.promote_types(x.dtype, torch.float32))
        return expand(k.f_skip, x) * x + expand(k.f_out, x) * network(expand(k.c_in, x) * x, raw)

    return F


def _cos_sin(theta: Time) -> tuple[Tensor, Tensor]:
    theta = as_time(theta).double()
    return theta.cos(), theta.sin()
