from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flowkit.flow.times import Interval, LogNormal, Times, UniformShift, bell_weights
from flowkit.flow.wrappers import t_of, theta_of

ALL: dict[str, Times] = {
    "p_G of rCM": LogNormal(-0.8, 1.6),
    "p_D of rCM": LogNormal(0.0, 1.6),
    "video": LogNormal(0.7, 1.6, shift=3.0),
    "even": UniformShift(1.0),
    "shift 5": UniformShift(5.0),
    "the expert of noise": Interval(UniformShift(5.0), 0.9, 1.0),
    "the expert of data": Interval(LogNormal(0.0, 1.6), 0.0, 0.9),
    "a middle": Interval(LogNormal(-0.8, 1.6), 0.3, 0.4),
}
each = pytest.mark.parametrize("times", ALL.values(), ids=ALL.keys())
N = 20_000


def draws(times: Times, n: int = N, seed: int = 0, **options: bool) -> Tensor:
    return times.sample(n, torch.Generator().manual_seed(seed), **options)


def distance(times: Times, theta: Tensor) -> float:
    """Kolmogorov and Smirnov's: the largest distance between the empirical and the closed cdf."""
    n = len(theta)
    below = times.cdf(theta.sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((below - steps[:-1]).abs(), (below - steps[1:]).abs()).max())


@each
def test_draws_follow_the_closed_cdf(times: Times) -> None:
    theta = draws(times)
    assert theta.dtype == torch.float64
    # P(D > 1.95 / sqrt(n)) is 2 exp(-2 1.95^2) = .1 %.
    assert distance(times, theta) < 1.95 / math.sqrt(N)


@each
def test_stratified_draws_follow_it_to_one_part_in_n(times: Times) -> None:
    assert distance(times, draws(times, 500, stratified=True)) <= 1 / 500 + 1e-12


def test_stratified_entries_each_have_the_whole_distribution() -> None:
    times = UniformShift(5.0)
    first = torch.stack([draws(times, 8, seed, stratified=True)[0] for seed in range(2000)])
    assert distance(times, first) < 1.95 / math.sqrt(2000)


def test_a_stratified_batch_varies_less() -> None:
    times = LogNormal(0.0, 1.6)
    spread = [
        torch.stack([draws(times, 64, seed, stratified=s).mean() for seed in range(100)]).std()
        for s in (False, True)
    ]
    assert spread[1] < spread[0] / 10  # 1/n against 1/sqrt(n): about 1/16 for smooth quantiles at n = 64


@each
def test_the_density_is_the_slope_of_the_cdf(times: Times) -> None:
    lo, hi = (theta_of(times.lo), theta_of(times.hi)) if isinstance(times, Interval) else (0.0, math.pi / 2)
    theta = torch.linspace(float(lo), float(hi), 52, dtype=torch.float64)[1:-1]
    h = 1e-6
    slope = (times.cdf(theta + h) - times.cdf(theta - h)) / (2 * h)
    torch.testing.assert_close(times.density(theta), slope, rtol=1e-4, atol=1e-8)


@each
def test_the_quantile_is_the_inverse_of_the_cdf(times: Times) -> None:
    u = torch.linspace(0.001, 0.999, 99, dtype=torch.float64)
    torch.testing.assert_close(times.cdf(times.quantile(u)), u, rtol=0, atol=1e-9)


def test_the_densities_are_those_of_the_papers() -> None:
    theta, k, m, d, M = torch.tensor(0.9, dtype=torch.float64), 5.0, -0.8, 1.6, 3.0
    c, s = math.cos(0.9), math.sin(0.9)
    assert float(UniformShift(k).density(theta)) == pytest.approx(k / (k * c + s) ** 2)
    z = (math.log(math.tan(0.9) / M) - m) / d
    phi = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    assert float(LogNormal(m, d, M).density(theta)) == pytest.approx(phi / (d * s * c))


def test_the_log_of_tan_is_normal() -> None:
    z = (draws(LogNormal(-0.8, 1.6)).tan().log() + 0.8) / 1.6
    assert float(z.mean()) == pytest.approx(0, abs=4 / math.sqrt(N))
    assert float(z.std()) == pytest.approx(1, abs=4 / math.sqrt(2 * N))


def test_a_shift_of_sigma_is_a_shift_of_the_mean() -> None:
    shifted, moved = LogNormal(-0.8, 1.6, shift=math.sqrt(21)), LogNormal(-0.8 + 0.5 * math.log(21), 1.6)
    torch.testing.assert_close(draws(shifted), draws(moved), rtol=1e-12, atol=0)


def test_a_uniform_shift_is_the_static_shift_of_an_even_draw() -> None:
    even, shifted = t_of(draws(UniformShift(1.0))), t_of(draws(UniformShift(5.0)))
    torch.testing.assert_close(shifted, 5 * even / (1 + 4 * even), rtol=0, atol=1e-12)


def test_an_interval_is_one_of_rectified_flow_time() -> None:
    times = Interval(UniformShift(5.0), 0.9, 1.0)
    t = t_of(draws(times))
    assert float(t.min()) >= 0.9 - 1e-12
    assert float(t.max()) <= 1
    outside = theta_of(torch.tensor([0.1, 0.89], dtype=torch.float64))
    assert times.density(outside).tolist() == [0, 0]
    assert times.cdf(outside).tolist() == [0, 0]


def test_an_interval_keeps_the_shape_of_the_density() -> None:
    whole = LogNormal(0.0, 1.6)
    part = Interval(whole, 0.2, 0.6)
    theta = theta_of(torch.tensor([0.25, 0.5], dtype=torch.float64))
    ratio = part.density(theta) / whole.density(theta)
    torch.testing.assert_close(ratio[0], ratio[1], rtol=1e-12, atol=0)


def test_the_bell_is_zero_at_noise_highest_in_the_middle_and_one_on_average() -> None:
    w = bell_weights(1000)
    assert w[0] == 0
    assert int(w.argmax()) == 500  # x = n/2 is the step at time 1/2
    assert float(w.mean()) == pytest.approx(1)
    raw = lambda x: math.exp(-2 * ((x - 500) / 1000) ** 2) - math.exp(-0.5)  # noqa: E731
    assert float(w[100] / w[300]) == pytest.approx(raw(900) / raw(700))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LogNormal(0.0, 0.0), "positive"),
        (lambda: UniformShift(0.0), "positive"),
        (lambda: Interval(UniformShift(1.0), 0.9, 0.9), r"in \[0, 1\]"),
        (lambda: Interval(UniformShift(1.0), -0.1, 0.9), r"in \[0, 1\]"),
        (lambda: bell_weights(1), "two steps"),
    ],
)
def test_senseless_times_are_refused(make: type, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
