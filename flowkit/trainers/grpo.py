"""Flow-GRPO: online policy-gradient training of a flow model (arXiv:2505.05470, Algorithm 1).

A round is a list of chunks (`trainers/rounds.py`), each rolled out, judged and trained on as one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from flowkit.config.schema import GrpoConfig
from flowkit.data.prompts import pick
from flowkit.errors import UserError
from flowkit.flow.policy import (
    KLS,
    Move,
    RunningStats,
    approx_kl,
    clip_stats,
    group_advantage,
    surrogate,
)
from flowkit.flow.windows import window_start
from flowkit.models import Cond, FlowModel
from flowkit.rewards import total
from flowkit.rewards.pool import reasons_of, refuse_failed
from flowkit.rollout import Replay, Trajectories, Walk, replay, walk_out
from flowkit.runtime.dist import Dist
from flowkit.runtime.seeds import generator, noise
from flowkit.trainers.meters import Clock, Meter, Row
from flowkit.trainers.rounds import Chunk, dead_slots, len_of, round_metrics, split
from flowkit.trainers.state import TrainState
from flowkit.types import Media, Prompt, Scores

Submit = Callable[[Media, Sequence[Prompt]], "Future[dict[str, Scores]]"]


@dataclass(frozen=True)
class World:
    """What a round needs of the outside: the model, its conditions, the prompts and their judge."""

    model: FlowModel
    conds: Callable[[Sequence[int]], Cond]  # prompt indices -> conditions on the model's device
    prompts: Sequence[Prompt]
    submit: Submit
    reference: Callable[[], AbstractContextManager[None]]
    latent: tuple[int, ...]  # shape of one latent


def train(world: World, walk: Walk, cfg: GrpoConfig, state: TrainState, dist: Dist) -> Iterator[Row]:
    """Flow-GRPO, arXiv:2505.05470, Algorithm 1: yields one row of metrics per round."""
    while state.step < cfg.steps:
        clock = Clock()
        chunks = collect(world, walk, cfg, state, dist, clock)
        row = Meter()
        for _, u in itertools.product(range(cfg.policy.epochs), range(cfg.policy.updates)):
            improve(world, walk, [c for c in chunks if c.update == u], cfg, state, dist, row)
        means = row.means(dist)  # waits for the device, so it belongs to the training
        means |= {"ratio_first": row.first_ratio(dist), "skipped_updates": float(row.skipped)}
        clock.lap("train")
        state.step += 1
        about = {"lr": state.rate.at(max(state.updates - 1, 0)), **clock.row(len_of(chunks, dist))}
        yield {**means, **round_metrics(chunks, dist), **about}


# --- a round of rollouts --------------------------------------------------------------------------


def collect(
    world: World, walk: Walk, cfg: GrpoConfig, state: TrainState, dist: Dist, clock: Clock
) -> list[Chunk]:
    """Roll out a round on this process, score it meanwhile, and give every trajectory its advantage.

    Groups without spread are dropped and drawn anew, `policy.refill` times at most; the new ones take the
    places of the dropped in their optimizer steps.
    """
    chunks: list[Chunk] = []
    history = state.history  # of the rounds before this one
    r, p = cfg.rollout, cfg.policy
    open_slots = [g * p.updates // r.groups for g in range(r.groups)]  # slot -> optimizer step
    for attempt in range(p.refill + 1):
        base = attempt * r.groups
        drawn = pick(len(world.prompts), len(open_slots), state.step, address(cfg, attempt))
        fresh = split(open_slots, drawn, base, r.samples, cfg.optim.micro)
        mine = fresh[dist.rank :: dist.world]
        for chunk in mine:
            roll(world, walk, chunk, cfg, state.step)
        clock.lap("rollout")
        wait(mine, cfg, dist)
        chunks += mine
        state.history = credit(chunks, history, cfg, state.step, dist)
        clock.lap("reward")
        dead = dead_slots(mine, dist)
        if not dead:
            break
        open_slots = [open_slots[g - base] for g in sorted(dead)]
    return chunks


def address(cfg: GrpoConfig, attempt: int) -> int:
    """Seed of the prompt order: refills go through the file in an order of their own."""
    return cfg.seed if attempt == 0 else cfg.seed + 1_000_003 * attempt


def roll(world: World, walk: Walk, chunk: Chunk, cfg: GrpoConfig, epoch: int) -> None:
    """Roll out one chunk and hand its pictures to the judge, which scores while the next chunk rolls."""
    chunk.kept = trajectories(world, walk, chunk, cfg, epoch)
    media = world.model.decode(chunk.kept.x0)
    chunk.future = world.submit(media, [world.prompts[i] for i in chunk.prompt])


def trajectories(world: World, walk: Walk, chunk: Chunk, cfg: GrpoConfig, epoch: int) -> Trajectories:
    """Walk the trajectories of a chunk, from the noise of their addresses."""
    device, w = world.model.device, cfg.rollout.window

    def drawn(*what: int | str) -> Tensor:
        rows = zip(chunk.group, chunk.prompt, chunk.sample, strict=True)
        each = [noise(world.latent, cfg.seed, "rollout", epoch, g, i, k, *what) for g, i, k in rows]
        return torch.stack(each).to(device, non_blocking=True)

    starts = [
        window_start(generator(cfg.seed, "window", epoch, g), w.size, w.lo, w.hi) if w else 0
        for g in chunk.group
    ]
    return walk_out(
        policy(world, chunk, cfg),
        drawn("start") * walk.grid[0],
        walk,
        starts,
        lambda step: drawn("step", step),
    )


def policy(world: World, chunk: Chunk, cfg: GrpoConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The model as a velocity of (x, t), conditioned on the chunk's prompts."""
    cond = world.conds(chunk.prompt)
    return lambda x, t: world.model.velocity(x, t, cond, cfg.rollout.guidance)


