"""Data with a closed-form velocity: a teacher that is exact, for any test that needs the truth.

If data is a Gaussian mixture, so is x_t = (1 - t) x0 + t eps at every t: component k has mean (1 - t) m_k and
variance (1 - t)^2 c_k + t^2 per coordinate. Velocity, log-density and, for one Gaussian, the flow map follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowkit.flow.path import Time, expand


@dataclass(frozen=True)
class Mixture:
    """A mixture of K Gaussians with spherical covariances, in D dimensions, float64.

    Attributes:
        weights: [K], summing to 1.
        means: [K, D].
        variances: [K].
    """

    weights: Tensor
    means: Tensor
    variances: Tensor

    @staticmethod
    def gaussian(mean: list[float], variance: float) -> Mixture:
        """One Gaussian."""
        f64 = torch.float64
        return Mixture(
            torch.ones(1, dtype=f64),
            torch.tensor([mean], dtype=f64),
            torch.tensor([variance], dtype=f64),
        )

    @staticmethod
    def two_unlike() -> Mixture:
        """Two unlike Gaussians in the plane: curved paths, so solvers have something to get wrong."""
        f64 = torch.float64
        return Mixture(
            torch.tensor([0.4, 0.6], dtype=f64),
            torch.tensor([[-1.5, 0.5], [1.0, -0.5]], dtype=f64),
            torch.tensor([0.1, 0.3], dtype=f64),
        )

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw data [n, D]."""
        k = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        noise = torch.randn(n, self.means.shape[1], dtype=torch.float64, generator=generator)
        return self.means[k] + self.variances[k].sqrt()[:, None] * noise

    def moments(self, t: Time = 0.0) -> tuple[Tensor, Tensor]:
        """Mean [D] and variance [D] of x_t, per coordinate."""
        mean0 = self.weights @ self.means
        variance0 = self.weights @ (self.variances[:, None] + self.means**2) - mean0**2
        return (1 - t) * mean0, (1 - t) ** 2 * variance0 + t**2

    def log_density(self, x: Tensor, t: Time) -> Tensor:
        """Log-density [B] of x_t at x [B, D]."""
        return self._joint(x, t)[0].logsumexp(1)

    def x0(self, x: Tensor, t: Time) -> Tensor:
        """The posterior mean E[x0 | x_t = x], [B, D]."""
        joint, off, spread = self._joint(x, t)
        a = 1 - expand(t, x)[..., None]
        each = self.means + (a * self.variances[:, None] / spread[..., None]) * off  # [B, K, D]
        return (joint.softmax(1)[..., None] * each).sum(1)

    def velocity(self, x: Tensor, t: Time) -> Tensor:
        """E[eps - x0 | x_t = x], [B, D]: what a perfectly trained network would say."""
        joint, off, spread = self._joint(x, t)
        tt = expand(t, x)[..., None]
        a = 1 - tt
        each = (tt - a * self.variances[:, None]) / spread[..., None] * off - self.means  # [B, K, D]
        return (joint.softmax(1)[..., None] * each).sum(1)

    def flow_map(self, x: Tensor, t: Time, s: Time) -> Tensor:
        """Where the ODE takes x [B, D] from t to s, for one Gaussian: it keeps the standardised distance."""
        assert len(self.weights) == 1, "the flow map of a mixture has no closed form"
        a, b = 1 - expand(t, x), 1 - expand(s, x)
        c = self.variances[0]
        ratio = ((b**2 * c + (1 - b) ** 2) / (a**2 * c + (1 - a) ** 2)).sqrt()
        return b * self.means[0] + ratio * (x - a * self.means[0])

    def _joint(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor, Tensor]:
        """log p(k, x) [B, K], x - (1-t) m_k [B, K, D], and the variance of x_t given k, [B, K] or [1, K]."""
        tt = expand(t, x).reshape(-1, 1)
        spread = (1 - tt) ** 2 * self.variances + tt**2
        off = x[:, None, :] - (1 - tt)[..., None] * self.means
        d = self.means.shape[1]
        norm = 0.5 * d * (2 * torch.pi * spread).log()
        return self.weights.log() - (off**2).sum(2) / (2 * spread) - norm, off, spread
