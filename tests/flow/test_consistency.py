from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowkit.flow.consistency import (
    DERIVATIVES,
    NORM_OFFSET,
    Scope,
    check_h,
    dcm_loss,
    dcm_next,
    dcm_tangent,
    dcm_target,
    ddim,
    scm_loss,
    smallest_h,
    tangent,
)
from flowkit.flow.schedule import static
from flowkit.flow.wrappers import Trig, t_of, theta_of, to_rf, to_trig, trigflow, x0_of
from tests.flow.analytic import Mixture
from tests.flow.given import bounded, normal, seeds

jvp = torch.func.jvp
inner_angles = st.floats(0.05, 1.5)
scopes = pytest.mark.parametrize("scope", get_args(Scope))
GAUSSIAN = Mixture.gaussian([0.5, -1.0], 0.25)
MIXTURE = Mixture.two_unlike()


def spread(n: int = 6) -> Tensor:
    return torch.linspace(0.1, 1.45, n, dtype=torch.float64)


def student(x: Tensor, theta: Tensor) -> Tensor:
    """Some network: smooth, not linear, and of both its inputs."""
    return torch.sin(1.5 * x.roll(1, 1) + 2 * theta[:, None]) + 0.3 * x * theta[:, None]


def exact_student(x: Tensor, theta: Tensor) -> Tensor:
    """The F of a Gaussian's true consistency function, f = (c x - s F) = where the ODE ends."""
    y, t = to_rf(x, theta)
    end = GAUSSIAN.flow_map(y, t, 0.0)
    return (theta.cos()[:, None] * x - end) / theta.sin()[:, None]


def raw(out: Any) -> Tensor:
    """The tangent before it was normalised."""
    return out.g * (out.norm + NORM_OFFSET).reshape(-1, *[1] * (out.g.ndim - 1))


