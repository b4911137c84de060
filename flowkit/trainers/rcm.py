"""rCM: a few-step student by continuous-time consistency and score regularisation (arXiv:2510.08431, Algorithm 1).

Angles and networks are those of TrigFlow (`flow.wrappers`): x = c x0 + s eps, F = dx/dtheta, x0 = c x - s F. The
derivative of the student goes through its unmodified network by forward-mode differentiation (`flowkit.jvp`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowkit.config.distill import DistillConfig
from flowkit.data.prompts import deal
from flowkit.errors import UserError
from flowkit.flow.consistency import (
    DERIVATIVES,
    Tangent,
    dcm_next,
    dcm_tangent,
    dcm_target,
    scm_loss,
    smallest_h,
    tangent,
)
from flowkit.flow.matching import (
    Turns,
    critic_loss,
    dmd_loss,
    renoise,
    simulate,
    simulation_thetas,
)
from flowkit.flow.times import Times
from flowkit.flow.wrappers import Trig, trigflow, x0_of
from flowkit.jvp import derivative
from flowkit.models import Cond
from flowkit.models.roles import Role, Roles
from flowkit.runtime.dist import Dist
from flowkit.runtime.seeds import generator, noise
from flowkit.trainers.meters import Clock, Meter, Row
from flowkit.trainers.state import DistillState

BINS = 4  # of the angle, for the statistics per time


@dataclass(frozen=True)
class World:
    """What an iteration needs of the outside: three networks, latents, conditions, distributions of times."""

    roles: Roles
    rows: int  # latents, or prompts where there are none
    latents: Callable[[Sequence[int]], Tensor]  # rows -> x0 [B, ...] on the model's device
    conds: Callable[[Sequence[int]], Cond]
    latent: tuple[int, ...]
    p_G: Times
    p_D: Times
    guidance: float  # of the teacher
    own_guidance: float  # of student and fake score: 1, or the teacher's where it is an input of the network
    fd_step: float


@dataclass(frozen=True)
class Batch:
    """A part of an iteration's samples: which rows of the data, which slots of the iteration."""

    i: int
    slots: Sequence[int]
    rows: Sequence[int]
    first: bool  # of this process in this iteration


def train(world: World, cfg: DistillConfig, state: DistillState, dist: Dist) -> Iterator[Row]:
    """rCM, arXiv:2510.08431, Algorithm 1: yields one row of metrics per iteration."""
    while state.step < cfg.steps:
        clock, meter, i = Clock(), Meter(), state.step
        loss, start = cfg.stage_at(i)
        turns = Turns(warmup=start if "dmd" in loss else cfg.steps, freq=cfg.dmd.freq)
        side = state.student if turns.student(i) else state.fake
        state.begin(side)
        for batch in batches(world, cfg, i, dist):
            if side is state.student:
                if loss != "dmd":
                    consistency(world, cfg, state, batch, loss, meter)
                if "dmd" in loss:
                    matching(world, cfg, state, batch, meter)
            else:
                critic(world, cfg, state, batch, meter)
        side.reduce(dist)
        meter.add(1, **{"grad_norm" if side is state.student else "grad_norm/fake": side.update()})
        row = meter.means(dist)
        refuse_dropped(row, cfg, i)
        clock.lap("train")
        state.step += 1
        yield {**row, "lr": side.rate.at(side.updates - 1), **clock.row(cfg.batch)}


# --- the losses -------------------------------------------------------------------------------------------


