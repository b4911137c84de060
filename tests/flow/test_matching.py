from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowkit.flow.matching import (
    Turns,
    critic_loss,
    dmd_loss,
    guide,
    renoise,
    simulate,
    simulation_thetas,
)
from flowkit.flow.times import LogNormal
from flowkit.flow.wrappers import trigflow, x0_of
from tests.flow.analytic import Mixture
from tests.flow.given import bounded, normal, seeds


def test_guidance_goes_beyond_the_conditional_at_more_than_one() -> None:
    u, c = normal(3, 2), normal(3, 2, seed=1)
    torch.testing.assert_close(guide(u, c, 0.0), u)
    torch.testing.assert_close(guide(u, c, 1.0), c)
    torch.testing.assert_close(guide(u, c, 5.0), c + 4 * (c - u))


# --- backward simulation ----------------------------------------------------------------------------------


def angles(n: int, batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    draws = [LogNormal(0.0, 1.6).sample(batch, generator) for _ in range(n - 1)]
    return simulation_thetas(torch.stack(draws) if draws else torch.empty(0, batch, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_angles_start_at_pure_noise_and_never_rise(n: int) -> None:
    thetas = angles(n, 50)
    assert thetas.shape == (n, 50)
    assert bool((thetas[0] == math.pi / 2).all())
    assert bool((thetas[1:] <= thetas[:-1]).all())


@pytest.mark.parametrize("n", [1, 2, 4])
def test_simulation_is_predict_and_noise_again_with_the_gradient_of_its_last_call(n: int) -> None:
    thetas, noise = angles(n), [normal(4, 2, seed=i) for i in range(n)]
    weights = torch.tensor(
        [0.7] * n, dtype=torch.float64, requires_grad=True
    )  # one per call, to tell them apart
    calls: list[int] = []

    def F(x: Tensor, theta: Tensor) -> Tensor:
        calls.append(len(calls))
        return torch.sin(x.roll(1, 1)) * weights[calls[-1]] + theta[:, None] / 3

    out = simulate(F, lambda step: noise[step], thetas)
    x = noise[0]
    for i in range(n):
        c, s = thetas[i].cos()[:, None], thetas[i].sin()[:, None]
        G = c * x - s * (torch.sin(x.roll(1, 1)) * 0.7 + thetas[i][:, None] / 3)
        if i + 1 < n:
            x = thetas[i + 1].cos()[:, None] * G + thetas[i + 1].sin()[:, None] * noise[i + 1]
    torch.testing.assert_close(out.G.detach(), G, rtol=0, atol=1e-13)
    torch.testing.assert_close(out.x, x, rtol=0, atol=1e-13)
    assert torch.equal(out.theta, thetas[-1])
    assert len(calls) == n
    (slope,) = torch.autograd.grad(out.G.sum(), weights)
    assert not slope[:-1].any()
    assert float(slope[-1]) != 0


# --- the loss of the student ------------------------------------------------------------------------------


@bounded
@given(seeds)
def test_the_gradient_is_zero_when_the_fake_is_real(seed: int) -> None:
    mix, theta = Mixture.two_unlike(), torch.linspace(0.1, 1.5, 5, dtype=torch.float64)
    teacher = trigflow(mix.velocity)
    G = normal(5, 2, seed=seed).requires_grad_()
    x = renoise(G.detach(), normal(5, 2, seed=seed + 1), theta)
    real = x0_of(x, theta, teacher(x, theta))
    loss, weight = dmd_loss(G, real.clone(), real)
    (slope,) = torch.autograd.grad(loss.sum(), G)
    assert not slope.any()
    assert not loss.detach().any()
    assert bool((weight > 0).all())


def test_the_gradient_is_twice_the_difference_over_its_weight() -> None:
    G, fake, real = normal(3, 2, 4).requires_grad_(), normal(3, 2, 4, seed=1), normal(3, 2, 4, seed=2)
    loss, weight = dmd_loss(G, fake, real)
    w = (G.detach() - real).abs().mean((1, 2))
    torch.testing.assert_close(weight, w, rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(loss.sum(), G)
    torch.testing.assert_close(slope, 2 * (fake - real) / w[:, None, None], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(loss.detach(), ((fake - real) ** 2).sum((1, 2)) / w**2, rtol=1e-12, atol=1e-14)


def test_the_weight_has_a_floor() -> None:
    G = normal(3, 2)
    assert dmd_loss(G, G + 1, G).weight.tolist() == [1e-5] * 3


def test_on_average_the_gradient_moves_a_gaussian_to_the_teachers() -> None:
    """With exact scores of both, w aside, E[fake - real] has the sign of the distance between the means."""
    real, fake = Mixture.gaussian([0.5, -1.0], 0.25), Mixture.gaussian([1.5, -2.0], 0.25)
    g = torch.Generator().manual_seed(0)
    G = fake.sample(4000, g).requires_grad_()
    theta = LogNormal(0.0, 1.6).sample(4000, g)
    x = renoise(G.detach(), torch.randn(4000, 2, dtype=torch.float64, generator=g), theta)
    guesses = [x0_of(x, theta, trigflow(m.velocity)(x, theta)) for m in (fake, real)]
    (slope,) = torch.autograd.grad(dmd_loss(G, *guesses).loss.mean(), G)
    step = -slope.sum(0)
    assert step[0] < -0.1
    assert step[1] > 0.1


def test_dmd_alone_moves_a_generator_to_the_teachers_distribution() -> None:
    """G = a z + b against a Gaussian, with the exact score of what it makes: a and b have one place to rest."""
    real, g = Mixture.gaussian([0.5, -1.0], 0.25), torch.Generator().manual_seed(0)
    a = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    b = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([a, b], lr=0.05)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 300)
    teacher = trigflow(real.velocity)
    for _ in range(300):
        G = a * torch.randn(256, 2, dtype=torch.float64, generator=g) + b
        fake = trigflow(Mixture.gaussian(b.tolist(), float(a.detach()) ** 2).velocity)
        theta = LogNormal(0.0, 1.6).sample(256, g, stratified=True)
        x = renoise(G.detach(), torch.randn(256, 2, dtype=torch.float64, generator=g), theta)
        loss = dmd_loss(G, x0_of(x, theta, fake(x, theta)), x0_of(x, theta, teacher(x, theta))).loss.mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        fall.step()
    # At the goal every sample's gradient is zero, so nothing is left but the end of the descent.
    assert float(a.detach().abs()) == pytest.approx(0.5, abs=0.01)
    torch.testing.assert_close(b.detach(), real.means[0], rtol=0, atol=0.01)


# --- the loss of the critic -------------------------------------------------------------------------------


@bounded
@given(seeds)
def test_the_critics_loss_is_the_squared_error_of_F(seed: int) -> None:
    theta = torch.linspace(0.05, 1.57, 4, dtype=torch.float64)
    G, eps, guess = normal(4, 2, 3, seed=seed), normal(4, 2, 3, seed=seed + 1), normal(4, 2, 3, seed=seed + 2)
    x = renoise(G, eps, theta)
    c, s = theta.cos()[:, None, None], theta.sin()[:, None, None]
    truth = c * eps - s * G
    expected = ((guess - truth) ** 2).sum((1, 2))
    torch.testing.assert_close(critic_loss(G, x0_of(x, theta, guess), theta), expected, rtol=1e-10, atol=0)


def test_the_critic_that_loses_least_says_the_posterior_mean() -> None:
    mix, g, n = Mixture.gaussian([0.5, -1.0], 0.25), torch.Generator().manual_seed(0), 20_000
    theta = torch.full((n,), 0.9, dtype=torch.float64)
    G = mix.sample(n, g)
    x = renoise(G, torch.randn(n, 2, dtype=torch.float64, generator=g), theta)
    truth = x0_of(x, theta, trigflow(mix.velocity)(x, theta))
    scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    move = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    slopes = torch.autograd.grad(critic_loss(G, scale * truth + move, theta).mean(), (scale, move))
    # Means of 20,000 numbers of order 2: zero within a few hundredths.
    assert [float(slope) for slope in slopes] == pytest.approx([0, 0], abs=0.06)


def test_the_critic_does_not_move_the_student() -> None:
    G, guess = normal(4, 2).requires_grad_(), normal(4, 2, seed=1).requires_grad_()
    critic_loss(G, guess, torch.ones(4, dtype=torch.float64)).sum().backward()
    assert G.grad is None
    assert guess.grad is not None


# --- turns ------------------------------------------------------------------------------------------------

turns = st.builds(Turns, st.integers(0, 20), st.integers(1, 12))


def test_turns_are_those_of_rcm() -> None:
    who = Turns(warmup=3, freq=5)
    assert [i for i in range(15) if who.student(i)] == [0, 1, 2, 3, 8, 13]
    assert [i for i in range(15) if who.dmd(i)] == [3, 8, 13]


@bounded
@given(turns)
def test_each_network_counts_its_own_steps_without_a_gap(who: Turns) -> None:
    mine = [i for i in range(100) if who.student(i)]
    others = [i for i in range(100) if not who.student(i)]
    assert [who.student_step(i) for i in mine] == list(range(len(mine)))
    assert [who.critic_step(i) for i in others] == list(range(len(others)))


@bounded
@given(turns)
def test_an_idle_networks_step_stands_still(who: Turns) -> None:
    for i in range(1, 100):
        assert who.student_step(i) - who.student_step(i - 1) == who.student(i)
        assert who.critic_step(i) - who.critic_step(i - 1) == (not who.student(i))


def test_senseless_turns_are_refused() -> None:
    for warmup, freq in ((-1, 5), (0, 0)):
        with pytest.raises(ValueError, match="turns need"):
            Turns(warmup, freq)
