from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal

from flowkit.flow.laws import LAWS, log_prob, rate
from flowkit.flow.path import eps_of, interpolate
from flowkit.flow.schedule import unshifted
from tests.flow.analytic import Mixture
from tests.flow.given import bounded, golden, normal, seeds, steps, unit

STEPS = golden()["sde_steps"]
NOISY = ["flow-sde", "dance", "cps"]
levels = st.floats(0.05, 1.0)


def test_the_five_laws_are_there() -> None:
    assert set(LAWS) == {"ode", "flow-sde", "dance", "cps", "consistency"}


# --- what the reference code gave -------------------------------------------------------------------------


@pytest.mark.parametrize("case", STEPS, ids=lambda c: f"{c['schedule']}-{c['sde_type']}-{c['step']}")
def test_a_step_is_the_references(case: dict[str, Any]) -> None:
    law = {"sde": "flow-sde", "cps": "cps"}[case["sde_type"]]
    x, v, y, expected = (torch.tensor(case[k]) for k in ("x", "v", "x_next", "mean"))
    t, s = case["sigma"], case["sigma_next"]
    mean, std = LAWS[law](x, v, t, s, case["noise_level"], t_at_one=case["sigma_1"])
    logp = log_prob(y, mean, std, "unit" if law == "cps" else "mean")
    # The reference is float32 with coefficients in float32 too: about ten roundings of 6e-8.
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logp, torch.tensor(case["log_prob"]), rtol=0, atol=1e-5)
    g = torch.tensor(case["peer_std_dev_t"])
    torch.testing.assert_close(rate(law, std, t, s).expand(len(g)), g, rtol=1e-5, atol=0)


# --- level 0, level 1 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("law", NOISY)
@bounded
@given(step=steps(), seed=seeds)
def test_level_zero_is_eulers_step_bit_for_bit(
    law: str, dtype: torch.dtype, step: tuple[float, float], seed: int
) -> None:
    x, v = normal(3, 4, seed=seed, dtype=dtype), normal(3, 4, seed=seed + 1, dtype=dtype)
    for t, s in [step, (1.0, step[0]), (step[0], 0.0)]:
        mean, std = LAWS[law](x, v, t, s, 0.0)
        euler, none = LAWS["ode"](x, v, t, s, 0.0)
        assert torch.equal(mean, euler)
        assert torch.equal(std, none)
        assert not std.any()


@bounded
@given(steps(), seeds)
def test_the_ode_step_is_a_straight_line(step: tuple[float, float], seed: int) -> None:
    t, s = step
    x0, eps = normal(3, 4, seed=seed), normal(3, 4, seed=seed + 1)
    mean, _ = LAWS["ode"](interpolate(x0, eps, t), eps - x0, t, s, 0.7)
    torch.testing.assert_close(mean, interpolate(x0, eps, s), rtol=0, atol=1e-14)


