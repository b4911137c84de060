"""A student, a teacher and a fake score of a few numbers, behind the real seams of distillation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowkit.config.distill import DistillConfig
from flowkit.flow.ema import power_beta, power_gamma
from flowkit.flow.times import LogNormal
from flowkit.models.roles import Roles
from flowkit.runtime.dist import Dist
from flowkit.trainers.rcm import World, train
from flowkit.trainers.state import DistillState, LearningRate, TrainState, Weights
from tests.trainers.toy import LATENT, ToyModel, conds

ROWS = 12


def config(**changes: Any) -> DistillConfig:
    """A small config; `scm__fd_type=1` sets a nested key."""
    data: dict[str, Any] = {
        "algorithm": "distill",
        "model": "toy",
        "steps": 6,
        "out": "unused",
        "size": "16x16",
        "dtype": "float32",
        "train": "full",
        "networks": "three",
        "batch": 8,
        "data": {"kind": "shards", "path": "unused"},
        "teacher": {"guidance": 1.0},
        "stages": {"scm+dmd": 60},
        "scm": {"warmup": 4},
        "dmd": {"freq": 2, "scale": 0.5},
        "optim": {"lr": 1e-2, "critic_lr": 1e-2, "micro": 8, "warmup": 0, "eps": 1e-6},
        "max_dropped": 0.5,
        "probe_every": 1,
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        block = data
        for name in parents:
            block = block.setdefault(name, {})
        block[last] = value
    return DistillConfig.model_validate(data)


def latents(rows: Sequence[int]) -> Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, *LATENT, generator=g)[list(rows)]


def frozen(model: Any) -> None:
    model.net.requires_grad_(True)


def world(cfg: DistillConfig, data: Any = latents, seed: int = 0) -> World:
    model: Any = ToyModel(seed)
    model.net.requires_grad_(False)
    return World(
        roles=Roles.three(model, frozen),
        rows=ROWS,
        latents=data,
        conds=conds,
        latent=LATENT,
        p_G=LogNormal(-0.8, 1.6),
        p_D=LogNormal(0.0, 1.6),
        guidance=1.0,
        own_guidance=1.0,
        fd_step=cfg.scm.fd_step or 1e-3,
    )


def side(params: dict[str, nn.Parameter], cfg: DistillConfig, average: bool) -> TrainState:
    def write(folder: Path, weights: str, step: int) -> None:
        save_file({n: p.detach().clone() for n, p in params.items()}, folder / "weights.safetensors")

    def read(folder: Path) -> None:
        with torch.no_grad():
            for name, value in load_file(folder / "weights.safetensors").items():
                params[name].copy_(value)

    o = cfg.optim
    return TrainState.new(
        Weights(params, write, read),
        rate=LearningRate(o.lr, o.warmup),
        betas=o.betas,
        eps=o.eps,
        weight_decay=o.weight_decay,
        grad_clip=o.grad_clip,
        ema_decay=partial(power_beta, gamma=power_gamma(cfg.ema.width)) if average else None,
    )


def state(roles: Roles, cfg: DistillConfig) -> DistillState:
    student, fake = (side(roles.trainable(role), cfg, role == "student") for role in ("student", "fake"))  # type: ignore[arg-type]
    return DistillState(student, fake, cfg.optim.offload)


def run(cfg: DistillConfig, data: Any = latents, dist: Dist | None = None) -> Any:
    """Train the toy to the end: its rows, state and world."""
    w = world(cfg, data)
    carried = state(w.roles, cfg)
    rows = list(train(w, cfg, carried, dist or Dist()))
    return SimpleNamespace(rows=rows, state=carried, world=w)


def weights(result: Any, role: str = "student") -> Tensor:
    return torch.cat([p.detach().flatten() for p in result.world.roles.models[role].net.parameters()])
