"""Times of training: samplers of the TrigFlow angle theta, with their densities.

All float64, from an explicit generator. An interval is one of tau, the rectified-flow time s / (c + s) in
[0, 1] (not of theta): experts that share a trajectory, as Wan 2.2's two at .9, are split by it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flowkit.flow.wrappers import theta_of


class Times(Protocol):
    """A distribution of theta in [0, pi/2]."""

    def density(self, theta: Tensor) -> Tensor:
        """The density at theta, per radian."""
        ...

    def cdf(self, theta: Tensor) -> Tensor:
        """The probability of an angle below theta."""
        ...

    def quantile(self, u: Tensor) -> Tensor:
        """The inverse of `cdf`: theta of u in [0, 1]."""
        ...

    def sample(self, n: int, generator: torch.Generator, *, stratified: bool = False) -> Tensor:
        """Draw theta [n], float64, on the device of the generator.

        With `stratified` each n-th of the distribution gives one, in random order: the same density for
        every entry, and a mean over the batch that varies less.
        """
        ...


class _Inverse(ABC):
    """Drawing by the inverse of the cdf."""

    @abstractmethod
    def quantile(self, u: Tensor) -> Tensor:
        """The inverse of the cdf."""

    def sample(self, n: int, generator: torch.Generator, *, stratified: bool = False) -> Tensor:
        """Draw theta [n]; see `Times.sample`."""
        device = generator.device
        u = torch.rand(n, dtype=torch.float64, generator=generator, device=device)
        if stratified:
            u = (torch.randperm(n, generator=generator, device=device) + u) / n
        return self.quantile(u)


@dataclass(frozen=True)
class LogNormal(_Inverse):
    """log(tan(theta) / shift) is normal with `mean` and `std` (sCM, arXiv:2410.11081).

    `shift` multiplies sigma = tan theta, as a static shift of tau does: rCM's is sqrt(latent frames) for
    video, the same as .5 log(frames) on the mean (arXiv:2510.08431).
    """

    mean: float
    std: float
    shift: float = 1.0

    def __post_init__(self) -> None:
        if self.std <= 0 or self.shift <= 0:
            raise ValueError(f"std and shift must be positive, not {self.std} and {self.shift}")

    def density(self, theta: Tensor) -> Tensor:
        """The density phi((log(tan theta / shift) - mean) / std) / (std sin theta cos theta)."""
        phi = (-0.5 * self._z(theta) ** 2).exp() / math.sqrt(2 * math.pi)
        return phi / (self.std * theta.sin() * theta.cos())

    def cdf(self, theta: Tensor) -> Tensor:
        """The probability of an angle below theta."""
        below: Tensor = torch.special.ndtr(self._z(theta))
        return below

    def quantile(self, u: Tensor) -> Tensor:
        """The inverse of `cdf`."""
        z: Tensor = torch.special.ndtri(u)
        return (self.shift * (self.mean + self.std * z).exp()).atan()

    def _z(self, theta: Tensor) -> Tensor:
        return ((theta.tan() / self.shift).log() - self.mean) / self.std


@dataclass(frozen=True)
class UniformShift(_Inverse):
    """tau = k u / (1 + (k - 1) u) with u uniform on [0, 1): the static shift of an even draw."""

    k: float

    def __post_init__(self) -> None:
        if self.k <= 0:
            raise ValueError(f"the shift must be positive, not {self.k}")

    def density(self, theta: Tensor) -> Tensor:
        """The density k / (k cos theta + sin theta)^2."""
        return self.k / (self.k * theta.cos() + theta.sin()) ** 2

    def cdf(self, theta: Tensor) -> Tensor:
        """The probability sin theta / (k cos theta + sin theta) of an angle below theta."""
        return theta.sin() / (self.k * theta.cos() + theta.sin())

    def quantile(self, u: Tensor) -> Tensor:
        """The inverse of `cdf`."""
        return torch.atan2(self.k * u, 1 - u)


@dataclass(frozen=True)
class Interval(_Inverse):
    """Any sampler, given that tau (rectified-flow time) is in [lo, hi]."""

    times: Times
    lo: float
    hi: float

    def __post_init__(self) -> None:
        if not 0 <= self.lo < self.hi <= 1:
            raise ValueError(f"an interval of time must lie in [0, 1], not be {self.lo} to {self.hi}")

    def density(self, theta: Tensor) -> Tensor:
        """That of the sampler over its probability of the interval, and 0 outside."""
        start, end = self._angles(theta)
        low, high = self._ends(theta)
        return torch.where((theta < start) | (theta > end), 0.0, self.times.density(theta) / (high - low))

    def cdf(self, theta: Tensor) -> Tensor:
        """The probability of an angle below theta."""
        low, high = self._ends(theta)
        return ((self.times.cdf(theta) - low) / (high - low)).clamp(0, 1)

    def quantile(self, u: Tensor) -> Tensor:
        """The inverse of `cdf`."""
        low, high = self._ends(u)
        start, end = self._angles(u)
        # The cdf of far tails is flat: rounding must not throw a draw over the edge.
        return torch.minimum(torch.maximum(self.times.quantile(low + u * (high - low)), start), end)

    def _angles(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return theta_of(self.lo).to(like.device), theta_of(self.hi).to(like.device)

    def _ends(self, like: Tensor) -> tuple[Tensor, Tensor]:
        start, end = self._angles(like)
        return self.times.cdf(start), self.times.cdf(end)


def bell_weights(n: int) -> Tensor:
    """Weights [n] of the steps of a falling grid, float64, with mean 1, as DiffSynth-Studio trains with.

    exp(-2 ((x - n/2)/n)^2) for x = n ... 1 less its smallest value: 0 at pure noise, most in the middle.

    >>> bell_weights(4).tolist()[0]
    0.0

    Raises:
        ValueError: for fewer than 2 steps, whose weights would be 0/0.
    """
    if n < 2:
        raise ValueError(f"a bell needs at least two steps, not {n}")
    x = torch.arange(n, 0, -1, dtype=torch.float64)
    bell = (-2 * ((x - n / 2) / n) ** 2).exp()
    bell = bell - bell.min()
    return bell / bell.mean()
