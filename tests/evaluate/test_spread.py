from __future__ import annotations

import math

import pytest
import torch

from flowkit.evaluate.spread import energy_distance, spread


def normal(n: int, d: int, seed: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return mean + std * torch.randn(n, d, dtype=torch.float64, generator=g)


def test_the_spread_of_normal_numbers_is_known() -> None:
    # |X - X'| / sqrt(d) tends to sqrt(2) std (1 - 1 / (4 d)); 20,000 numbers give it to .5 % (one sigma)
    assert spread(normal(200, 100, 0, std=3.0)) == pytest.approx(3 * math.sqrt(2) * (1 - 1 / 400), rel=0.02)
    assert spread(torch.ones(5, 2, 3)) == 0.0


def test_energy_distance_is_that_of_the_closed_form() -> None:
    # one dimension, N(0, 1) against N(m, 1): 2 E|m + sqrt(2) Z| - 4 / sqrt(pi)
    m, s = 1.5, math.sqrt(2)
    folded = s * math.sqrt(2 / math.pi) * math.exp(-(m**2) / (2 * s**2)) + m * math.erf(
        m / (s * math.sqrt(2))
    )
    expected = 2 * folded - 4 / math.sqrt(math.pi)
    # 1,500 samples each: a standard error of about .04
    assert energy_distance(normal(1500, 1, 1), normal(1500, 1, 2, mean=m)) == pytest.approx(
        expected, abs=0.12
    )


def test_energy_distance_of_one_distribution_is_nothing_on_average() -> None:
    found = [energy_distance(normal(20, 4, 2 * k), normal(30, 4, 2 * k + 1)) for k in range(60)]
    assert abs(sum(found)) / 60 < 0.02  # 60 means with a standard deviation of .06 each
    assert min(found) < 0 < max(found)


def test_lost_modes_show_in_both() -> None:
    both = torch.cat([normal(50, 3, 0, mean=-2), normal(50, 3, 1, mean=2)])
    one = normal(100, 3, 2, mean=2)
    assert spread(one) < 0.6 * spread(both)
    assert energy_distance(both, one) > 0.5
