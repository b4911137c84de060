"""A round of tiny-ocr (b) over its unavoidable parts, and (c) against the reference's order of work.

    python benchmarks/epoch.py               # prints JSON: two ratios, measured in turns in one run

(b) The unavoidable parts are the rollout's network calls, the forward and backward of the trained steps, and what
OCR cannot hide behind them. OCR runs in its own process; on a machine whose cores are all busy with the network it
is paid for, so the parts are timed as they must run: the calls with OCR of the same pictures beside them.

(c) The reference's order, written plainly here: the prompts encoded anew for every batch, pictures scored one by one
in the training process, nothing overlapped. Same network calls, same pictures, same optimizer steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import torch

from flowkit.assemble.common import model_of, prompt_files
from flowkit.assemble.grpo import trained, walk_of
from flowkit.config.load import resolve
from flowkit.config.presets import find
from flowkit.config.schema import GrpoConfig
from flowkit.flow.policy import group_advantage, surrogate
from flowkit.models.text import encode_all
from flowkit.rewards import load
from flowkit.rewards.pool import RewardPool
from flowkit.rollout import replay
from flowkit.runtime.dist import Dist
from flowkit.trainers.grpo import World, train, trajectories
from flowkit.trainers.rounds import split
from flowkit.trainers.state import LearningRate, TrainState
from flowkit.types import Media

ROUNDS = 5
LIMIT = 1.15


def main() -> None:
    """Rounds of the three kinds in turns."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = resolve(GrpoConfig, find("tiny-ocr"), [f'out="{folder}"', f"steps={10 * ROUNDS}"]).config
        prompts, _ = prompt_files(cfg)
        model = model_of(cfg, "cpu")
        table = encode_all(model, [p.text for p in prompts])
        weights = trained(model, cfg)
        o = cfg.optim
        state = TrainState.new(
            weights, rate=LearningRate(1e-9), betas=o.betas, eps=o.eps, weight_decay=0.0,
            grad_clip=o.grad_clip, ema_decay=cfg.ema.decay, ema_interval=cfg.ema.interval,
        )  # fmt: skip
        with RewardPool(cfg.reward, cfg.reward_workers, cfg.reward_batch) as pool:
            world = World(
                model,
                lambda rows: table[rows],
                prompts,
                pool.submit,
                nullcontext,
                model.latent_shape(cfg.pixels),
            )
            walk = walk_of(model, cfg)
            rounds = train(world, walk, cfg, state, Dist())
            next(rounds)  # the worker loads its models
            times: dict[str, list[float]] = {"round": [], "parts": [], "reference": []}
            for _ in range(ROUNDS):
                begun = time.perf_counter()
                next(rounds)
                times["round"].append(time.perf_counter() - begun)
                times["parts"].append(parts(world, walk, cfg, state))
                times["reference"].append(reference(world, walk, cfg, state))
    ratios = {
        "round_over_unavoidable_parts": [a / b for a, b in zip(times["round"], times["parts"], strict=True)],
        "reference_order_over_round": [
            a / b for a, b in zip(times["reference"], times["round"], strict=True)
        ],
    }
    middle = {name: statistics.median(r) for name, r in ratios.items()}
    print(json.dumps(middle | {"limit": LIMIT, "seconds": times}))
    sys.exit(middle["round_over_unavoidable_parts"] > LIMIT)


def parts(world: World, walk: Any, cfg: GrpoConfig, state: TrainState) -> float:
    """Seconds of the bare network calls of a round, its decoding, and OCR of its pictures beside them."""
    chunks = cut(cfg, state)
    latent = torch.randn(cfg.optim.micro, *world.latent)
    pictures = world.model.decode(latent)
    params = list(state.params.values())
    begun = time.perf_counter()
    waiting = []
    for chunk in chunks:
        cond, size = world.conds(chunk.prompt), len(chunk)
        x, t = latent[:size], walk.grid[1].expand(size)
        with torch.no_grad():
            for _ in range(walk.steps):
                world.model.velocity(x, t, cond, cfg.rollout.guidance)
        world.model.decode(x)
        waiting.append(world.submit(pictures[:size], [world.prompts[i] for i in chunk.prompt]))
    for future in waiting:
        future.result()
    for chunk in chunks:
        cond, size = world.conds(chunk.prompt), len(chunk)
        for _ in range(walk.length):
            v = world.model.velocity(latent[:size], walk.grid[1].expand(size), cond, cfg.rollout.guidance)
            torch.autograd.grad(v.square().mean(), params)
    return time.perf_counter() - begun


def reference(world: World, walk: Any, cfg: GrpoConfig, state: TrainState) -> float:
    """Seconds of the same round in the reference's order."""
    scorer = load("ocr")
    chunks = cut(cfg, state)
    scorer(Media(torch.zeros(1, 1, 3, 32, 96)), [world.prompts[0]])  # load it
    begun = time.perf_counter()
    rewards = []
    for chunk in chunks:
        cond = world.model.encode([world.prompts[i].text for i in chunk.prompt])
        again = World(
            world.model, lambda rows, c=cond: c, world.prompts, world.submit, nullcontext, world.latent
        )
        chunk.kept = trajectories(again, walk, chunk, cfg, state.step)
        media = world.model.decode(chunk.kept.x0)
        for n, i in enumerate(chunk.prompt):
            rewards.append(scorer(media[n : n + 1], [world.prompts[i]]).values[0])
    groups = torch.tensor([g for c in chunks for g in c.group])
    advantages = group_advantage(torch.stack(rewards), groups, clip=cfg.policy.adv_clip).values
    start = 0
    for chunk in chunks:
        a = advantages[start : start + len(chunk)]
        start += len(chunk)
        cond = world.model.encode([world.prompts[i].text for i in chunk.prompt])
        for k in range(walk.length):
            now = replay(
                lambda x, t, c=cond: world.model.velocity(x, t, c, cfg.rollout.guidance), chunk.kept, k, walk
            )
            surrogate(now.logp, chunk.kept.logp[:, k], a, cfg.policy.clip).mean().backward()
        if chunk is chunks[-1]:
            state.update()
    world.model.free_text()
    return time.perf_counter() - begun


def cut(cfg: GrpoConfig, state: TrainState) -> list[Any]:
    """The chunks of a round."""
    r, u = cfg.rollout, cfg.policy.updates
    slots = [g * u // r.groups for g in range(r.groups)]
    return split(slots, list(range(r.groups)), 0, r.samples, cfg.optim.micro)


if __name__ == "__main__":
    main()