def wait(mine: Sequence[Chunk], cfg: GrpoConfig, dist: Dist) -> None:
    """Wait for the scores of these chunks."""
    failed: UserError | None = None
    for chunk in mine:
        if chunk.future is None:
            raise AssertionError("a chunk was never rolled out")
        try:
            scores = chunk.future.result()
        except UserError as error:
            failed = error
            break
        chunk.scores = {name: s.values for name, s in scores.items()}
        chunk.scores["total"] = total(scores, cfg.reward)
        chunk.reasons = reasons_of(scores)
        chunk.future = None
        if chunk.kept:
            silence(chunk.kept)
    dist.all_or_none(failed)  # or the other processes would wait for this one's scores


def credit(
    chunks: Sequence[Chunk], history: RunningStats, cfg: GrpoConfig, step: int, dist: Dist
) -> RunningStats:
    """Turn the scores of a round so far, of all processes, into advantages, which land in the chunks.

    A refilled round is credited as a whole, so that `std: global` is the spread of all its rewards.

    Returns:
        The statistics per prompt with this round taken in (the same where `history: epoch` needs none).
    """
    rows = dist.gather_objects(
        [(c.group, c.prompt, c.sample, c.scores["total"].tolist(), c.reasons) for c in chunks]
    )
    everywhere = list(itertools.chain.from_iterable(rows))
    flat = sorted(  # one order on every process count
        (g, k, i, value)
        for group, prompt, sample, values, _ in everywhere
        for g, i, k, value in zip(group, prompt, sample, values, strict=True)
    )
    rewards = torch.tensor([value for *_, value in flat])
    reasons = sum((why for *_, why in everywhere), Counter[str]())
    lost = int(rewards.isnan().sum())
    refuse_failed(f"round {step + 1}", lost, len(rewards), cfg.max_failed, reasons)
    key = 2 if cfg.policy.history == "run" else 0
    advantages = group_advantage(
        rewards,
        torch.tensor([entry[key] for entry in flat]),
        std=cfg.policy.std,
        clip=cfg.policy.adv_clip,
        history=history if cfg.policy.history == "run" else None,
    )
    found = {(g, k): n for n, (g, k, *_) in enumerate(flat)}
    for chunk in chunks:
        index = [found[at] for at in zip(chunk.group, chunk.sample, strict=True)]
        device = chunk.kept.x0.device if chunk.kept else "cpu"
        chunk.advantage = advantages.values[index].to(device)
        chunk.alive = advantages.used[index].tolist()
        chunk.rows = torch.tensor(
            [n for n, a in enumerate(chunk.alive) if a], dtype=torch.int64, device=device
        )
    return history if advantages.history is None else advantages.history


