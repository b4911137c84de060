from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flowkit.errors import UserError
from flowkit.flow.policy import surrogate
from flowkit.flow.student import student_grid
from flowkit.rollout import replay
from flowkit.runtime.dist import Dist
from flowkit.trainers.grpo import collect, improve, logp_floor, train, trajectories
from flowkit.trainers.meters import Clock, Meter
from flowkit.trainers.rounds import Chunk, round_metrics, split
from flowkit.types import Media, Prompt
from tests.trainers import toy


def difference(a: object, b: object) -> float:
    return (toy.weights_of(a) - toy.weights_of(b)).abs().max().item()


def test_the_ratio_is_exactly_one_before_the_first_update() -> None:
    window = {"rollout__window": {"size": 2, "lo": 0, "hi": 4}}
    for changes in ({}, window, {"optim__micro": 3}, {**window, "optim__micro": 8}):
        rows = toy.run(toy.config(**changes)).rows
        assert [row["ratio_first"] for row in rows] == [1.0] * 3


def test_a_students_own_sampler_is_a_law_that_is_trained_like_any_other() -> None:
    """Law consistency on the student's times: ratios start at 1, and what is liked becomes likelier."""
    cfg = toy.config(rollout__law="consistency", rollout__steps=4, steps=30)
    model = toy.ToyModel()
    walk = dataclasses.replace(toy.walk(cfg), grid=student_grid(4).float())
    rows = list(train(toy.world(model), walk, cfg, toy.state(model, cfg), Dist()))
    assert all(row["ratio_first"] == 1.0 for row in rows)
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.1


def test_micro_batches_never_change_the_gradient() -> None:
    whole = toy.run(toy.config(optim__micro=8))
    for micro in (1, 3, 4):
        # float32 sums in another order, three steps of Adam: a few ulp of weights of order 1
        assert difference(whole, toy.run(toy.config(optim__micro=micro))) < 1e-6


def test_the_reward_rises_on_a_task_that_can_be_learned() -> None:
    rows = toy.run(toy.config(steps=40)).rows
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.3


def test_a_step_makes_good_samples_likelier_and_bad_ones_less_likely() -> None:
    cfg = toy.config(policy__updates=1, optim__lr=1e-3)
    model = toy.ToyModel()
    world, walk, state = toy.world(model), toy.walk(cfg), toy.state(model, cfg)
    chunks = collect(world, walk, cfg, state, Dist(), Clock())
    improve(world, walk, chunks, cfg, state, Dist(), Meter())
    gained = 0.0
    for chunk in chunks:
        cond = toy.conds(chunk.prompt)
        for k in range(walk.length):
            with torch.no_grad():
                now = replay(lambda x, t, cond=cond: model.velocity(x, t, cond), chunk.kept, k, walk)
            gained += ((now.logp - chunk.kept.logp[:, k]) * chunk.advantage).sum().item()
    assert gained > 0


def test_the_gradient_is_that_of_the_mean_surrogate_over_all_transitions() -> None:
    cfg = toy.config(policy__updates=1, optim__micro=3)
    model = toy.ToyModel()
    world, walk, state = toy.world(model), toy.walk(cfg), toy.state(model, cfg)
    chunks = collect(world, walk, cfg, state, Dist(), Clock())
    losses = []
    for chunk in chunks:
        cond = toy.conds(chunk.prompt)
        for k in range(walk.length):
            now = replay(lambda x, t, cond=cond: model.velocity(x, t, cond), chunk.kept, k, walk)
            losses.append(surrogate(now.logp, chunk.kept.logp[:, k], chunk.advantage, cfg.policy.clip))
    expected = torch.autograd.grad(torch.cat(losses).mean(), list(model.net.parameters()))
    seen: list[torch.Tensor] = []
    state.update = lambda: seen.extend(p.grad for p in state.params.values()) or torch.tensor(0.0)  # type: ignore[method-assign, func-returns-value]
    improve(world, walk, chunks, cfg, state, Dist(), Meter())
    for a, b in zip(seen, expected, strict=True):
        # 64 terms summed in another order
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)


