from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowkit.flow.path import interpolate
from flowkit.flow.solvers import Velocity
from flowkit.flow.wrappers import (
    WRAPPERS,
    Edm,
    Process,
    Wrapper,
    coefficients,
    rectified,
    t_of,
    table,
    theta_of,
    to_rf,
    to_trig,
    trigflow,
    velocity_of,
    wrap,
    x0_of,
)
from tests.flow.analytic import Mixture
from tests.flow.given import bounded, normal, seeds, unit

RCM = json.loads((Path(__file__).parents[1] / "golden" / "rcm.json").read_text(encoding="utf-8"))
angles = st.floats(0.0, math.pi / 2)
inner_angles = st.floats(0.02, 1.55)


def batch(theta: float, n: int = 4) -> Tensor:
    return torch.full((n,), theta, dtype=torch.float64)


def bent(x: Tensor, t: Tensor) -> Tensor:
    """Some network: smooth, not linear, and of both its inputs."""
    return torch.sin(x.roll(1, 1) + 2 * t[:, None]) + 0.3 * x * t[:, None]


# --- coordinates ------------------------------------------------------------------------------------------


@bounded
@given(unit)
def test_times_and_angles_are_inverse(t: float) -> None:
    assert float(t_of(theta_of(t))) == pytest.approx(t, abs=1e-15)
    # tan theta = t / (1 - t), written so that it holds at t = 1.
    theta = float(theta_of(t))
    assert math.sin(theta) * (1 - t) == pytest.approx(math.cos(theta) * t, abs=1e-15)


def test_the_ends_are_exact() -> None:
    assert float(t_of(0.0)) == 0
    assert float(t_of(math.pi / 2)) == 1
    assert float(theta_of(1.0)) == math.pi / 2


@bounded
@given(unit, seeds)
def test_states_go_there_and_back(t: float, seed: int) -> None:
    x0, eps = normal(4, 2, seed=seed), normal(4, 2, seed=seed + 1)
    x = interpolate(x0, eps, t)
    y, theta = to_trig(x, t)
    torch.testing.assert_close(y, theta.cos() * x0 + theta.sin() * eps, rtol=0, atol=1e-14)
    back, again = to_rf(y, theta)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-14)
    assert float(again) == pytest.approx(t, abs=1e-15)


@bounded
@given(angles, seeds)
def test_F_says_the_same_as_x0_and_as_the_velocity(theta: float, seed: int) -> None:
    x0, eps = normal(4, 2, seed=seed), normal(4, 2, seed=seed + 1)
    c, s = math.cos(theta), math.sin(theta)
    x, F = c * x0 + s * eps, c * eps - s * x0
    torch.testing.assert_close(x0_of(x, theta, F), x0, rtol=0, atol=1e-14)
    torch.testing.assert_close(velocity_of(x, theta, F), eps - x0, rtol=0, atol=1e-14)


# --- rectified flow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RCM["trigflow_wrapper"], ids=lambda case: f"{case['t']:.4f}")
def test_the_coefficients_are_the_references(case: dict[str, float]) -> None:
    k = coefficients("rectified-flow", case["t"])
    # Three float64 operations on numbers of at most 1; the reference counts time in thousandths.
    assert float(k.c_in) == pytest.approx(case["c_in"], abs=1e-15)
    assert float(k.c_skip) == pytest.approx(case["c_skip"], abs=1e-15)
    assert float(k.c_out) == pytest.approx(case["c_out"], abs=1e-15)
    assert 1000 * float(k.c_noise) == pytest.approx(case["c_noise"], abs=1e-12)


@bounded
@given(angles, seeds)
def test_wrapping_and_unwrapping_is_the_identity(theta: float, seed: int) -> None:
    x = normal(4, 2, seed=seed)
    t = batch(float(t_of(theta)))
    torch.testing.assert_close(rectified(trigflow(bent))(x, t), bent(x, t), rtol=0, atol=1e-14)
    torch.testing.assert_close(
        trigflow(rectified(bent))(x, batch(theta)), bent(x, batch(theta)), rtol=0, atol=1e-14
    )


