"""The teacher is checked against sampling and automatic differentiation, since others rely on it."""

from __future__ import annotations

import torch
from hypothesis import given

from flowkit.flow.path import interpolate, x0_of
from tests.flow.analytic import Mixture
from tests.flow.given import bounded, inner, normal, seeds


@bounded
@given(inner, seeds)
def test_the_velocity_is_that_of_the_posterior_mean(t: float, seed: int) -> None:
    mix = Mixture.two_unlike()
    x = normal(4, 2, seed=seed)
    # t >= .01 and numbers of order 1: no cancellation beyond 1e-12.
    torch.testing.assert_close(x0_of(x, mix.velocity(x, t), t), mix.x0(x, t), rtol=0, atol=1e-12)


@bounded
@given(inner, seeds)
def test_the_velocity_is_that_of_the_score(t: float, seed: int) -> None:
    mix = Mixture.two_unlike()
    x = normal(4, 2, seed=seed).requires_grad_()
    (score,) = torch.autograd.grad(mix.log_density(x, t).sum(), x)
    # Tweedie: E[eps | x] = -t score, and v = (E eps - x) / (1 - t); 1 - t >= .01 amplifies 1e-14.
    torch.testing.assert_close(mix.velocity(x, t), (-t * score - x) / (1 - t), rtol=0, atol=1e-9)


def test_the_moments_are_those_of_the_samples() -> None:
    mix, t = Mixture.two_unlike(), 0.3
    x0 = mix.sample(40_000, torch.Generator().manual_seed(0))
    x = interpolate(x0, normal(*x0.shape, seed=1), t)
    mean, variance = mix.moments(t)
    # The sample variance of 40,000 numbers has a relative error of sqrt(2/40,000) = .7 %; four of them.
    torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=0.02)
    torch.testing.assert_close(x.var(0), variance, rtol=0.03, atol=0)


@bounded
@given(inner, seeds)
def test_the_flow_map_of_a_gaussian_moves_with_the_velocity(s: float, seed: int) -> None:
    mix, x = Mixture.gaussian([0.5, -1.0], 0.25), normal(4, 2, seed=seed)
    time = torch.tensor(s, dtype=torch.float64, requires_grad=True)
    y = mix.flow_map(x, 1.0, time)
    slopes = [torch.autograd.grad(c, time, retain_graph=True)[0] for c in y.flatten()]
    torch.testing.assert_close(
        torch.stack(slopes).reshape(4, 2), mix.velocity(y.detach(), s), rtol=0, atol=1e-11
    )
