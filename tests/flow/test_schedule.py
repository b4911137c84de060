from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowkit.flow.schedule import (
    SCHEDULES,
    dynamic,
    exponential,
    logit_exponential,
    logit_linear,
    mu_of,
    power,
    rcm_teacher,
    sd3_rl,
    shift,
    static,
    stretch,
    student,
    unshift,
    unshifted,
)
from tests.flow.given import bounded, counts, golden, inner, shifts

qwen_mu = partial(mu_of, tokens_hi=8192, mu_hi=0.9)
# One of each, with the arguments that it needs.
ALL: dict[str, Callable[..., Tensor]] = {
    "static": lambda n, **kw: static(n, 3.0, **kw),
    "dynamic": lambda n, **kw: dynamic(n, 0.63, **kw),
    "dynamic, stretched": lambda n, **kw: dynamic(n, 0.5387, terminal=0.02, **kw),
    "unshifted": unshifted,
    "power": lambda n, **kw: power(n, 0.002, **kw),
    "exponential": lambda n, **kw: exponential(n, 0.002, **kw),
    "logit-exponential": lambda n, **kw: logit_exponential(n, 0.5, 1.3, **kw),
    "logit-linear": lambda n, **kw: logit_linear(n, 2.0, 0.8, **kw),
    "sd3-rl": sd3_rl,
    "rcm-teacher": rcm_teacher,
    "student": lambda n, **kw: student(n, thetas=torch.linspace(1.5, 0.1, 60).tolist(), **kw),
}