def test_every_group_has_each_of_its_samples_once_and_lies_in_one_update() -> None:
    chunks = split([0, 0, 1, 1], [3, 1, 2, 0], 0, 5, 4)
    rows = [(c.update, g, i, k) for c in chunks for g, i, k in zip(c.group, c.prompt, c.sample, strict=True)]
    assert sorted(rows) == sorted(
        (u, g, i, k) for g, (u, i) in enumerate([(0, 3), (0, 1), (1, 2), (1, 0)]) for k in range(5)
    )
    assert all(len(c) <= 4 for c in chunks)


def test_members_of_a_group_share_their_window_and_groups_do_not() -> None:
    cfg = toy.config(rollout__window={"size": 1, "lo": 0, "hi": 4}, rollout__groups=8, policy__updates=1)
    model = toy.ToyModel()
    chunks = collect(toy.world(model), toy.walk(cfg), cfg, toy.state(model, cfg), Dist(), Clock())
    starts: dict[int, set[int]] = {}
    for c in chunks:
        for g, first in zip(c.group, c.kept.first.tolist(), strict=True):
            starts.setdefault(g, set()).add(first)
    assert all(len(s) == 1 for s in starts.values())
    assert len(set.union(*starts.values())) > 1


def test_samples_of_a_prompt_start_from_different_noise_and_rounds_differ() -> None:
    cfg = toy.config()
    model = toy.ToyModel()
    state = toy.state(model, cfg)
    first = collect(toy.world(model), toy.walk(cfg), cfg, state, Dist(), Clock())
    state.step = 1
    second = collect(toy.world(model), toy.walk(cfg), cfg, state, Dist(), Clock())
    ends = torch.cat([c.kept.x0 for c in (*first, *second)]).flatten(1)
    assert len(ends.unique(dim=0)) == len(ends)


def test_a_rollout_does_not_depend_on_how_the_round_is_cut() -> None:
    ends = []
    for micro in (1, 5, 16):
        cfg = toy.config(optim__micro=micro)
        model = toy.ToyModel()
        chunks = collect(toy.world(model), toy.walk(cfg), cfg, toy.state(model, cfg), Dist(), Clock())
        ends.append(torch.cat([c.kept.x0 for c in chunks]))
    # the same float32 network in other batch shapes, five steps
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-4, atol=1e-5)


def by_prompt(*flat: int):
    """Brightness, but the prompts in `flat` score the same whatever is drawn."""

    def score(media, prompts):
        values = toy.brightness(media, prompts)
        return torch.where(torch.tensor([p.index in flat for p in prompts]), torch.tensor(0.5), values)

    return score


def test_groups_without_spread_are_dropped_counted_and_refilled() -> None:
    plain = toy.run(toy.config(steps=1), by_prompt(0, 1, 2, 3, 4, 5, 6, 7))
    assert plain.rows[0]["frac_reward_zero_std"] == 1.0
    assert plain.rows[0]["skipped_updates"] == 2
    assert difference(plain, type("", (), {"model": toy.ToyModel()})) == 0  # nothing was learned from nothing
    cfg = toy.config(policy__refill=3, rollout__groups=4)
    model = toy.ToyModel()
    flat = by_prompt(0, 1, 2)
    chunks = collect(toy.world(model, flat), toy.walk(cfg), cfg, toy.state(model, cfg), Dist(), Clock())
    alive = {g for c in chunks for g, a in zip(c.group, c.alive, strict=True) if a}
    assert len(alive) == 4
    slots = [sum(1 for c in chunks if c.update == u and any(c.alive)) for u in (0, 1)]
    assert slots == [2, 2]  # the refilled groups stand in the optimizer step of those they replace