@bounded
@given(steps(), seeds)
def test_cps_at_level_one_is_the_consistency_law(step: tuple[float, float], seed: int) -> None:
    x, v = normal(3, 4, seed=seed), normal(3, 4, seed=seed + 1)
    full, again = LAWS["cps"](x, v, *step, 1.0), LAWS["consistency"](x, v, *step, 1.0)
    torch.testing.assert_close(full[0], again[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(full[1], again[1], rtol=0, atol=1e-15)


# --- what each law does with the two ends of the path -----------------------------------------------------


def shares(law: str, t: float, s: float, level: float) -> tuple[float, float, float]:
    """How much of the predicted x0 and eps the mean holds, and the std."""
    one = torch.ones(1, dtype=torch.float64)
    of_eps, std = LAWS[law](t * one, one, t, s, level)  # x0 = 0, eps = 1
    of_x0, _ = LAWS[law]((1 - t) * one, -one, t, s, level)  # x0 = 1, eps = 0
    return float(of_x0), float(of_eps), float(std)


@bounded
@given(steps(), unit)
def test_cps_keeps_the_noise_level(step: tuple[float, float], level: float) -> None:
    of_x0, of_eps, std = shares("cps", *step, level)
    assert of_x0 == pytest.approx(1 - step[1], abs=1e-14)
    assert of_eps**2 + std**2 == pytest.approx(step[1] ** 2, abs=1e-14)
    assert of_eps == pytest.approx(step[1] * math.cos(level * math.pi / 2), abs=1e-14)


@bounded
@given(steps())
def test_the_consistency_law_noises_the_predicted_data_again(step: tuple[float, float]) -> None:
    of_x0, of_eps, std = shares("consistency", *step, 0.3)
    assert (of_x0, of_eps, std) == pytest.approx((1 - step[1], 0.0, step[1]), abs=1e-14)


@pytest.mark.parametrize("law", ["flow-sde", "dance"])
@bounded
@given(step=steps(), level=levels, seed=seeds)
def test_an_sde_step_adds_half_g_squared_of_the_score_to_the_drift(
    law: str, step: tuple[float, float], level: float, seed: int
) -> None:
    t, s = step
    x, v = normal(3, 4, seed=seed), normal(3, 4, seed=seed + 1)
    g = level if law == "dance" else level * math.sqrt(t / (1 - t))
    mean, std = LAWS[law](x, v, t, s, level)
    # The score of x_t is -eps/t.
    drift = v + g**2 / 2 * eps_of(x, v, t) / t
    torch.testing.assert_close(mean, x + drift * (s - t), rtol=1e-12, atol=1e-12)
    assert float(std) == pytest.approx(g * math.sqrt(t - s), rel=1e-12)
    assert float(rate(law, std, t, s)) == pytest.approx(g, rel=1e-12)


def test_the_rate_of_a_law_without_root_time_is_its_std() -> None:
    std = torch.tensor([[0.2], [0.3]])
    assert torch.equal(rate("cps", std, 0.5, 0.4), std)
    assert torch.equal(rate("consistency", std, 0.5, 0.4), std)


# --- moments on Gaussian data -----------------------------------------------------------------------------


def variance_ratio(
    law: str, n: int, level: float, *, t_at_one: float | None = None, mean: float = 0.0
) -> float:
    """The variance that n equal steps from noise leave, over that of the data; exact, since all is affine."""
    data, grid = Mixture.gaussian([mean], 0.25), unshifted(n)
    m, var = torch.zeros(1, 1, dtype=torch.float64), 1.0
    for t, s in pairwise(grid):
        there, std = LAWS[law](m, data.velocity(m, t), t, s, level, t_at_one=t_at_one)
        beside, _ = LAWS[law](m + 1, data.velocity(m + 1, t), t, s, level, t_at_one=t_at_one)
        m, var = there, float(beside - there) ** 2 * var + float(std) ** 2
    assert float(m) == pytest.approx(mean, abs=2 / n)
    return var / 0.25


@pytest.mark.parametrize(
    ("law", "n", "t_at_one", "ratio"),
    [
        ("flow-sde", 10, None, 0.85),
        ("flow-sde", 10, 0.9, 0.85),
        ("flow-sde", 10, 0.99, 1.43),
        ("flow-sde", 400, None, 1.00),
        ("cps", 400, None, 0.84),
        ("dance", 400, None, 1.00),
    ],
)
def test_the_variance_after_n_steps_is_known(law: str, n: int, t_at_one: float | None, ratio: float) -> None:
    # The numbers are given to two digits; the data's variance, .25 here, moves them by up to .007.
    assert variance_ratio(law, n, 0.5, t_at_one=t_at_one, mean=0.8) == pytest.approx(ratio, abs=0.01)


def test_dance_keeps_the_marginal_at_first_order() -> None:
    coarse, fine = (abs(variance_ratio("dance", n, 0.7) - 1) for n in (200, 800))
    # A quarter, with a correction of order 1/200.
    assert fine == pytest.approx(coarse / 4, rel=0.02)


def test_flow_sde_keeps_the_marginal_more_slowly() -> None:
    # In the step from t = 1, g^2 dt is level^2 however short it is, so the order is below one.
    coarse, fine = (abs(variance_ratio("flow-sde", n, 0.7) - 1) for n in (400, 1600))
    assert fine < 0.8 * coarse < 0.004


# --- t at one ---------------------------------------------------------------------------------------------


def test_at_one_the_next_time_stands_in_and_nowhere_else() -> None:
    x, v = normal(2, 3), normal(2, 3, seed=1)
    sde = LAWS["flow-sde"]
    for here, there in zip(sde(x, v, 1.0, 0.9, 0.5), sde(x, v, 1.0, 0.9, 0.5, t_at_one=0.9), strict=True):
        assert torch.equal(here, there)
    for here, there in zip(sde(x, v, 0.999, 0.9, 0.5), sde(x, v, 0.999, 0.9, 0.5, t_at_one=0.5), strict=True):
        assert torch.equal(here, there)
    _, std = sde(x, v, 1.0, 0.9, 0.5, t_at_one=0.99)
    assert float(std) == pytest.approx(0.5 * math.sqrt(1 / 0.01) * math.sqrt(0.1), rel=1e-12)


# --- shapes and types -------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_time_per_sample_gives_each_sample_its_own_step(law: str, dtype: torch.dtype) -> None:
    x, v = normal(3, 2, 2, dtype=dtype), normal(3, 2, 2, seed=1, dtype=dtype)
    t = torch.tensor([1.0, 0.7, 0.4], dtype=torch.float64)
    s = torch.tensor([0.8, 0.3, 0.35], dtype=torch.float64)
    mean, std = LAWS[law](x, v, t, s, 0.6)
    assert mean.dtype == std.dtype == dtype
    assert std.shape == (3, 1, 1)
    for i in range(3):
        mean_i, std_i = LAWS[law](x[i : i + 1], v[i : i + 1], float(t[i]), float(s[i]), 0.6)
        assert std_i.shape == ()
        assert torch.equal(mean[i : i + 1], mean_i)
        assert torch.equal(std[i, 0, 0], std_i)
    g = rate(law, std, t, s)
    assert g.shape == std.shape
    assert torch.equal(g[1, 0, 0], rate(law, std[1, 0, 0], float(t[1]), float(s[1])))


@pytest.mark.parametrize("law", NOISY)
def test_a_negative_level_is_refused(law: str) -> None:
    x = torch.ones(1, 1)
    with pytest.raises(ValueError, match="level"):
        LAWS[law](x, x, 0.5, 0.4, -0.1)


def test_a_cps_level_above_one_is_refused() -> None:
    x = torch.ones(1, 1)
    with pytest.raises(ValueError, match="level"):
        LAWS["cps"](x, x, 0.5, 0.4, 1.1)
    assert math.isfinite(float(LAWS["flow-sde"](x, x, 0.5, 0.4, 1.1)[1]))


# --- log-probability --------------------------------------------------------------------------------------


def gaussian(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    y, mean = normal(3, 2, 2, seed=seed), normal(3, 2, 2, seed=seed + 1)
    return y, mean, normal(3, 1, 1, seed=seed + 2).exp()


@bounded
@given(seeds)
def test_the_log_probability_is_that_of_torch(seed: int) -> None:
    y, mean, std = gaussian(seed)
    truth: Tensor = Normal(mean, std.expand_as(mean)).log_prob(y).flatten(1)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(log_prob(y, mean, std, "sum"), truth.sum(1))
    torch.testing.assert_close(log_prob(y, mean, std, "mean"), truth.mean(1))
    torch.testing.assert_close(log_prob(y, mean, std), truth.mean(1))


@bounded
@given(seeds)
def test_the_unit_log_probability_is_that_of_variance_one_half_without_constants(seed: int) -> None:
    y, mean, std = gaussian(seed)
    half = torch.full_like(std, math.sqrt(0.5))
    truth = log_prob(y, mean, half) + 0.5 * math.log(math.pi)
    torch.testing.assert_close(log_prob(y, mean, std, "unit"), truth)


@bounded
@given(seeds)
def test_the_gradient_of_the_log_probability_is_the_pull_to_the_sample(seed: int) -> None:
    y, mean, std = gaussian(seed)
    mean.requires_grad_()
    (slope,) = torch.autograd.grad(log_prob(y, mean, std, "sum").sum(), mean)
    torch.testing.assert_close(slope, ((y - mean) / std**2).detach())


@pytest.mark.parametrize("reduction", ["mean", "sum", "unit"])
@pytest.mark.parametrize("std", [[0.0, 0.0], [0.5, 0.0], [0.5, math.nan], [0.5, -0.5]])
def test_a_step_without_noise_has_no_log_probability(std: list[float], reduction: Any) -> None:
    y = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="no log-probability"):
        log_prob(y, y, torch.tensor(std)[:, None], reduction)


def test_the_last_cps_step_has_no_log_probability() -> None:
    y = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="no log-probability"):
        log_prob(y, *LAWS["cps"](y, y, 0.1, 0.0, 0.8))


def test_an_unknown_reduction_is_refused() -> None:
    y = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="mean, sum or unit"):
        log_prob(y, y, torch.ones(()), "median")  # type: ignore[arg-type]
