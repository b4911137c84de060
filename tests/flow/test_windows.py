from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowkit.flow.windows import trained_steps, window_start
from tests.flow.given import bounded, counts, seeds


def test_every_window_that_fits_is_drawn_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    starts = [window_start(generator, 2, 1, 6) for _ in range(4000)]
    # 1 ... 4; each 1000 times, with a standard deviation of 27.
    assert set(starts) == {1, 2, 3, 4}
    assert min(starts.count(i) for i in range(1, 5)) > 870


@bounded
@given(st.integers(1, 8), st.integers(0, 5), st.integers(0, 8), seeds)
def test_a_window_lies_between_its_bounds(size: int, lo: int, room: int, seed: int) -> None:
    hi = lo + size + room
    start = window_start(torch.Generator().manual_seed(seed), size, lo, hi)
    assert lo <= start
    assert start + size <= hi


@bounded
@given(seeds)
def test_one_generator_state_gives_one_window(seed: int) -> None:
    one, two = (window_start(torch.Generator().manual_seed(seed), 3, 0, 20) for _ in range(2))
    assert one == two


@pytest.mark.parametrize(("size", "lo", "hi"), [(0, 0, 4), (3, 2, 4), (1, -1, 4), (1, 3, 3)])
def test_a_window_that_does_not_fit_is_refused(size: int, lo: int, hi: int) -> None:
    with pytest.raises(ValueError, match="no window"):
        window_start(torch.Generator(), size, lo, hi)


@bounded
@given(st.integers(1, 100))
def test_all_steps_but_the_last_are_trained(n: int) -> None:
    assert trained_steps(n) == range(n - 1)


@bounded
@given(counts)
def test_all_steps_are_trained_at_fraction_one(n: int) -> None:
    assert trained_steps(n, 1.0) == range(n)


@bounded
@given(st.integers(1, 100), st.integers(1, 100))
def test_a_fraction_that_names_a_number_of_steps_gives_it(n: int, k: int) -> None:
    k = min(k, n)
    assert trained_steps(n, k / n) == range(k)
    assert len(trained_steps(50, 0.58)) == 29


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_an_impossible_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        trained_steps(10, fraction)
