from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkit.flow.path import as_time, eps_of, expand, interpolate, velocity_of, x0_of
from tests.flow.given import bounded, normal, seeds, unit


@bounded
@given(unit, seeds)
def test_a_point_and_its_velocity_give_both_ends_back(t: float, seed: int) -> None:
    x0, eps = normal(2, 3, seed=seed), normal(2, 3, seed=seed + 1)
    x, v = interpolate(x0, eps, t), velocity_of(x0, eps)
    # A handful of float64 operations on numbers of order 1.
    torch.testing.assert_close(x0_of(x, v, t), x0, rtol=0, atol=1e-14)
    torch.testing.assert_close(eps_of(x, v, t), eps, rtol=0, atol=1e-14)


def test_time_one_is_noise_and_time_zero_is_data() -> None:
    x0, eps = normal(2, 3, seed=0), normal(2, 3, seed=1)
    assert torch.equal(interpolate(x0, eps, 1.0), eps)
    assert torch.equal(interpolate(x0, eps, 0.0), x0)


@bounded
@given(st.integers(1, 4), seeds)
def test_a_time_per_sample_is_that_time_for_each_sample(batch: int, seed: int) -> None:
    x0, eps = normal(batch, 3, 2, seed=seed), normal(batch, 3, 2, seed=seed + 1)
    t = torch.linspace(0.1, 0.9, batch, dtype=torch.float64)
    each = [interpolate(x0[i : i + 1], eps[i : i + 1], float(t[i])) for i in range(batch)]
    assert torch.equal(interpolate(x0, eps, t), torch.cat(each))


def test_the_result_has_the_dtype_of_the_state_whatever_that_of_the_time() -> None:
    x = normal(2, 3).float()
    t = torch.tensor([0.3, 0.4], dtype=torch.float64)
    assert x0_of(x, x, t).dtype == torch.float32
    assert x0_of(x.double(), x.double(), t.float()).dtype == torch.float64
    assert expand(t, x).shape == (2, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_a_time_in_half_precision_or_integers_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="float32 or float64"):
        as_time(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("t", [torch.ones(3), torch.ones(1), torch.ones(2, 1)])
def test_times_that_do_not_count_the_samples_are_refused(t: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"scalar or \[B\]"):
        expand(t, torch.ones(2, 1))
