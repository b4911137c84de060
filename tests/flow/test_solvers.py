from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flowkit.flow.laws import LAWS
from flowkit.flow.schedule import static, unshifted
from flowkit.flow.solvers import SOLVERS, Velocity, euler, heun
from tests.flow.analytic import Mixture
from tests.flow.given import normal

ORDER = {"euler": 1, "heun": 2}
GAUSSIAN = Mixture.gaussian([0.5, -1.0], 0.25)


class Counted:
    """A velocity that notes how it was called."""

    def __init__(self, velocity: Velocity) -> None:
        self.velocity = velocity
        self.times: list[Tensor] = []

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.times.append(t)
        return self.velocity(x, t)


def test_every_solver_has_an_order() -> None:
    assert set(SOLVERS) == set(ORDER)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("data", ["gaussian", "mixture"])
def test_the_error_falls_with_the_order_of_the_solver(name: str, data: str) -> None:
    solve, x = SOLVERS[name], normal(16, 2)
    if data == "gaussian":
        mix = GAUSSIAN
        truth = mix.flow_map(x, 1.0, 0.0)
    else:
        mix = Mixture.two_unlike()
        truth = heun(mix.velocity, x, unshifted(1280))  # its own error is 3e-6, the smallest one here 6e-4
    # Euler needs short steps before its first term leads.
    n = {"euler": 320, "heun": 40}[name]
    coarse, fine = (float((solve(mix.velocity, x, unshifted(k)) - truth).norm()) for k in (n, 2 * n))
    # The next term of the error shifts the order by c/n: measured .06 at most.
    assert math.log2(coarse / fine) == pytest.approx(ORDER[name], abs=0.1)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_straight_flow_is_solved_in_one_step(name: str) -> None:
    # A point as data: v = eps - x0 along the whole path.
    point = Mixture.gaussian([0.5, -1.0], 0.0)
    x = normal(4, 2)
    y = SOLVERS[name](point.velocity, x, unshifted(1))
    torch.testing.assert_close(y, point.means.expand(4, 2), rtol=0, atol=1e-14)


@pytest.mark.parametrize("law", ["ode", "flow-sde", "dance", "cps"])
def test_euler_is_every_law_at_level_zero_bit_for_bit(law: str) -> None:
    grid, start = static(7, 3.0), normal(4, 2)
    x = start
    for t, s in pairwise(grid):
        x, _ = LAWS[law](x, GAUSSIAN.velocity(x, t), t, s, 0.0)
    assert torch.equal(euler(GAUSSIAN.velocity, start, grid), x)


def test_calls_are_counted_and_none_is_at_time_zero() -> None:
    grid, x = static(5, 3.0), normal(3, 2)
    for solver, calls in ((euler, 5), (heun, 9)):
        counted = Counted(GAUSSIAN.velocity)
        solver(counted, x, grid)
        assert len(counted.times) == calls
        assert all(bool((t > 0).all()) for t in counted.times)
        assert counted.times[0].tolist() == [1.0] * 3


def test_a_path_may_be_solved_in_two_parts() -> None:
    grid, x = static(6, 3.0), normal(3, 2)
    for solver in SOLVERS.values():
        half = solver(GAUSSIAN.velocity, x, grid[:4])
        assert torch.equal(solver(GAUSSIAN.velocity, half, grid[3:]), solver(GAUSSIAN.velocity, x, grid))


def test_the_network_gets_times_in_the_dtype_of_the_state() -> None:
    counted = Counted(lambda x, t: x * t[:, None])
    y = heun(counted, normal(3, 2).float(), static(3, 3.0))
    assert y.dtype == torch.float32
    assert {t.dtype for t in counted.times} == {torch.float32}
    assert {t.shape for t in counted.times} == {torch.Size([3])}
