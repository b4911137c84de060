from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowkit.flow.laws import LAWS, log_prob, rate
from flowkit.flow.policy import (
    KLS,
    Move,
    RunningStats,
    approx_kl,
    clip_stats,
    group_advantage,
    kl_exact,
    kl_path,
    kl_velocity,
    surrogate,
)
from tests.flow.given import bounded, golden, normal, seeds

GROUP = torch.tensor([0, 1, 0, 2, 1, 0, 2, 2, 1])


def spread_rewards(seed: int, n: int = 9) -> Tensor:
    return normal(n, seed=seed)


# --- advantages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden()["advantages"], ids=lambda c: f"global_std={c['global_std']}")
def test_advantages_are_the_references(case: dict[str, list[float]]) -> None:
    group = torch.tensor(["abc".index(str(p)) for p in case["prompts"]])
    rewards = torch.tensor(case["rewards"], dtype=torch.float64)
    found = group_advantage(rewards, group, std="global" if case["global_std"] else "group")
    expected = torch.tensor(case["advantages"], dtype=torch.float64)
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-12)
    assert found.zero_spread.tolist() == [2]
    assert found.groups == 3


@bounded
@given(seeds, st.sampled_from(["group", "global"]))
def test_advantages_sum_to_zero_in_every_group(seed: int, std: str) -> None:
    values = group_advantage(spread_rewards(seed), GROUP, std=std).values  # type: ignore[arg-type]
    sums = torch.zeros(3, dtype=torch.float64).index_add(0, GROUP, values)
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-12)


@bounded
@given(seeds)
def test_advantages_have_unit_population_variance_in_every_group(seed: int) -> None:
    values = group_advantage(spread_rewards(seed), GROUP, eps=0.0).values
    for i in range(3):
        assert float((values[i == GROUP] ** 2).mean()) == pytest.approx(1.0, rel=1e-12)


@bounded
@given(seeds, st.floats(-5, 5), st.floats(0.1, 10), st.sampled_from(["group", "global"]))
def test_advantages_do_not_see_shift_and_positive_scale(seed: int, by: float, scale: float, std: str) -> None:
    rewards = spread_rewards(seed)
    here = group_advantage(rewards, GROUP, std=std, eps=0.0)  # type: ignore[arg-type]
    there = group_advantage(rewards * scale + by, GROUP, std=std, eps=0.0)  # type: ignore[arg-type]
    # A shift of 5 over a spread of .1 loses two digits of sixteen; the spread of normal triples can be small.
    torch.testing.assert_close(there.values, here.values, rtol=1e-9, atol=1e-9)


@bounded
@given(seeds, st.permutations(range(9)))
def test_advantages_move_with_their_samples(seed: int, order: list[int]) -> None:
    rewards = spread_rewards(seed)
    there = group_advantage(rewards[order], GROUP[order]).values
    torch.testing.assert_close(there, group_advantage(rewards, GROUP).values[order], rtol=0, atol=1e-12)


@bounded
@given(st.floats(0.125, 1000, width=32), st.integers(2, 40))
def test_equal_float32_rewards_give_exactly_nothing(value: float, n: int) -> None:
    rewards = torch.full((n,), value, dtype=torch.float32)
    found = group_advantage(rewards, torch.zeros(n, dtype=torch.int64))
    assert not found.values.any()
    assert not found.used.any()
    assert found.zero_spread.tolist() == [0]
    assert found.frac_zero_std == 1.0


def test_a_nan_reward_leaves_its_group_and_changes_no_other() -> None:
    rewards, group = torch.tensor([1.0, math.nan, 3.0, 0.0, 5.0, math.inf]), torch.tensor([0, 0, 0, 1, 1, 1])
    found = group_advantage(rewards, group)
    rest = torch.tensor([0, 2, 3, 4])
    assert torch.equal(found.values[rest], group_advantage(rewards[rest], group[rest]).values)
    assert found.values[[1, 5]].tolist() == [0.0, 0.0]
    assert found.used.tolist() == [True, False, True, True, True, False]
    assert found.zero_spread.tolist() == []
    alike = group_advantage(rewards, group, std="global")
    assert torch.equal(alike.values[rest], group_advantage(rewards[rest], group[rest], std="global").values)


@pytest.mark.parametrize("std", ["group", "global"])
def test_a_group_of_one_or_none_scored_gives_nothing(std: str) -> None:
    rewards = torch.tensor([7.0, math.nan, math.nan, 1.0, math.nan])
    found = group_advantage(rewards, torch.tensor([3, 4, 4, 9, 9]), std=std)  # type: ignore[arg-type]
    assert found.values.tolist() == [0.0] * 5
    assert found.zero_spread.tolist() == [3, 4, 9]
    nothing = group_advantage(rewards[1:3], torch.tensor([4, 4]), std=std)  # type: ignore[arg-type]
    assert nothing.values.tolist() == [0.0, 0.0]


