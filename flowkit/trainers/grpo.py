"""Flow-GRPO: online policy-gradient training of a flow model (arXiv:2505.05470, Algorithm 1).

A round is a list of chunks. A chunk is a batch of trajectories that is rolled out, replayed and summed as
one, so a replay has the shapes of its rollout and the ratio starts at exactly 1. Which samples belong to
one optimizer step is decided by groups alone: chunk size and process count never change the gradient.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowkit.config.schema import GrpoConfig
from flowkit.data.prompts import pick
from flowkit.errors import UserError
from flowkit.flow.policy import KLS, Move, approx_kl, clip_stats, group_advantage, surrogate
from flowkit.flow.windows import window_start
from flowkit.models import Cond, FlowModel
from flowkit.rewards import total
from flowkit.rollout import Replay, Trajectories, Walk, replay, walk_out
from flowkit.runtime.dist import Dist
from flowkit.runtime.seeds import generator, noise
from flowkit.trainers.meters import Clock, Meter, Row, mean
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


@dataclass
class Chunk:
    """A batch of trajectories: rows of whole or part groups, in one optimizer step."""

    update: int
    group: list[int]  # [B] slot of the round, one per prompt draw
    prompt: list[int]  # [B]
    sample: list[int]  # [B] member of its group
    kept: Trajectories | None = None
    future: Future[dict[str, Scores]] | None = None
    advantage: Tensor | None = None  # [B] on the model's device
    alive: list[bool] = field(default_factory=list)  # [B]
    rows: Tensor | None = (
        None  # int64: the living of them, on the model's device, so that picking them never waits
    )
    scores: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt)


def train(world: World, walk: Walk, cfg: GrpoConfig, state: TrainState, dist: Dist) -> Iterator[Row]:
    """Flow-GRPO, arXiv:2505.05470, Algorithm 1: yields one row of metrics per round."""
    while state.step < cfg.steps:
        clock = Clock()
        chunks = collect(world, walk, cfg, state, dist, clock)
        row = Meter()
        for _, u in itertools.product(range(cfg.policy.epochs), range(cfg.policy.updates)):
            improve(world, walk, [c for c in chunks if c.update == u], cfg, state, dist, row)
        clock.lap("train")
        state.step += 1
        yield {**row.means(dist), **round_metrics(chunks, cfg, dist), **clock.row(len_of(chunks, dist))}


# --- a round of rollouts --------------------------------------------------------------------------


def collect(
    world: World, walk: Walk, cfg: GrpoConfig, state: TrainState, dist: Dist, clock: Clock
) -> list[Chunk]:
    """Roll out a round on this process, score it meanwhile, and give every trajectory its advantage.

    Groups without spread are dropped and drawn anew, `policy.refill` times at most; the new ones take the
    places of the dropped in their optimizer steps.
    """
    chunks: list[Chunk] = []
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
        judge(mine, cfg, state, dist)
        clock.lap("reward")
        chunks += mine
        dead = dead_slots(mine, dist)
        if not dead:
            break
        open_slots = [open_slots[g - base] for g in sorted(dead)]
    return chunks


def address(cfg: GrpoConfig, attempt: int) -> int:
    """Seed of the prompt order: refills go through the file in an order of their own."""
    return cfg.seed if attempt == 0 else cfg.seed + 1_000_003 * attempt


def split(updates: Sequence[int], drawn: Sequence[int], base: int, samples: int, micro: int) -> list[Chunk]:
    """Cut the groups of each optimizer step into chunks of at most `micro` trajectories.

    >>> [(c.update, c.group, c.sample) for c in split([0, 1], [7, 9], 0, 3, 2)]
    [(0, [0, 0], [0, 1]), (0, [0], [2]), (1, [1, 1], [0, 1]), (1, [1], [2])]
    """
    chunks = []
    for update in sorted(set(updates)):
        rows = [
            (base + g, prompt, k)
            for g, (u, prompt) in enumerate(zip(updates, drawn, strict=True))
            if u == update
            for k in range(samples)
        ]
        for i in range(0, len(rows), micro):
            group, prompt, sample = zip(*rows[i : i + micro], strict=True)
            chunks.append(Chunk(update, list(group), list(prompt), list(sample)))
    return chunks


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


def judge(mine: Sequence[Chunk], cfg: GrpoConfig, state: TrainState, dist: Dist) -> None:
    """Wait for the scores, and turn those of all processes into advantages; both land in the chunks."""
    for chunk in mine:
        if chunk.future is None:
            raise AssertionError("a chunk was never rolled out")
        scores = chunk.future.result()
        chunk.scores = {name: s.values for name, s in scores.items()}
        chunk.scores["total"] = total(scores, cfg.reward)
        chunk.future = None
    rows = dist.gather_objects([(c.group, c.prompt, c.sample, c.scores["total"].tolist()) for c in mine])
    flat = sorted(  # one order on every process count
        (g, k, i, value)
        for chunk in itertools.chain.from_iterable(rows)
        for g, i, k, value in zip(*chunk, strict=True)
    )
    rewards = torch.tensor([value for *_, value in flat])
    lost = 1 - rewards.isfinite().float().mean().item()
    if lost > cfg.max_failed:
        raise UserError(
            f"{lost:.0%} of the pictures of round {state.step + 1} could not be scored, more than "
            f"max_failed={cfg.max_failed:.0%}: look at the reward's own message above, or raise max_failed"
        )
    key = 2 if cfg.policy.history == "run" else 0
    advantages = group_advantage(
        rewards,
        torch.tensor([entry[key] for entry in flat]),
        std=cfg.policy.std,
        clip=cfg.policy.adv_clip,
        history=state.history if cfg.policy.history == "run" else None,
    )
    if advantages.history is not None:
        state.history = advantages.history
    found = {(g, k): n for n, (g, k, *_) in enumerate(flat)}
    for chunk in mine:
        index = [found[at] for at in zip(chunk.group, chunk.sample, strict=True)]
        device = chunk.kept.x0.device if chunk.kept else "cpu"
        chunk.advantage = advantages.values[index].to(device)
        chunk.alive = advantages.used[index].tolist()
        chunk.rows = torch.tensor(
            [n for n, a in enumerate(chunk.alive) if a], dtype=torch.int64, device=device
        )


def dead_slots(mine: Sequence[Chunk], dist: Dist) -> set[int]:
    """Slots in which no trajectory of any process may be trained on."""
    seen: dict[int, bool] = defaultdict(bool)
    own = [(g, a) for c in mine for g, a in zip(c.group, c.alive, strict=True)]
    for g, alive in itertools.chain.from_iterable(dist.gather_objects(own)):
        seen[g] |= alive
    return {g for g, alive in seen.items() if not alive}


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
    for p in state.params.values():
        if p.grad is None:  # a process without a living chunk still takes part in the sum
            p.grad = torch.zeros_like(p)
    dist.all_reduce_sum_([p.grad for p in state.params.values() if p.grad is not None])
    meter.add(grad_norm=state.update())
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
        meter.add(kl=kl.detach()[rows].mean())
    new, old, advantage = now.logp.detach()[rows], old[rows], chunk.advantage[rows]
    clipped = clip_stats(new, old, advantage, cfg.policy.clip)
    if meter.updates == 0:
        meter.worst((new - old).exp())
    meter.add(
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


# --- what a round prints ---------------------------------------------------------------------------


def len_of(chunks: Sequence[Chunk], dist: Dist) -> int:
    """Trajectories of all processes."""
    return sum(dist.gather_objects(sum(len(c) for c in chunks)))


def round_metrics(chunks: Sequence[Chunk], cfg: GrpoConfig, dist: Dist) -> Row:
    """Rewards of the round, over all processes, with TRL's names where they exist."""
    own: dict[str, list[float]] = defaultdict(list)
    for chunk in chunks:
        for name, values in chunk.scores.items():
            own[name] += values.tolist()
    groups = [
        (g, value) for c in chunks for g, value in zip(c.group, c.scores["total"].tolist(), strict=True)
    ]
    rows, members = dist.gather_objects(dict(own)), itertools.chain.from_iterable(dist.gather_objects(groups))
    joined = {
        name: torch.tensor([v for r in rows for v in r.get(name, [])], dtype=torch.float64)
        for name in sorted(set(itertools.chain.from_iterable(rows)))
    }
    by_group: dict[int, list[float]] = defaultdict(list)
    for g, value in members:
        if value == value:
            by_group[g].append(value)
    spread = [torch.tensor(v, dtype=torch.float64).std(unbiased=False).item() for v in by_group.values()]
    flat = [min(v) == max(v) for v in by_group.values()]
    whole = joined.pop("total")
    row = {
        "reward": whole.nanmean().item(),
        "reward_std": mean(spread),
        "frac_reward_zero_std": mean([float(f) for f in flat]),
        "frac_failed": 1 - whole.isfinite().double().mean().item(),
    }
    for name, values in joined.items():
        row[f"rewards/{name}/mean"] = values.nanmean().item()
    return row