def test_a_sample_without_a_score_leaves_its_group_and_the_gradient() -> None:
    def lost(media, prompts):
        values = toy.brightness(media, prompts)
        values[0] = math.nan
        return values

    cfg = toy.config(max_failed=0.5, steps=1)
    result = toy.run(cfg, lost)
    assert result.rows[0]["frac_failed"] == 0.25
    assert torch.isfinite(toy.weights_of(result)).all()
    model = toy.ToyModel()
    chunks = collect(toy.world(model, lost), toy.walk(cfg), cfg, toy.state(model, cfg), Dist(), Clock())
    assert [c.alive for c in chunks] == [[False, True, True, True]] * 4
    assert all(abs(c.advantage[1:].sum().item()) < 1e-5 for c in chunks)


def test_too_many_pictures_without_a_score_stop_the_run() -> None:
    def lost(media, prompts):
        return torch.full((len(prompts),), math.nan)

    with pytest.raises(UserError, match="round 1: 16 of 16 pictures could not be scored"):
        toy.run(toy.config(), lost)


def test_a_reward_error_reaches_the_caller() -> None:
    def submit(media, prompts):
        future: Future = Future()
        future.set_exception(UserError("the scorer is gone"))
        return future

    cfg = toy.config()
    model = toy.ToyModel()
    world = toy.world(model)
    object.__setattr__(world, "submit", submit)
    with pytest.raises(UserError, match="the scorer is gone"):
        next(train(world, toy.walk(cfg), cfg, toy.state(model, cfg), Dist()))


@pytest.mark.parametrize("kind", ["path", "exact", "velocity"])
def test_the_distance_to_the_reference_pulls_the_policy_back(kind: str) -> None:
    def distance(kl: float) -> float:
        cfg = toy.config(steps=6, policy__kl=kl, policy__kl_kind=kind, optim__lr=3e-3)
        model, base = toy.ToyModel(), toy.ToyModel()
        state = toy.state(model, cfg)

        @contextmanager
        def reference():
            kept, model.net = model.net, base.net
            try:
                yield
            finally:
                model.net = kept

        world = toy.world(model)
        object.__setattr__(world, "reference", reference)
        rows = list(train(world, toy.walk(cfg), cfg, state, Dist()))
        assert rows[-1]["kl"] > 0
        moved = [a - b for a, b in zip(model.net.parameters(), base.net.parameters(), strict=True)]
        return torch.cat([m.flatten() for m in moved]).norm().item()

    assert distance(1000.0) < 0.9 * distance(1e-6)


def test_inner_epochs_reuse_the_round_and_leave_the_ratio_of_the_second_free() -> None:
    once, twice = toy.run(toy.config(steps=1)), toy.run(toy.config(steps=1, policy__epochs=2))
    assert once.state.updates == 2
    assert twice.state.updates == 4
    assert twice.rows[0]["approx_kl"] > once.rows[0]["approx_kl"]
    assert twice.rows[0]["ratio_first"] == 1.0


def test_the_warm_up_raises_the_rate_over_optimizer_steps() -> None:
    cfg = toy.config(steps=2, optim__warmup=4, optim__lr=0.1)
    model = toy.ToyModel()
    state = toy.state(model, cfg)
    rounds = train(toy.world(model), toy.walk(cfg), cfg, state, Dist())
    rates = [state.optimizer.param_groups[0]["lr"] for _ in rounds]
    assert rates == pytest.approx([0.05, 0.1])


@pytest.mark.parametrize(
    ("decay", "wanted"), [("linear", [0.1, 0.06, 0.02]), ("cosine", [0.1, 0.06545, 0.00955])]
)
def test_the_rate_falls_to_nothing_at_the_end_of_the_run(decay: str, wanted: list[float]) -> None:
    cfg = toy.config(steps=3, optim__warmup=1, optim__lr=0.1, optim__decay=decay)
    model = toy.ToyModel()
    state = toy.state(model, cfg)
    rounds = train(toy.world(model), toy.walk(cfg), cfg, state, Dist())
    rates = [state.optimizer.param_groups[0]["lr"] for _ in rounds]
    assert rates == pytest.approx(wanted, abs=1e-4)