def consistency(
    world: World, cfg: DistillConfig, state: DistillState, batch: Batch, loss: str, meter: Meter
) -> None:
    """Backward pass of sCM (or dCM) on the data: the student's x0 shall not change along the teacher's path."""
    cond = world.conds(batch.rows)
    theta = angles(world.p_G, cfg, batch, "student").to(world.roles.model.device)
    x = renoise(world.latents(batch.rows), drawn(world, cfg, batch, "eps"), theta)
    F = network(world, "student", cond)
    with torch.no_grad():
        F_T = network(world, "teacher", cond)(x, theta)
    if loss == "dcm":
        found, F_minus = discrete(F, cfg, x, theta, F_T)
    else:
        F_minus, J = DERIVATIVES[cfg.scm.fd_type](F, x, theta, F_T, world.fd_step, derivative)
        r = min(1.0, state.student.updates / cfg.scm.warmup) if cfg.scm.warmup else 1.0
        found = tangent(F_minus, F_T, x, theta, J, r, scope=cfg.scm.tangent_warmup_scope)
        if cfg.probe_every and batch.first and batch.i % cfg.probe_every == 0:
            probe(F, world, x, theta, F_T, J, meter)
    # a sample that is not finite leaves the loss; its place is kept by zeros, so that nothing waits for the count
    kept = found.norm.isfinite() & F_minus.flatten(1).isfinite().all(1)
    x, F_minus, g = (only(kept, a) for a in (x, F_minus, found.g))
    with world.roles.wear("student"):
        each = scm_loss(F(x, theta), F_minus, g)
        torch.autograd.backward(cfg.scm.scale * torch.where(kept, each, 0.0).sum() / cfg.batch)
    watch(meter, theta, kept, found.norm, F_minus, F_T, g)
    meter.add(kept.sum(), **{"loss/consistency": each.detach()[kept].mean()})


def discrete(F: Trig, cfg: DistillConfig, x: Tensor, theta: Tensor, F_T: Tensor) -> tuple[Tangent, Tensor]:
    """The tangent of dCM: one step of the teacher, and the frozen student from there."""
    after = dcm_next(theta, cfg.dcm.steps, cfg.dcm.shift)
    with torch.no_grad():
        F_minus = F(x, theta)
    return dcm_tangent(F_minus, x, theta, after, dcm_target(F, x, theta, after, F_T)), F_minus


def matching(world: World, cfg: DistillConfig, state: DistillState, batch: Batch, meter: Meter) -> None:
    """Backward pass of DMD: what the student makes of noise, towards the teacher and away from the fake score."""
    cond = world.conds(batch.rows)
    G = made(world, cfg, state.student.updates, batch, cond)
    theta = angles(world.p_D, cfg, batch, "dmd").to(G.device)
    x = renoise(G.detach(), drawn(world, cfg, batch, "dmd"), theta)
    with torch.no_grad():
        fake, teacher = (
            x0_of(x, theta, network(world, role, cond)(x, theta)) for role in ("fake", "teacher")
        )
    found = dmd_loss(G, fake, teacher)
    kept = found.loss.isfinite()
    with world.roles.wear("student"):
        torch.autograd.backward(cfg.dmd.scale * torch.where(kept, found.loss, 0.0).sum() / cfg.batch)
    meter.add(len(kept), frac_dropped=(~kept).double().mean())
    meter.add(
        kept.sum(), **{"loss/dmd": found.loss.detach()[kept].mean(), "dmd_weight": found.weight[kept].mean()}
    )


def critic(world: World, cfg: DistillConfig, state: DistillState, batch: Batch, meter: Meter) -> None:
    """Backward pass of the fake score: it denoises what the student makes."""
    cond = world.conds(batch.rows)
    with torch.no_grad():
        G = made(world, cfg, state.fake.updates, batch, cond)
    theta = angles(world.p_D, cfg, batch, "critic").to(G.device)
    kept = G.flatten(1).isfinite().all(1)
    G = only(kept, G)
    x = renoise(G, drawn(world, cfg, batch, "critic"), theta)
    with world.roles.wear("fake"):
        each = critic_loss(G, x0_of(x, theta, network(world, "fake", cond)(x, theta)), theta)
        torch.autograd.backward(torch.where(kept, each, 0.0).sum() / cfg.batch)
    meter.add(len(kept), frac_dropped=(~kept).double().mean())
    meter.add(kept.sum(), **{"loss/fake": each.detach()[kept].mean()})


def made(world: World, cfg: DistillConfig, turn: int, batch: Batch, cond: Cond) -> Tensor:
    """What the student makes of pure noise in 1 to N steps, in turn; the last call alone carries a gradient."""
    steps = 1 + turn % cfg.student.steps
    later = [angles(world.p_D, cfg, batch, f"simulated {k}") for k in range(1, steps)]
    draws = torch.stack(later) if later else torch.empty(0, len(batch.rows), dtype=torch.float64)
    thetas = simulation_thetas(draws).to(world.roles.model.device)
    F = network(world, "student", cond)
    return simulate(F, lambda step: drawn(world, cfg, batch, f"simulated {step}"), thetas).G


