"""The laws of addressed randomness."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkit.runtime import seeds

Part = int | str
part = st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=6))
address = st.lists(part, max_size=4).map(tuple)


@settings(max_examples=50, deadline=None)
@given(address, address)
def test_two_addresses_share_a_stream_only_if_they_are_one(a: tuple[Part, ...], b: tuple[Part, ...]) -> None:
    assert torch.equal(seeds.noise((8,), *a), seeds.noise((8,), *b)) == (a == b)


def test_an_address_gives_its_numbers_whatever_was_drawn_before() -> None:
    there = [seeds.noise((3, 2), 7, "x", k) for k in range(5)]
    torch.randn(11)
    back = [seeds.noise((3, 2), 7, "x", k) for k in reversed(range(5))]
    assert all(torch.equal(a, b) for a, b in zip(there, reversed(back), strict=True))


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    seeds.noise((100,), 1)
    assert torch.equal(before, torch.get_rng_state())


def test_the_parts_of_an_address_do_not_run_together() -> None:
    hashes = {
        seeds.address_hash(*a) for a in [("a", "b"), ("ab",), ("a,b",), (1,), ("1",), (1, 2), (12,), ()]
    }
    assert len(hashes) == 8


def test_the_numbers_of_an_address_never_change() -> None:
    # Written down once: a change would silently give every user's seed other pictures.
    assert seeds.address_hash(0, "rollout", 3) == 8991629875744927865
    drawn = torch.randint(0, 1 << 30, (3,), generator=seeds.generator(0, "rollout", 3))
    assert drawn.tolist() == [717298788, 61282932, 512186339]


@pytest.mark.parametrize("bit", [1 << 32, 1 << 63, 1, 1 << 31])
def test_every_half_of_the_64_bits_matters(monkeypatch: pytest.MonkeyPatch, bit: int) -> None:
    first = seeds.noise((8,), "a")
    seed = seeds.address_hash("a")
    monkeypatch.setattr(seeds, "address_hash", lambda *_: seed ^ bit)
    assert not torch.equal(first, seeds.noise((8,), "a"))


def test_a_hash_of_two_equal_halves_is_random_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "address_hash", lambda *_: 5 << 32 | 5)
    assert len(set(seeds.noise((64,), "a").tolist())) == 64


def test_the_numbers_are_standard_normal_within_and_across_addresses() -> None:
    n = 400
    x = torch.stack([seeds.noise((n,), 0, k) for k in range(n)]).double()
    # Six standard errors of each estimate over n * n independent normals.
    assert abs(x.mean().item()) < 6 / n
    assert abs(x.var().item() - 1) < 6 * math.sqrt(2) / n
    assert abs((x[1:] * x[:-1]).mean().item()) < 6 / n
    assert abs((x[:, 1:] * x[:, :-1]).mean().item()) < 6 / n
    assert abs((x**4).mean().item() - 3) < 6 * math.sqrt(96) / n