def silence(kept: Trajectories) -> None:
    """Replace walks that hold nan by zeros: their loss is left out, but 0 x nan would be nan in every gradient."""
    bad = ~kept.states.isfinite().flatten(1).all(1)  # [B]
    kept.states.masked_fill_(bad.view(-1, *[1] * (kept.states.ndim - 1)), 0.0)
    kept.logp.masked_fill_(bad[:, None], 0.0)


# --- an optimizer step ----------------------------------------------------------------------------


def improve(
    world: World,
    walk: Walk,
    batch: Sequence[Chunk],
    cfg: GrpoConfig,
    state: TrainState,
    dist: Dist,
    meter: Meter,
) -> None:
    """One optimizer step on the mean loss of all living transitions of all processes."""
    batch = [c for c in batch if any(c.alive)]
    count = sum(sum(c.alive) for c in batch) * walk.length
    everywhere = sum(dist.gather_objects(count))
    if everywhere == 0:
        meter.skipped += 1
        return
    for chunk, k in itertools.product(batch, range(walk.length)):
        torch.autograd.backward(transition_loss(world, walk, chunk, k, cfg, meter) / everywhere)
    state.reduce(dist)
    meter.add(1, grad_norm=state.update())
    meter.updates += 1


def transition_loss(world: World, walk: Walk, chunk: Chunk, k: int, cfg: GrpoConfig, meter: Meter) -> Tensor:
    """Sum over the living rows of the clipped surrogate and the distance to the reference, at noisy step k."""
    if chunk.kept is None or chunk.rows is None or chunk.advantage is None:
        raise AssertionError("a chunk must be rolled out and judged before it is trained on")
    velocity = policy(world, chunk, cfg)
    now = replay(velocity, chunk.kept, k, walk)
    old, rows = chunk.kept.logp[:, k], chunk.rows
    loss = surrogate(now.logp, old, chunk.advantage, cfg.policy.clip)
    if cfg.policy.kl > 0:
        with torch.no_grad(), world.reference():
            before = replay(velocity, chunk.kept, k, walk)
        kl = KLS[cfg.policy.kl_kind](move(now, walk), move(before, walk))
        loss = loss + cfg.policy.kl * kl
        meter.add(sum(chunk.alive), kl=kl.detach()[rows].mean())
    new, old, advantage = now.logp.detach()[rows], old[rows], chunk.advantage[rows]
    clipped = clip_stats(new, old, advantage, cfg.policy.clip)
    if meter.updates == 0:
        meter.worst((new - old).exp())
    meter.add(
        sum(chunk.alive),
        loss=loss.detach()[rows].mean(),
        approx_kl=approx_kl(new, old),
        **{"clip_ratio/low_mean": clipped.low, "clip_ratio/high_mean": clipped.high},
    )
    return loss[rows].sum()


def move(seen: Replay, walk: Walk) -> Move:
    """A replayed step in the terms of the three distances."""
    return Move(seen.velocity, seen.mean, seen.std, walk.rate(seen.std, seen.step))


@torch.no_grad()
def logp_floor(world: World, walk: Walk, cfg: GrpoConfig) -> float:
    """How far a log-probability moves when the same steps are seen in other batch shapes.

    The largest difference over the steps of one chunk, seen whole and one by one. Ratios start at exactly 1
    all the same, since a chunk is replayed in the shape of its rollout; but a clip range below this
    figure clips arithmetic, not policy.
    """
    count = min(cfg.optim.micro, cfg.rollout.samples)
    chunk = Chunk(0, [0] * count, [0] * count, list(range(count)))
    walked = trajectories(world, walk, chunk, cfg, 0)
    worst = 0.0
    for k in range(walk.length):
        for b in range(count):
            one = Trajectories(
                walked.x0[b : b + 1],
                walked.states[b : b + 1],
                walked.first[b : b + 1],
                walked.logp[b : b + 1],
            )
            alone = replay(policy(world, Chunk(0, [0], [0], [b]), cfg), one, k, walk)
            worst = max(worst, (alone.logp - walked.logp[b, k]).abs().item())
    return worst