def only(kept: Tensor, a: Tensor) -> Tensor:
    """The samples [B, ...] that are kept [B], and zeros for the others."""
    return torch.where(kept.view(-1, *[1] * (a.ndim - 1)), a, 0.0)


# --- networks, times, noise -------------------------------------------------------------------------------


def network(world: World, role: Role, cond: Cond) -> Trig:
    """F(x, theta) of one of the three networks, the teacher with its guidance."""
    guidance = world.guidance if role == "teacher" else world.own_guidance

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        with world.roles.wear(role) as model:
            return model.velocity(x, t, cond, guidance)

    return trigflow(velocity)


def batches(world: World, cfg: DistillConfig, i: int, dist: Dist) -> Iterator[Batch]:
    """The share of this process in iteration i, at most `optim.micro` samples at a time."""
    rows = deal(world.rows, cfg.batch, i, cfg.seed)
    mine = range(dist.rank, cfg.batch, dist.world)
    for start in range(0, len(mine), cfg.optim.micro):
        slots = mine[start : start + cfg.optim.micro]
        yield Batch(i, slots, [rows[slot] for slot in slots], first=start == 0)


def angles(times: Times, cfg: DistillConfig, batch: Batch, what: str) -> Tensor:
    """Angles [B] float64 of these slots, stratified over the whole iteration's batch."""
    whole = times.sample(cfg.batch, generator(cfg.seed, "theta", batch.i, what), stratified=True)
    return whole[list(batch.slots)]


def drawn(world: World, cfg: DistillConfig, batch: Batch, what: str) -> Tensor:
    """Standard noise [B, ...], from the addresses of the slots."""
    each = [noise(world.latent, cfg.seed, "distill", batch.i, slot, what) for slot in batch.slots]
    return torch.stack(each).to(world.roles.model.device, non_blocking=True)


# --- health -----------------------------------------------------------------------------------------------


@torch.no_grad()
def watch(
    meter: Meter, theta: Tensor, kept: Tensor, norm: Tensor, F_minus: Tensor, F_T: Tensor, g: Tensor
) -> None:
    """Book |g|, cos(g, F_T - F) and the share of dropped samples, the first two per quarter of the angle, too.

    A cosine near 1 says that the teacher's own velocity is what is learnt; one near 0, the derivative.
    """
    pull = (F_T - F_minus).flatten(1).double()
    cosine = torch.nn.functional.cosine_similarity(g.flatten(1).double(), pull, dim=1)
    quarter = (theta / (torch.pi / 2) * BINS).long().clamp(0, BINS - 1)
    meter.add(len(kept), frac_dropped=(~kept).double().mean())
    for name, values in (("g_norm", norm), ("cos_g", cosine)):
        good = kept & values.isfinite()
        meter.add(good.sum(), **{name: values[good].mean()})
        for k in range(BINS):
            here = good & (quarter == k)
            meter.add(here.sum(), **{f"{name}/theta_{k + 1}_of_{BINS}": values[here].mean()})


@torch.no_grad()
def probe(F: Trig, world: World, x: Tensor, theta: Tensor, F_T: Tensor, J: Tensor, meter: Meter) -> None:
    """Book how far J is from a finite difference of the same network: large where one of the two is wrong."""
    h = max(world.fd_step, smallest_h(torch.float32))
    _, apart = DERIVATIVES[2](F, x, theta, F_T, h, derivative)
    error = (J - apart).double().norm() / apart.double().norm()
    meter.add(1, **{"probe/J_error": error})


def refuse_dropped(row: Row, cfg: DistillConfig, i: int) -> None:
    """Stop where too many samples of an iteration were not finite."""
    lost = row.get("frac_dropped", 0.0)
    if lost > cfg.max_dropped:
        raise UserError(
            f"iteration {i + 1}: {lost:.0%} of the samples were not finite, more than max_dropped="
            f"{cfg.max_dropped:.0%}; the last checkpoint is kept: lower optim.lr, or look at the latents"
        )