def test_running_history_compares_with_earlier_rounds_of_the_prompt() -> None:
    epoch, run = toy.run(toy.config(policy__history="epoch")), toy.run(toy.config(policy__history="run"))
    assert len(run.state.history.moments) > 0
    assert len(epoch.state.history.moments) == 0
    assert difference(epoch, run) > 0


def test_a_run_resumed_from_a_checkpoint_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    cfg = toy.config(steps=4, policy__history="run", optim__warmup=6, ema__interval=2)
    whole = toy.run(cfg)
    model = toy.ToyModel()
    state = toy.state(model, cfg)
    rows = train(toy.world(model), toy.walk(cfg), cfg, state, Dist())
    next(rows), next(rows)
    state.save(tmp_path)
    other = toy.ToyModel(seed=5)
    resumed = toy.state(other, cfg)
    resumed.load(tmp_path)
    assert resumed.step == 2
    list(train(toy.world(other), toy.walk(cfg), cfg, resumed, Dist()))
    for name, p in whole.state.params.items():
        assert torch.equal(p, resumed.params[name])
    for name, value in whole.state.ema.state().items():
        assert torch.equal(value, resumed.ema.state()[name])
    assert whole.state.history == resumed.history


@pytest.mark.parametrize("left", [0, 100])
def test_a_checkpoint_that_lost_a_file_or_half_of_it_is_refused(tmp_path: Path, left: int) -> None:
    cfg = toy.config()
    model = toy.ToyModel()
    state = toy.state(model, cfg)
    next(train(toy.world(model), toy.walk(cfg), cfg, state, Dist()))
    state.save(tmp_path)
    moments = tmp_path / "optimizer.safetensors"
    if left:
        moments.write_bytes(moments.read_bytes()[:-left])
    else:
        moments.unlink()
    with pytest.raises(UserError, match="is not a whole checkpoint"):
        toy.state(model, cfg).load(tmp_path)


def test_the_floor_is_what_the_batch_shape_moves() -> None:
    cfg = toy.config()
    model = toy.ToyModel()
    floor = logp_floor(toy.world(model), toy.walk(cfg), cfg)
    assert 0 <= floor < 1e-5  # float32: some ulp of a log-probability of order 1

    class Coarse(toy.ToyModel):
        def velocity(self, x, t, cond, guidance=1.0):
            return super().velocity(x, t, cond) + 0.1 * len(x)  # depends on its batch, as no model may

    assert logp_floor(toy.world(Coarse()), toy.walk(cfg), cfg) > 1e-2


def test_a_walk_that_turns_into_nan_leaves_its_group_and_no_gradient() -> None:
    class Sick(toy.ToyModel):
        def velocity(self, x, t, cond, guidance=1.0):
            v = super().velocity(x, t, cond)
            return torch.where(x.flatten(1)[:, :1, None, None] > 1.5, torch.nan, v)  # a few of the starts

    def score(media: Media, prompts: Sequence[Prompt]) -> torch.Tensor:
        return media.pixels.flatten(1).mean(1)  # nan where the picture is

    cfg = toy.config(steps=1, max_failed=0.9)
    model = Sick()
    state = toy.state(model, cfg)
    (row,) = train(toy.world(model, score), toy.walk(cfg), cfg, state, Dist())
    assert 0 < row["frac_failed"] < 0.5
    assert math.isfinite(row["grad_norm"])
    assert all(p.isfinite().all() for p in state.params.values())


def test_what_a_round_measures_does_not_depend_on_its_chunks() -> None:
    def score(media: Media, prompts: Sequence[Prompt]) -> torch.Tensor:
        values = toy.brightness(media, prompts)
        return torch.where(media.pixels[:, 0, 0, 0, 0] > 0.6, torch.nan, values)

    rows = [toy.run(toy.config(steps=1, optim__micro=m, max_failed=0.9), score).rows[0] for m in (1, 3, 8)]
    assert 0 < rows[0]["frac_failed"] < 0.9
    for name in ("loss", "approx_kl", "grad_norm"):
        assert [r[name] for r in rows] == pytest.approx([rows[0][name]] * 3, rel=1e-4, abs=1e-9)