def tokens(width: int, height: int) -> int:
    return (width // 16) * (height // 16)


REFERENCE: dict[str, Callable[[], Tensor]] = {
    "sd3_peer_rl_10": lambda: sd3_rl(10),
    "static_shift3_linspace_4": lambda: static(4, 3.0),
    "static_shift3_linspace_10": lambda: static(10, 3.0),
    "static_shift3_linspace_28": lambda: static(28, 3.0),
    "static_shift3_linspace_40": lambda: static(40, 3.0),
    "flux_4_512x512": lambda: dynamic(4, mu_of(tokens(512, 512))),
    "flux_6_512x512": lambda: dynamic(6, mu_of(tokens(512, 512))),
    "flux_28_512x512": lambda: dynamic(28, mu_of(tokens(512, 512))),
    "flux_28_1024x1024": lambda: dynamic(28, mu_of(tokens(1024, 1024))),
    "flux_28_768x1344": lambda: dynamic(28, mu_of(tokens(768, 1344))),
    "qwen_image_4_512x512": lambda: dynamic(4, qwen_mu(tokens(512, 512)), terminal=0.02),
    "qwen_image_10_512x512": lambda: dynamic(10, qwen_mu(tokens(512, 512)), terminal=0.02),
    "qwen_image_50_1024x1024": lambda: dynamic(50, qwen_mu(tokens(1024, 1024)), terminal=0.02),
}


def test_every_golden_schedule_is_compared() -> None:
    assert set(REFERENCE) == set(golden()["schedules"])
    assert {name.split(",")[0] for name in ALL} == set(SCHEDULES)


@pytest.mark.parametrize("name", REFERENCE)
def test_the_grid_is_the_references(name: str) -> None:
    expected = torch.tensor(golden()["schedules"][name]["sigmas"], dtype=torch.float64)
    torch.testing.assert_close(REFERENCE[name](), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [n for n, v in golden()["schedules"].items() if "mu" in v])
def test_mu_is_the_references(name: str) -> None:
    width, height = map(int, name.rsplit("_", 1)[1].split("x"))
    mu = (qwen_mu if name.startswith("qwen") else mu_of)(tokens(width, height))
    assert mu == pytest.approx(golden()["schedules"][name]["mu"], abs=1e-12)


def test_the_double_shift_is_kept_apart_from_the_single_one() -> None:
    torch.testing.assert_close(static(4, 3.0)[3].item(), 0.5)
    # numerics of diffusers: set_timesteps(4) at shift 3.
    expected = torch.tensor([1, 0.8577, 0.6022, 0.0089, 0], dtype=torch.float64)
    torch.testing.assert_close(sd3_rl(4), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_every_grid_falls_strictly_from_at_most_one_to_zero(name: str, n: int) -> None:
    grid = ALL[name](n)
    assert grid.shape == (n + 1,)
    assert grid.dtype == torch.float64
    assert bool(grid.isfinite().all())
    assert grid[0] <= 1
    assert grid[-1] == 0
    assert bool((grid.diff() < 0).all())
    if name not in ("rcm-teacher", "student"):
        # A law compares with 1 exactly.
        assert grid[0] == 1


@pytest.mark.parametrize("name", ALL)
def test_a_float32_grid_is_the_float64_grid_rounded_once(name: str) -> None:
    assert torch.equal(ALL[name](9, dtype=torch.float32), ALL[name](9).float())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [0, -1])
def test_a_grid_without_a_step_is_refused(name: str, n: int) -> None:
    with pytest.raises(ValueError, match="at least one step"):
        ALL[name](n)


@bounded
@given(inner, shifts, shifts)
def test_shifts_compose_by_product_and_undo(t: float, k: float, m: float) -> None:
    assert unshift(shift(t, k), k) == pytest.approx(t, rel=1e-12)
    assert shift(shift(t, k), m) == pytest.approx(shift(t, k * m), rel=1e-12)
    assert shift(t, 1.0) == pytest.approx(t, rel=1e-12)


@bounded
@given(counts, shifts, st.floats(0.3, 3.0))
def test_every_shift_leaves_one_at_exactly_one(n: int, k: float, b: float) -> None:
    grids = [static(n, k), dynamic(n, k, terminal=0.02), logit_exponential(n, k, b), logit_linear(n, k, b)]
    assert [grid[0].item() for grid in [*grids, sd3_rl(n, k)]] == [1.0] * 5
    assert unshift(1.0, k) == 1


@bounded
@given(counts, st.floats(-1.0, 2.0), st.floats(0.3, 3.0))
def test_the_logit_shifts_are_lines_in_logit(n: int, a: float, b: float) -> None:
    t = unshifted(n + 1)[1:-1]
    torch.testing.assert_close(logit_exponential(n + 1, a, b)[1:-1].logit(), a + b * t.logit())
    torch.testing.assert_close(logit_linear(n + 1, math.exp(a), b)[1:-1].logit(), a + b * t.logit())


@bounded
@given(counts, shifts)
def test_static_and_dynamic_are_the_two_logit_shifts_at_power_one(n: int, k: float) -> None:
    torch.testing.assert_close(static(n, k), logit_linear(n, k))
    torch.testing.assert_close(dynamic(n, math.log(k)), static(n, k))
    torch.testing.assert_close(static(n, 1.0), unshifted(n))


@bounded
@given(st.integers(2, 60), st.floats(0.001, 0.2), st.floats(1.0, 9.0))
def test_the_power_grid_is_even_in_its_root(n: int, smin: float, rho: float) -> None:
    grid = power(n, smin, 0.9, rho)
    root = grid[:-1] ** (1 / rho)
    torch.testing.assert_close(
        root, torch.linspace(0.9 ** (1 / rho), smin ** (1 / rho), n, dtype=torch.float64)
    )


@bounded
@given(st.integers(2, 60), st.floats(0.001, 0.2))
def test_the_exponential_grid_has_one_ratio(n: int, smin: float) -> None:
    inside = exponential(n, smin, 0.9)[:-1]
    torch.testing.assert_close(inside[[0, -1]], torch.tensor([0.9, smin], dtype=torch.float64))
    ratio = inside[1:] / inside[:-1]
    torch.testing.assert_close(ratio, ratio[:1].expand(n - 1))


@bounded
@given(st.integers(2, 60), st.floats(0.001, 0.5), shifts)
def test_a_stretched_grid_ends_at_the_terminal_and_keeps_proportions(
    n: int, terminal: float, k: float
) -> None:
    before, after = static(n, k), stretch(static(n, k), terminal)
    assert after[-2].item() == pytest.approx(terminal, rel=1e-9)
    assert after[0] == 1
    assert after[-1] == 0
    share = (1 - before[:-1]) / (1 - before[-2])
    torch.testing.assert_close((1 - after[:-1]) / (1 - after[-2]), share)


def test_stretching_a_single_step_leaves_it() -> None:
    assert dynamic(1, 0.54, terminal=0.02).tolist() == [1.0, 0.0]


@bounded
@given(counts, shifts)
def test_the_teachers_grid_is_even_before_its_shift(n: int, k: float) -> None:
    grid = rcm_teacher(n, k, sigma_max=80.0)
    assert grid[0].item() == pytest.approx(80 / 81, rel=1e-12)
    even = unshift(grid, k)
    assert isinstance(even, Tensor)
    torch.testing.assert_close(even.diff(), even.diff()[:1].expand(n))