@bounded
@given(angles, seeds)
def test_x0_is_that_of_the_wrapped_network(theta: float, seed: int) -> None:
    x, k = normal(4, 2, seed=seed), coefficients("rectified-flow", theta)
    direct = k.c_skip * x + k.c_out * bent(k.c_in * x, k.c_noise.expand(4))
    torch.testing.assert_close(x0_of(x, theta, trigflow(bent)(x, batch(theta))), direct, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "time"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_a_network_gets_x_in_its_dtype_and_time_in_float32_at_least(
    dtype: torch.dtype, time: torch.dtype
) -> None:
    seen: list[torch.dtype] = []

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        seen.extend((x.dtype, t.dtype))
        return x

    assert trigflow(velocity)(normal(4, 2).to(dtype), batch(1.0)).dtype == dtype
    assert seen == [dtype, time]


@bounded
@given(inner_angles, seeds)
def test_a_wrapped_network_is_differentiated_forwards(theta: float, seed: int) -> None:
    x, dx = normal(4, 2, seed=seed), normal(4, 2, seed=seed + 1)
    F, at, dat = trigflow(bent), batch(theta), batch(0.7)
    _, exact = torch.func.jvp(F, (x, at), (dx, dat))
    h = 1e-5
    central = (F(x + h * dx, at + h * dat) - F(x - h * dx, at - h * dat)) / (2 * h)
    # h^2 times a third derivative of order 10, and 1e-16 / h of rounding.
    torch.testing.assert_close(exact, central, rtol=0, atol=1e-8)


# --- teachers of any parameterisation ---------------------------------------------------------------------


def teacher(wrapper: Wrapper, mix: Mixture) -> Velocity:
    """The perfect network of a process and a prediction, from the posterior mean of the mixture."""

    def network(x: Tensor, raw: Tensor) -> Tensor:
        a, s = wrapper.process.alpha(raw)[:, None], wrapper.process.sigma(raw)[:, None]
        t = (s / (a + s))[:, 0]
        x0 = mix.x0(x / (a + s), t)
        eps = (x - a * x0) / s
        return {"flow": eps - x0, "v": a * eps - s * x0, "eps": eps, "x0": x0}[wrapper.prediction]

    return network


@pytest.mark.parametrize("name", [name for name, wrapper in WRAPPERS.items() if isinstance(wrapper, Wrapper)])
@bounded
@given(theta=st.floats(0.05, 1.5), seed=seeds)
def test_every_teacher_wrapped_is_the_analytic_F_of_a_mixture(name: str, theta: float, seed: int) -> None:
    mix, x = Mixture.two_unlike(), normal(4, 2, seed=seed)
    wrapper = WRAPPERS[name]
    assert isinstance(wrapper, Wrapper)
    truth = trigflow(mix.velocity)(x, batch(theta))
    # Dividing by c >= .07 or s >= .05 once, after the network divided by s once: 1e-15 / .05^2.
    torch.testing.assert_close(
        wrap(wrapper, teacher(wrapper, mix))(x, batch(theta)), truth, rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
@bounded
@given(theta=st.floats(0.05, 1.5), seed=seeds)
def test_edms_raw_network_is_wrapped_through_its_preconditioners(
    sigma_data: float, theta: float, seed: int
) -> None:
    mix, x = Mixture.two_unlike(), normal(4, 2, seed=seed)

    def network(y: Tensor, c_noise: Tensor) -> Tensor:
        """What EDM's raw network must say for its denoiser to be the posterior mean (their table 1)."""
        sigma = (4 * c_noise).exp()[:, None]
        both = (sigma**2 + sigma_data**2).sqrt()
        raw = y * both
        x0 = mix.x0(raw / (1 + sigma), (sigma / (1 + sigma))[:, 0])
        return (x0 - sigma_data**2 / both**2 * raw) / (sigma * sigma_data / both)

    truth = trigflow(mix.velocity)(x, batch(theta))
    torch.testing.assert_close(wrap(Edm(sigma_data), network)(x, batch(theta)), truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", list(WRAPPERS))
@bounded
@given(theta=inner_angles)
def test_the_coefficients_of_x0_and_of_F_agree(name: str, theta: float) -> None:
    k, c, s = coefficients(name, theta), math.cos(theta), math.sin(theta)
    assert float(k.c_skip) == pytest.approx(c - s * float(k.f_skip), abs=1e-13)
    assert float(k.c_out) == pytest.approx(-s * float(k.f_out), abs=1e-13)


def test_a_process_is_asked_at_the_time_of_the_same_ratio() -> None:
    for name, wrapper in WRAPPERS.items():
        if not isinstance(wrapper, Wrapper):
            continue
        theta = torch.linspace(0.05, 1.5, 40, dtype=torch.float64)
        raw = wrapper.process.raw_of(theta)
        ratio = wrapper.process.sigma(raw) / wrapper.process.alpha(raw)
        torch.testing.assert_close(ratio, theta.tan(), rtol=1e-12, atol=0, msg=name)


def test_a_table_has_its_entries_at_whole_numbers_and_ends_at_its_ends() -> None:
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    process, kept = table(betas), (1 - betas).cumprod(0)
    i = torch.tensor([0.0, 1.0, 500.0, 999.0], dtype=torch.float64)
    torch.testing.assert_close(process.alpha(i), kept[i.long()].sqrt(), rtol=1e-12, atol=0)
    torch.testing.assert_close(process.sigma(i), (1 - kept[i.long()]).sqrt(), rtol=1e-12, atol=0)
    ends = process.raw_of(torch.tensor([0.0, math.pi / 2], dtype=torch.float64))
    assert ends.tolist() == [0.0, 999.0]


def test_a_table_is_differentiated_forwards() -> None:
    x, theta = normal(4, 2), torch.tensor([0.1, 0.7, 1.2, 1.5], dtype=torch.float64)
    F = wrap(WRAPPERS["ddpm-eps"], lambda y, raw: torch.sin(y + raw[:, None] / 1000))
    _, exact = torch.func.jvp(F, (x, theta), (torch.zeros_like(x), torch.ones_like(theta)))
    h = 1e-7  # shorter than the distance to the next entry, where the slope jumps
    central = (F(x, theta + h) - F(x, theta - h)) / (2 * h)
    torch.testing.assert_close(exact, central, rtol=1e-5, atol=1e-6)


def test_a_process_of_ones_own_can_be_wrapped() -> None:
    """sigma-time with data halved: alpha = 1/2, sigma = t."""
    own = Wrapper(Process(lambda t: torch.full_like(t, 0.5), lambda t: t, lambda theta: theta.tan() / 2), "v")
    mix, x = Mixture.two_unlike(), normal(4, 2)
    truth = trigflow(mix.velocity)(x, batch(0.9))
    torch.testing.assert_close(wrap(own, teacher(own, mix))(x, batch(0.9)), truth, rtol=0, atol=1e-12)


def test_an_unknown_parameterisation_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of rectified-flow"):
        coefficients("ddim", 1.0)