def test_a_checkpoint_before_the_first_update_is_one(tmp_path: Path) -> None:
    cfg = toy.config()
    state = toy.state(toy.ToyModel(), cfg)
    state.save(tmp_path)
    resumed = toy.state(toy.ToyModel(1), cfg)
    resumed.load(tmp_path)
    assert all(torch.equal(p, resumed.params[n]) for n, p in state.params.items())


@pytest.mark.parametrize(("failed", "stops"), [(3, False), (4, True)])
def test_a_round_stops_when_too_many_of_all_its_pictures_have_no_score(failed: int, stops: bool) -> None:
    left = [failed]

    def lost(media, prompts):
        values = toy.brightness(media, prompts)
        for i in range(min(left[0], len(values))):
            values[i] = math.nan
            left[0] -= 1
        return values

    cfg = toy.config(max_failed=0.2, steps=1)  # 16 pictures: 3 are within a fifth, 4 are not
    if not stops:
        assert toy.run(cfg, lost).rows[0]["frac_failed"] == 3 / 16
        return
    with pytest.raises(UserError, match=r"round 1: 4 of 16 pictures .* share of 0.2 .*\(4 x bright: nan\)"):
        toy.run(cfg, lost)


def test_a_global_spread_is_that_of_the_whole_refilled_round() -> None:
    cfg = toy.config(policy__refill=3, policy__std="global", policy__adv_clip=1000.0, rollout__groups=4)
    model = toy.ToyModel()
    world = toy.world(model, by_prompt(0, 1, 2))
    chunks = collect(world, toy.walk(cfg), cfg, toy.state(model, cfg), Dist(), Clock())
    assert len({g for c in chunks for g in c.group}) > 4  # there was a refill
    spread = torch.cat([c.scores["total"] for c in chunks]).double().std(unbiased=False)
    for slot in {g for c in chunks for g, a in zip(c.group, c.alive, strict=True) if a}:
        rows = [(c, n) for c in chunks for n, g in enumerate(c.group) if g == slot]
        reward = torch.stack([c.scores["total"][n] for c, n in rows]).double()
        advantage = torch.stack([c.advantage[n] for c, n in rows]).double()
        expected = (reward - reward.mean()) / (spread + 1e-4)
        torch.testing.assert_close(advantage, expected, rtol=1e-5, atol=1e-6)


def test_round_metrics_are_those_of_the_rewards() -> None:
    chunk = Chunk(0, [0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1])
    chunk.scores = {
        "ocr": torch.tensor([0.0, 1.0, 0.5, 0.5]),
        "total": torch.tensor([0.0, 2.0, 1.0, 1.0]),
    }
    row = round_metrics([chunk], Dist())
    assert row["reward"] == 1.0
    assert row["reward_std"] == 0.5  # the mean of 1 and 0
    assert row["frac_reward_zero_std"] == 0.5
    assert row["rewards/ocr/mean"] == 0.5


def test_the_consistency_law_trains_a_few_step_student() -> None:
    cfg = toy.config(rollout__law="consistency", rollout__steps=4, steps=30)
    rows = toy.run(cfg).rows
    assert rows[0]["ratio_first"] == 1.0
    assert rows[-1]["reward"] > rows[0]["reward"]


def test_a_trajectory_outside_its_window_is_the_plain_ode() -> None:
    cfg = toy.config(rollout__window={"size": 1, "lo": 1, "hi": 2})
    model = toy.ToyModel()
    walk = toy.walk(cfg)
    chunk = Chunk(0, [0, 0], [1, 1], [0, 1])
    kept = trajectories(toy.world(model), walk, chunk, cfg, 0)
    x = kept.states[:, 1]
    with torch.no_grad():
        for j in range(2, walk.steps):
            t, s = walk.grid[j], walk.grid[j + 1]
            x = x + model.velocity(x, t.expand(2), toy.conds([1, 1])) * (s - t)
    torch.testing.assert_close(x, kept.x0, rtol=0, atol=1e-6)