def test_zero_spread_is_reported_beside_groups_that_have_some() -> None:
    found = group_advantage(torch.tensor([2.0, 2.0, 1.0, 3.0]), torch.tensor([5, 5, 2, 2]))
    assert found.values[:2].tolist() == [0.0, 0.0]
    assert found.zero_spread.tolist() == [5]
    assert found.used.tolist() == [False, False, True, True]
    assert found.frac_zero_std == 0.5


def test_advantages_are_clamped_on_both_sides() -> None:
    rewards = torch.tensor([0.0] * 30 + [1.0] + [1.0] * 30 + [0.0])
    group = torch.tensor([0] * 31 + [1] * 31)
    free = group_advantage(rewards, group).values
    assert float(free.max()) > 5
    assert float(free.min()) < -5
    assert torch.equal(group_advantage(rewards, group, clip=2.0).values, free.clamp(-2.0, 2.0))


def test_advantages_have_the_dtype_of_the_rewards() -> None:
    assert group_advantage(spread_rewards(0).float(), GROUP).values.dtype == torch.float32


def test_rewards_and_groups_must_match() -> None:
    with pytest.raises(ValueError, match=r"\[N\]"):
        group_advantage(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="group or global"):
        group_advantage(torch.zeros(3), torch.zeros(3, dtype=torch.int64), std="sample")  # type: ignore[arg-type]


# --- statistics over a run --------------------------------------------------------------------------------


@bounded
@given(seeds, st.integers(1, 4))
def test_running_statistics_are_those_of_all_rewards_at_once(seed: int, rounds: int) -> None:
    run = RunningStats()
    for i in range(rounds):
        run = run.add(spread_rewards(seed + i) + 10, GROUP)
    rewards = torch.cat([spread_rewards(seed + i) + 10 for i in range(rounds)])
    for prompt in range(3):
        own = rewards[GROUP.repeat(rounds) == prompt]
        mean, std = run.of(prompt)
        assert mean == pytest.approx(float(own.mean()), rel=1e-12)
        assert std == pytest.approx(float(own.std(correction=0)), rel=1e-9)


def test_running_statistics_come_back_from_json_bit_for_bit() -> None:
    run = RunningStats().add(torch.tensor([0.1, 0.7, math.nan]), torch.tensor([11, 11, 4]))
    run = run.add(torch.tensor([1 / 3]), torch.tensor([2]))
    again = RunningStats.load(json.loads(json.dumps(run.state())))
    assert again == run
    assert sorted(again.moments) == [2, 11]


def test_a_run_compares_with_all_rounds_and_leaves_its_input_as_it_was() -> None:
    first, second = torch.tensor([0.0, 1.0]), torch.tensor([3.0, 4.0])
    group = torch.tensor([6, 6])
    empty = RunningStats()
    one = group_advantage(first, group, history=empty)
    assert torch.equal(one.values, group_advantage(first, group).values)
    assert one.history is not None
    two = group_advantage(second, group, history=one.history)
    # All four have mean 2 and population variance 2.5.
    torch.testing.assert_close(two.values, (second - 2) / (math.sqrt(2.5) + 1e-4))
    both = group_advantage(second, group, std="global", history=one.history)
    torch.testing.assert_close(both.values, (second - 2) / (0.5 + 1e-4))
    assert empty.moments == {}
    assert one.history.moments[6][0] == 2
    assert two.history is not None
    assert two.history.moments[6][0] == 4
    assert group_advantage(first, group).history is None


# --- the surrogate ----------------------------------------------------------------------------------------


def logps(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    old = normal(8, seed=seed)
    return old + 0.3 * normal(8, seed=seed + 1), old, normal(8, seed=seed + 2)


@bounded
@given(seeds)
def test_on_policy_the_gradient_is_that_of_reinforce(seed: int) -> None:
    x, v = normal(5, 3, seed=seed), normal(5, 3, seed=seed + 1).requires_grad_()
    mean, std = LAWS["flow-sde"](x, v, 0.8, 0.6, 0.7)
    y = (mean + std * normal(5, 3, seed=seed + 2)).detach()
    advantage, logp = normal(5, seed=seed + 3), log_prob(y, mean, std)
    loss = surrogate(logp, logp.detach(), advantage, 1e-4)
    torch.testing.assert_close(loss, -advantage)  # the ratio is exactly 1
    (ours,) = torch.autograd.grad(loss.sum(), v, retain_graph=True)
    (reinforce,) = torch.autograd.grad(-(advantage * logp).sum(), v)
    torch.testing.assert_close(ours, reinforce)


@bounded
@given(seeds, st.floats(1e-5, 0.5))
def test_the_surrogate_is_never_above_the_unclipped_objective(seed: int, clip: float) -> None:
    new, old, advantage = logps(seed)
    objective = -surrogate(new, old, advantage, clip)
    assert bool((objective <= advantage * (new - old).exp()).all())


@bounded
@given(seeds)
def test_within_the_clip_range_nothing_is_clipped(seed: int) -> None:
    new, old, advantage = logps(seed)
    new = old + 0.1 * (new - old).tanh()
    torch.testing.assert_close(surrogate(new, old, advantage, 0.2), -advantage * (new - old).exp())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.3, 1.0, -1.2, False),  # enough gained
        (0.7, -1.0, 0.8, False),  # enough avoided
        (0.7, 1.0, -0.7, True),  # a good sample became rare: go back
        (1.3, -1.0, 1.3, True),  # a bad sample became likely: go back
    ],
)
def test_the_clip_stops_what_has_gone_far_enough(
    ratio: float, advantage: float, loss: float, moves: bool
) -> None:
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found = surrogate(new, torch.zeros_like(new), torch.full_like(new, advantage), 0.2)
    assert found.item() == pytest.approx(loss, abs=1e-12)
    (slope,) = torch.autograd.grad(found.sum(), new)
    assert bool(slope) is moves