def at(F: Trig, teacher: Trig, theta: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """What `tangent` wants, at random points."""
    x = normal(len(theta), 2, seed=seed)
    F_T = teacher(x, theta)
    value, J = DERIVATIVES[0](F, x, theta, F_T, 0.0, jvp)
    return {"F_minus": value, "F_T": F_T, "x": x, "theta": theta, "J": J}


# --- the tangent ------------------------------------------------------------------------------------------


@scopes
@bounded
@given(seed=seeds)
def test_the_true_consistency_function_of_a_gaussian_has_zero_tangent(scope: Scope, seed: int) -> None:
    out = tangent(**at(exact_student, trigflow(GAUSSIAN.velocity), spread(), seed), r=1.0, scope=scope)
    # Terms of order 10 at most that cancel, F divided by s >= .1.
    assert float(out.norm.max()) < 1e-12


@scopes
def test_a_student_that_is_not_consistent_has_a_tangent(scope: Scope) -> None:
    out = tangent(**at(student, trigflow(GAUSSIAN.velocity), spread()), r=1.0, scope=scope)
    assert float(out.norm.min()) > 0.01


@scopes
@bounded
@given(seed=seeds)
def test_the_warm_tangent_is_cos_theta_times_the_slope_of_the_students_x0(scope: Scope, seed: int) -> None:
    teacher, theta = trigflow(MIXTURE.velocity), spread()
    k = at(student, teacher, theta, seed)

    def f(x: Tensor, theta: Tensor) -> Tensor:
        return x0_of(x, theta, student(x, theta))

    _, slope = jvp(f, (k["x"], theta), (k["F_T"], torch.ones_like(theta)))
    g = raw(tangent(**k, r=1.0, scope=scope))
    torch.testing.assert_close(g, theta.cos()[:, None] * slope, rtol=0, atol=1e-12)


@pytest.mark.parametrize("r", [0.0, 0.3, 0.7, 1.0])
def test_the_warm_up_scales_what_its_scope_says(r: float) -> None:
    k = {name: normal(3, 2, seed=i) for i, name in enumerate(("F_minus", "F_T", "x", "J"))}
    theta = torch.tensor([0.2, 0.9, 1.4], dtype=torch.float64)
    c, s = theta.cos()[:, None], theta.sin()[:, None]
    apart = k["F_minus"] - k["F_T"]
    data = -c * (1 - (r * s) ** 2).sqrt() * apart - r * c * s * k["x"] - k["J"]
    everything = -c * c * apart - r * c * s * k["x"] - r * k["J"]
    torch.testing.assert_close(raw(tangent(**k, theta=theta, r=r)), data, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        raw(tangent(**k, theta=theta, r=r, scope="all")), everything, rtol=0, atol=1e-13
    )


def test_the_tangent_is_normalised_per_sample_over_all_its_dims() -> None:
    k = {name: 10 * normal(3, 2, 4, 5, seed=i) for i, name in enumerate(("F_minus", "F_T", "x", "J"))}
    k = {name: v * torch.tensor([1e-4, 1.0, 1e3])[:, None, None, None] for name, v in k.items()}
    theta = torch.tensor([0.2, 0.9, 1.4], dtype=torch.float64)
    out = tangent(**k, theta=theta, r=0.5)
    one = [
        tangent(**{n: v[i : i + 1] for n, v in k.items()}, theta=theta[i : i + 1], r=0.5) for i in range(3)
    ]
    torch.testing.assert_close(out.g, torch.cat([o.g for o in one]), rtol=1e-12, atol=0)
    torch.testing.assert_close(out.g.flatten(1).norm(dim=1), out.norm / (out.norm + 0.1), rtol=1e-12, atol=0)
    assert out.norm[0] < 0.1 < 100 < out.norm[2]


def test_a_bad_sample_leaves_the_others_alone() -> None:
    k = at(student, trigflow(MIXTURE.velocity), spread(3))
    good = tangent(**k, r=1.0)
    k["J"][1, 0] = math.nan
    out = tangent(**k, r=1.0)
    assert out.norm.isnan().tolist() == [False, True, False]
    assert torch.equal(out.g[[0, 2]], good.g[[0, 2]])


def test_the_tangent_has_the_dtype_of_F_and_no_gradient() -> None:
    k = {name: v.float() for name, v in at(student, trigflow(MIXTURE.velocity), spread()).items()}
    k["F_minus"].requires_grad_()
    out = tangent(**k, r=1.0)
    assert (out.g.dtype, out.norm.dtype) == (torch.float32, torch.float64)
    assert not out.g.requires_grad


@pytest.mark.parametrize("r", [-0.1, 1.1, math.nan])
def test_a_warm_up_outside_zero_to_one_is_refused(r: float) -> None:
    k = at(student, trigflow(MIXTURE.velocity), spread())
    with pytest.raises(ValueError, match="warm-up"):
        tangent(**k, r=r)
    with pytest.raises(ValueError, match="data or all"):
        tangent(**k, r=1.0, scope="none")  # type: ignore[arg-type]


# --- the loss ---------------------------------------------------------------------------------------------


def test_the_loss_is_the_norm_of_g_and_its_gradient_minus_two_g() -> None:
    F, g = normal(3, 2, 4).requires_grad_(), normal(3, 2, 4, seed=1)
    loss = scm_loss(F, F, g)
    torch.testing.assert_close(loss.detach(), (g**2).sum((1, 2)), rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(loss.sum(), F)
    torch.testing.assert_close(slope, -2 * g, rtol=1e-12, atol=1e-15)


# --- J ----------------------------------------------------------------------------------------------------


@bounded
@given(seeds)
def test_exact_J_is_the_central_difference(seed: int) -> None:
    theta, teacher = spread(), trigflow(MIXTURE.velocity)
    k = at(student, teacher, theta, seed)
    h = 1e-5
    ahead = student(k["x"] + h * k["F_T"], theta + h)
    behind = student(k["x"] - h * k["F_T"], theta - h)
    cs = (theta.cos() * theta.sin())[:, None]
    # h^2 times a third derivative of order 100, and 1e-16/h of rounding.
    torch.testing.assert_close(k["J"], cs * (ahead - behind) / (2 * h), rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", [1, 2])
def test_a_difference_goes_to_the_exact_J_at_first_order(kind: int) -> None:
    theta, teacher = spread(), trigflow(MIXTURE.velocity)
    k = at(student, teacher, theta)
    errors = []
    for h in (4e-3, 2e-3, 1e-3, 5e-4):
        value, J = DERIVATIVES[kind](student, k["x"], theta, k["F_T"], h, jvp)
        assert torch.equal(value, k["F_minus"])
        errors.append(float((J - k["J"]).norm()))
    orders = [math.log2(a / b) for a, b in pairwise(errors)]
    # The next term is h^2: at h = 4e-3 it moves the order by a few hundredths.
    assert orders == pytest.approx([1.0] * 3, abs=0.05)
    assert errors[-1] > 1e-6


def point_F(x0: Tensor) -> Trig:
    return lambda x, theta: (theta.cos()[:, None] * x - x0) / theta.sin()[:, None]


@bounded
@given(st.floats(0.3, 1.5), st.floats(0.001, 0.2), seeds)
def test_F_of_one_point_of_data_turns_by_h_on_its_path(theta: float, h: float, seed: int) -> None:
    """F(theta - h) = cos h F - sin h dF/dtheta, whatever h: so the second kind of difference is exact."""
    x0, x = normal(1, 2, seed=seed), normal(4, 2, seed=seed + 1)
    F, angle = point_F(x0), torch.full((4,), theta, dtype=torch.float64)
    value, J = DERIVATIVES[0](F, x, angle, F(x, angle), h, jvp)
    slope = J / (math.cos(theta) * math.sin(theta))
    before = F(ddim(x, value, h), angle - h)
    torch.testing.assert_close(before, math.cos(h) * value - math.sin(h) * slope, rtol=0, atol=1e-11)
    _, J2 = DERIVATIVES[2](F, x, angle, value, h, jvp)
    # Rounding of 1e-15 over h >= .001.
    torch.testing.assert_close(J2, J, rtol=0, atol=1e-11)


def test_differences_never_ask_below_zero() -> None:
    seen: list[Tensor] = []

    def F(x: Tensor, theta: Tensor) -> Tensor:
        seen.append(theta)
        return student(x, theta)

    theta, x = torch.tensor([0.0, 1e-6, 0.02, 1.0], dtype=torch.float64), normal(4, 2)
    for kind in (1, 2):
        _, J = DERIVATIVES[kind](F, x, theta, student(x, theta), 0.05, jvp)
        assert bool(J.isfinite().all())
        assert not J[0].any()
        # an angle below h is differenced over itself: first order in .02 still
        _, exact = DERIVATIVES[0](student, x, theta, student(x, theta), 0.05, jvp)
        apart = (J[2] - exact[2]).norm() / exact[2].norm()
        assert float(apart) < 0.1
    assert len(seen) >= 4
    assert all(float(t.detach().min()) >= 0 for t in seen)


def test_all_three_take_a_wrapped_rectified_flow_network() -> None:
    F, theta = trigflow(MIXTURE.velocity), spread()
    x = normal(6, 2)
    F_T = F(x, theta)
    Js = [DERIVATIVES[kind](F, x, theta, F_T, 1e-4, jvp)[1] for kind in (0, 1, 2)]
    torch.testing.assert_close(Js[1], Js[0], rtol=0, atol=5e-3)
    torch.testing.assert_close(Js[2], Js[0], rtol=0, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_step_much_shorter_than_the_smallest_is_better(dtype: torch.dtype) -> None:
    x, theta, teacher = (
        normal(400, 2),
        torch.linspace(0.1, 1.45, 400, dtype=torch.float64),
        trigflow(MIXTURE.velocity),
    )
    F_T = teacher(x, theta)
    _, exact = DERIVATIVES[0](student, x, theta, F_T, 0.0, jvp)
    low = [v.to(dtype) for v in (x, theta, F_T)]

    def error(h: float) -> float:
        return float((DERIVATIVES[2](student, *low, h, jvp)[1].double() - exact).square().mean().sqrt())

    least = smallest_h(dtype)
    assert error(least) < 10 * least  # both errors are of the order of h there, times derivatives of order 1
    assert error(least / 100) > 10 * error(least)  # rounding alone, which grows as 1/h


def test_the_smallest_step_is_the_root_of_the_rounding() -> None:
    assert smallest_h(torch.float32) == pytest.approx(2**-11.5)
    assert smallest_h(torch.bfloat16) == pytest.approx(2**-3.5)


def test_a_step_that_drowns_is_refused_with_one_that_does() -> None:
    check_h(1e-3, torch.float32)
    check_h(0.1, torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32: use h >= 0.00036"):
        check_h(1e-4, torch.float32)
    with pytest.raises(ValueError, match=r"bfloat16: use h >= 0.093"):
        check_h(1e-3, torch.bfloat16)
    check_h(0.00036, torch.float32)
    check_h(0.093, torch.bfloat16)
    with pytest.raises(ValueError, match="too long"):
        check_h(0.5, torch.float32)
    with pytest.raises(ValueError, match="drowns"):
        check_h(math.nan, torch.float32)


# --- discrete consistency ---------------------------------------------------------------------------------


def test_the_teachers_step_is_the_ode_of_one_point_exactly_and_of_a_gaussian_at_second_order() -> None:
    x0, eps, theta, h = normal(4, 2), normal(4, 2, seed=1), 1.1, 0.4
    x, F = math.cos(theta) * x0 + math.sin(theta) * eps, math.cos(theta) * eps - math.sin(theta) * x0
    there = math.cos(theta - h) * x0 + math.sin(theta - h) * eps
    torch.testing.assert_close(ddim(x, F, h), there, rtol=0, atol=1e-14)
    angle, teacher = torch.full((4,), theta, dtype=torch.float64), trigflow(GAUSSIAN.velocity)
    errors = []
    for step in (0.02, 0.01):
        y, t = to_rf(x, angle)
        end, _ = to_trig(GAUSSIAN.flow_map(y, t, t_of(angle - step)), t_of(angle - step))
        errors.append(float((ddim(x, teacher(x, angle), step) - end).norm()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)


def test_the_next_time_is_one_nth_down_before_the_shift() -> None:
    n, k = 20, 5.0
    grid = theta_of(static(n, k))
    torch.testing.assert_close(dcm_next(grid[:-1], n, k), grid[1:], rtol=0, atol=1e-14)
    assert float(dcm_next(theta_of(torch.tensor([0.001], dtype=torch.float64)), n, k)) == 0
    with pytest.raises(ValueError, match="at least one step"):
        dcm_next(grid, 0)


def test_the_target_is_the_students_x0_after_the_step() -> None:
    theta, after = spread(4), spread(4) - 0.05
    x, F_T = normal(4, 2), normal(4, 2, seed=1)
    x_after = math.cos(0.05) * x - math.sin(0.05) * F_T
    expected = after.cos()[:, None] * x_after - after.sin()[:, None] * student(x_after, after)
    torch.testing.assert_close(dcm_target(student, x, theta, after, F_T), expected, rtol=0, atol=1e-14)


def test_the_gradient_of_discrete_consistency_goes_to_that_of_the_continuous_at_first_order() -> None:
    teacher, theta = trigflow(MIXTURE.velocity), spread()
    k = at(student, teacher, theta)
    F = k["F_minus"].clone().requires_grad_()
    (limit,) = torch.autograd.grad(scm_loss(F, k["F_minus"], tangent(**k, r=1.0).g).sum(), F)
    errors = []
    for h in (4e-3, 2e-3, 1e-3):
        target = dcm_target(student, k["x"], theta, theta - h, k["F_T"])
        loss = dcm_loss(F, k["F_minus"], k["x"], theta, theta - h, target)
        (slope,) = torch.autograd.grad(loss.sum(), F)
        errors.append(float((slope - limit).norm()))
    assert [errors[0] / errors[1], errors[1] / errors[2]] == pytest.approx([2, 2], rel=0.05)


def test_a_student_that_agrees_with_its_target_is_not_moved() -> None:
    theta, x = spread(), normal(6, 2)
    F = student(x, theta)
    out = dcm_tangent(F, x, theta, theta - 0.05, x0_of(x, theta, F))
    assert float(out.norm.max()) < 1e-13


def test_the_discrete_tangent_points_from_the_target() -> None:
    """A little step of F along g brings the student's x0 closer to its target."""
    theta, x, target = spread(), normal(6, 2), normal(6, 2, seed=1)
    F = student(x, theta)
    moved = F + 1e-3 * dcm_tangent(F, x, theta, theta - 0.05, target).g
    before = (x0_of(x, theta, F) - target).norm(dim=1)
    assert bool(((x0_of(x, theta, moved) - target).norm(dim=1) < before).all())
