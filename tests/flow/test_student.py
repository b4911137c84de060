from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flowkit.flow.laws import LAWS
from flowkit.flow.student import student_grid, student_thetas
from flowkit.flow.wrappers import rectified, t_of, to_rf, x0_of
from tests.flow.given import normal


def student(x: Tensor, theta: Tensor) -> Tensor:
    return torch.sin(x.roll(1, 1)) * theta.cos()[:, None] - 0.4 * x * theta.sin()[:, None]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_angles_are_those_of_rcm(n: int) -> None:
    assert student_thetas(n).tolist() == [*[math.atan(80), 1.5, 1.4, 1.0][:n], 0.0]
    assert student_thetas(n).dtype == torch.float64


def test_sigma_max_and_mids_can_be_another_students() -> None:
    thetas = student_thetas(3, sigma_max=200.0, mids=(1.3, 1.0, 0.6))
    assert thetas.tolist() == [math.atan(200), 1.3, 1.0, 0.0]
    assert torch.equal(student_grid(3, 200.0, (1.3, 1.0, 0.6)), t_of(thetas))


def test_the_grid_starts_at_sigma_max_over_one_more() -> None:
    assert float(student_grid(4)[0]) == pytest.approx(80 / 81, abs=1e-15)
    assert float(student_grid(4)[-1]) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_consistency_law_on_the_grid_is_the_students_sampler(n: int) -> None:
    noise = [normal(5, 3, seed=seed) for seed in range(n + 1)]
    thetas, grid = student_thetas(n), student_grid(n)
    x = noise[0]
    for i, (theta, after) in enumerate(pairwise(thetas)):
        x = after.cos() * x0_of(x, theta, student(x, theta.expand(5))) + after.sin() * noise[i + 1]
    velocity = rectified(student)
    y, _ = to_rf(noise[0], thetas[0])
    for i, (t, s) in enumerate(pairwise(grid)):
        mean, std = LAWS["consistency"](y, velocity(y, t.expand(5)), t, s, 1.0)
        y = mean + std * noise[i + 1]
    torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("n", [0, 5])
def test_more_steps_than_times_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="1 to 4 steps"):
        student_grid(n)


def test_times_that_do_not_fall_are_refused() -> None:
    with pytest.raises(ValueError, match="must fall"):
        student_thetas(2, sigma_max=1.0)