def test_clip_statistics_count_each_side() -> None:
    ratio = torch.tensor([0.7, 0.7, 1.3, 1.3, 1.0, 0.9, 1.3, 1.4], dtype=torch.float64)
    advantage = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 2.0, 0.0], dtype=torch.float64)
    stats = clip_stats(ratio.log(), torch.zeros(8, dtype=torch.float64), advantage, 0.2)
    assert float(stats.low) == 1 / 8
    assert float(stats.high) == 2 / 8


@bounded
@given(seeds, st.floats(1e-3, 0.5))
def test_clip_statistics_are_the_share_of_samples_without_gradient(seed: int, clip: float) -> None:
    new, old, advantage = logps(seed)
    new.requires_grad_()
    (slope,) = torch.autograd.grad(surrogate(new, old, advantage, clip).sum(), new)
    stats = clip_stats(new, old, advantage, clip)
    assert float(stats.low + stats.high) == pytest.approx(float((slope == 0).double().mean()), abs=1e-12)
    assert not stats.low.requires_grad


def test_the_approximate_kl_is_half_the_mean_square() -> None:
    new = torch.tensor([0.1, -0.3], dtype=torch.float64, requires_grad=True)
    found = approx_kl(new, torch.zeros(2, dtype=torch.float64))
    assert float(found) == pytest.approx(0.025)
    assert not found.requires_grad


# --- distances to a reference -----------------------------------------------------------------------------


def two_moves(seed: int, law: str, t: float, s: float) -> tuple[Move, Move]:
    x = normal(3, 2, 2, seed=seed)
    moves = []
    for i in (1, 2):
        v = normal(3, 2, 2, seed=seed + i)
        mean, std = LAWS[law](x, v, t, s, 0.7)
        moves.append(Move(v, mean, std, rate(law, std, t, s)))
    return moves[0], moves[1]


@bounded
@given(seeds)
def test_the_exact_kl_is_that_of_torch(seed: int) -> None:
    new, ref = two_moves(seed, "flow-sde", 0.8, 0.55)
    truth = kl_divergence(
        Normal(new.mean, new.std.expand(3, 2, 2)), Normal(ref.mean, ref.std.expand(3, 2, 2))
    )
    torch.testing.assert_close(kl_exact(new.mean, ref.mean, new.std), truth.flatten(1).mean(1))


@bounded
@given(seeds, st.sampled_from(["flow-sde", "dance"]))
def test_the_path_kl_is_the_exact_one_times_the_step(seed: int, law: str) -> None:
    new, ref = two_moves(seed, law, 0.8, 0.55)
    exact = kl_exact(new.mean, ref.mean, new.std)
    torch.testing.assert_close(kl_path(new.mean, ref.mean, new.g), exact * 0.25)


@bounded
@given(seeds)
def test_the_velocity_kl_is_a_mean_square(seed: int) -> None:
    v, ref = normal(3, 4, seed=seed), normal(3, 4, seed=seed + 1)
    truth = torch.stack([torch.nn.functional.mse_loss(a, b) for a, b in zip(v, ref, strict=True)])
    torch.testing.assert_close(kl_velocity(v, ref), truth)


def test_the_table_of_kls_compares_what_each_name_says() -> None:
    new, ref = two_moves(0, "flow-sde", 0.8, 0.55)
    assert set(KLS) == {"path", "exact", "velocity"}
    assert torch.equal(KLS["path"](new, ref), kl_path(new.mean, ref.mean, new.g))
    assert torch.equal(KLS["exact"](new, ref), kl_exact(new.mean, ref.mean, new.std))
    assert torch.equal(KLS["velocity"](new, ref), kl_velocity(new.v, ref.v))


@pytest.mark.parametrize("kind", KLS)
def test_every_kl_is_zero_at_the_reference_and_pulls_towards_it(kind: str) -> None:
    new, ref = two_moves(0, "flow-sde", 0.8, 0.55)
    assert not KLS[kind](ref, ref).any()
    v = new.v.clone().requires_grad_()
    mean, std = LAWS["flow-sde"](normal(3, 2, 2), v, 0.8, 0.55, 0.7)
    (slope,) = torch.autograd.grad(KLS[kind](Move(v, mean, std, new.g), ref).sum(), v)
    assert bool((slope * (new.v - ref.v) > 0).all())
