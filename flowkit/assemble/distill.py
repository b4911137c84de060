"""`flowkit distill`: from a resolved config to a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowkit.assemble.common import harmless, inputs, model_of, prepare, weights_of
from flowkit.assemble.judge import Judge
from flowkit.assemble.latents import conditions, data_input, latents_of, make, table_of
from flowkit.assemble.shards import check_shards, in_shards, refuse_missing
from flowkit.config.distill import DistillConfig, TimeConfig
from flowkit.config.load import Resolved, dump
from flowkit.data.prompts import read
from flowkit.errors import UsageError, UserError
from flowkit.flow.consistency import check_h, smallest_h
from flowkit.flow.ema import power_beta, power_gamma
from flowkit.flow.times import Interval, LogNormal, Times, UniformShift
from flowkit.models import DTYPES, FlowModel, checkpoint_activations, sharding
from flowkit.models.files import read_safetensors
from flowkit.models.roles import Roles
from flowkit.rewards.pool import RewardPool
from flowkit.run import drive
from flowkit.runtime import dist as processes
from flowkit.runtime.dist import Dist
from flowkit.runtime.folder import open_folder
from flowkit.runtime.log import Metrics, check
from flowkit.runtime.progress import Progress
from flowkit.trainers.rcm import World, train
from flowkit.trainers.state import DistillState, LearningRate, TrainState, Weights

CRITIC_FILE = "fake.safetensors"


def run(resolved: Resolved[DistillConfig], *, resume: Path | None, fresh: bool, force: bool) -> None:
    """Train to `steps`, from the newest checkpoint of the run folder if there is one; make the data first.

    Raises:
        UserError, UsageError: as their places say; nothing of an earlier checkpoint is lost.
        SystemExit: 130 or 143 after a signal, with a checkpoint saved.
    """
    cfg = resolved.config
    step = fd_step(cfg)
    with ExitStack() as stack:
        dist = stack.enter_context(processes.init(cfg.device))
        dist.on_main(lambda: check(cfg.report_to))
        check_shards(cfg, dist.world)
        prompts = read(cfg.data.prompts) if cfg.data.prompts and cfg.data.kind != "media" else []
        asked = read(cfg.eval.prompts)[: cfg.eval.limit] if cfg.eval.prompts else []
        model = model_of(cfg, str(dist.device))
        pool = None
        if cfg.reward:
            pool = stack.enter_context(RewardPool(cfg.reward, cfg.reward_workers, cfg.reward_batch))
            pool.check(asked)
        opened = stack.enter_context(
            open_folder(
                Path(cfg.out),
                dump(cfg),
                seed=cfg.seed,
                resume=resume,
                fresh=fresh,
                force=force,
                dist=dist,
                harmless=harmless(cfg.optim),
                inputs={**inputs(model, prompts), **data_input(cfg)},
            )
        )
        if cfg.shard:
            refuse_missing(model, cfg)
        data = latents_of(model, cfg, dist, say_made)
        conds = conditions(model, data, prompts, cfg, dist)
        held_out = table_of(model, [p.text for p in asked], cfg, dist) if asked else None
        if cfg.shard:
            sharding.shard(model)
        if cfg.gradient_checkpointing:
            checkpoint_activations(model)
        roles = roles_of(model, cfg)
        own_guidance = cfg.teacher.guidance if model.guidance_embedded else 1.0
        state = state_of(roles, cfg, own_guidance, dist)
        if opened.checkpoint is not None:
            state.load(opened.checkpoint)
        world = World(
            roles=roles,
            rows=len(data) if data is not None else len(prompts),
            latents=(lambda rows: data[rows].to(dist.device)) if data is not None else no_latents,
            conds=conds,
            latent=model.latent_shape(cfg.pixels),
            p_G=times_of(cfg.times.student),
            p_D=times_of(cfg.times.critic),
            guidance=cfg.teacher.guidance,
            own_guidance=own_guidance,
            fd_step=step,
        )
        progress = stack.enter_context(Progress(cfg.steps, start=state.step, main=dist.main))
        metrics = Metrics(opened.folder, cfg.report_to, after=opened.step, enabled=dist.main)
        stack.callback(metrics.close)
        judge = Judge(cfg, world, state, asked, held_out, pool, dist)
        drive(
            train(world, cfg, state, dist),
            state,
            folder=opened.folder,
            steps=cfg.steps,
            checkpoint_every=cfg.checkpoint.every,
            keep=cfg.checkpoint.keep,
            evaluate=judge.evaluate,
            eval_every=cfg.eval.every,
            preview=judge.preview,
            preview_every=cfg.preview.every if asked else 0,
            metrics=metrics,
            progress=progress,
            dist=dist,
            collect=state.collect,
        )


def make_data(resolved: Resolved[DistillConfig]) -> int:
    """`--make-data`: the teacher's latents and nothing else; returns how many there are now.

    Raises:
        UsageError: a config whose data is not made.
    """
    cfg = resolved.config
    if cfg.data.kind != "made":
        raise UsageError(f"--make-data makes data of kind 'made', but data.kind is {cfg.data.kind!r}")
    with processes.init(cfg.device) as dist:
        make(model_of(cfg, str(dist.device)), cfg, dist, say_made)
    return cfg.data.count


def say_made(done: int, of: int) -> None:
    """A line of progress of the data, on stderr."""
    import sys

    print(f"data: {done} of {of} latents", file=sys.stderr, flush=True)  # noqa: T201


def no_latents(rows: Sequence[int]) -> Tensor:
    """What a run of prompts alone is never asked for: the config refuses losses that need latents."""
    raise AssertionError(f"there are no latents, but {len(rows)} were asked for")


# --- the parts --------------------------------------------------------------------------------------------


def fd_step(cfg: DistillConfig) -> float:
    """The step of the finite differences: given, or the smallest that the network's dtype resolves.

    Raises:
        UsageError: a given step below that resolution, with one that would do.
    """
    dtype = DTYPES[cfg.dtype]
    if cfg.scm.fd_step is None:
        return smallest_h(dtype)
    if cfg.scm.fd_type:
        try:
            check_h(cfg.scm.fd_step, dtype)
        except ValueError as error:
            raise UsageError(f"scm.fd_step: {error}") from None
    return cfg.scm.fd_step


def times_of(cfg: TimeConfig) -> Times:
    """The distribution of times that a block describes."""
    times: Times = (
        LogNormal(cfg.mean, cfg.std, cfg.shift) if cfg.name == "log-normal" else UniformShift(cfg.shift)
    )
    return times if (cfg.lo, cfg.hi) == (0.0, 1.0) else Interval(times, cfg.lo, cfg.hi)


def roles_of(model: FlowModel, cfg: DistillConfig) -> Roles:
    """Student, teacher and fake score, the first and the last trainable."""
    if cfg.networks == "three":
        return Roles.three(model, lambda one: prepare(one, cfg), sharding.twin if cfg.shard else None)
    return Roles.one(model, lambda one, adapter: prepare(one, cfg, adapter))


def state_of(roles: Roles, cfg: DistillConfig, own_guidance: float, dist: Dist) -> DistillState:
    """Student and critic before their first step, each with its optimizer."""
    gamma = power_gamma(cfg.ema.width)

    def side(weights: Weights, lr: float, updates: int, average: Callable[[int], float] | None) -> TrainState:
        o = cfg.optim
        return TrainState.new(
            weights,
            rate=LearningRate(lr, o.warmup, o.decay, total=updates),
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            grad_clip=o.grad_clip,
            ema_decay=average,
        )

    info = {
        "kind": "student",
        "trained": {"algorithm": "rcm", "seed": cfg.seed},
        "sampler": sampler_of(cfg, own_guidance),
    }
    student = weights_of(roles.model, cfg, roles.trainable("student"), info)
    fake = plain(roles.trainable("fake"))
    if cfg.shard:
        student = in_shards(student, roles.models["student"].net, lambda: roles.model.net.state_dict(), dist)
        fake = in_shards(fake, roles.models["fake"].net, lambda: fake.params, dist)
    return DistillState(
        student=side(
            student, cfg.optim.lr, sum(n for _, n, _ in cfg.turns), partial(power_beta, gamma=gamma)
        ),
        fake=side(fake, cfg.optim.critic_lr, sum(n for _, _, n in cfg.turns), None),
        offload=cfg.optim.offload,
    )


def plain(params: dict[str, torch.nn.Parameter]) -> Weights:
    """Parameters as they are, for a network that nobody samples from: one file, by name."""

    def write(
        folder: Path, weights: str, step: int, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        found = tensors or {name: p.detach().contiguous().clone() for name, p in params.items()}
        save_file(dict(found), folder / CRITIC_FILE, metadata={"format": "pt"})

    def read_(folder: Path) -> None:
        found, _ = read_safetensors(folder / CRITIC_FILE)
        if found.keys() != params.keys():
            raise UserError(
                f"{folder / CRITIC_FILE} is of another fake score: resume from an older checkpoint"
            )
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(sharding.like(found[name], p))

    return Weights(params, write, read_)


def sampler_of(cfg: DistillConfig, own_guidance: float) -> dict[str, Any]:
    """How the student is sampled, for the header of its weights: all that `flowkit sample --student` needs."""
    return {
        "law": "consistency",
        "steps": cfg.student.steps,
        "guidance": own_guidance,
        "guidance_distilled": True,
        "sigma_max": cfg.student.sigma_max,
        "thetas": list(cfg.student.thetas),
        "schedule": {
            "name": "student",
            "sigma_max": cfg.student.sigma_max,
            "thetas": list(cfg.student.thetas),
        },
        "size": cfg.size,
    }
