"""A flow model of a few numbers and a reward that can be computed by hand, behind the real seams."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowkit.config.schema import GrpoConfig
from flowkit.flow.schedule import static
from flowkit.models import Cond
from flowkit.rollout import Walk
from flowkit.runtime.dist import Dist
from flowkit.trainers.grpo import World
from flowkit.trainers.state import LearningRate, TrainState, Weights
from flowkit.types import Media, Prompt, Scores

LATENT = (2, 2, 2)
PROMPTS = [Prompt(f"prompt {i}", i) for i in range(8)]


class ToyModel:
    """v = net(x, t, cond) of one small MLP; decode shows the latent as a 2x2 picture."""

    family = "toy"
    device = torch.device("cpu")

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(8 + 1 + 1, 16), nn.Tanh(), nn.Linear(16, 8))
        self.calls: list[int] = []

    def velocity(self, x: Tensor, t: Tensor, cond: Cond, guidance: float = 1.0) -> Tensor:
        self.calls.append(len(x))
        row = torch.cat([x.flatten(1), t[:, None], cond.tensors["text"]], 1)
        out: Tensor = self.net(row)
        return out.view_as(x)

    def decode(self, x0: Tensor) -> Media:
        pixels = x0.mean(1, keepdim=True).expand(-1, 3, -1, -1).sigmoid()
        return Media(pixels[:, None].detach())


def conds(rows: Sequence[int]) -> Cond:
    return Cond({"text": torch.tensor([[i / 8] for i in rows])})


def brightness(media: Media, prompts: Sequence[Prompt]) -> Tensor:
    return media.pixels.flatten(1).mean(1)


def submit_with(score: Any) -> Any:
    def submit(media: Media, prompts: Sequence[Prompt]) -> Future[dict[str, Scores]]:
        future: Future[dict[str, Scores]] = Future()
        values = score(media, prompts)
        future.set_result({"bright": Scores(values, [{} for _ in prompts])})
        return future

    return submit


def config(**changes: Any) -> GrpoConfig:
    """A small config; `rollout__steps=4` sets a nested key."""
    data: dict[str, Any] = {
        "algorithm": "grpo",
        "model": "toy",
        "steps": 3,
        "out": "unused",
        "size": "16x16",
        "dtype": "float32",
        "train": "full",
        "prompts": {"train": "a", "test": "b"},
        "rollout": {"groups": 4, "samples": 4, "steps": 5},
        "reward": {"bright": 1.0},
        "policy": {"updates": 2, "clip": 0.01},
        "optim": {"lr": 1e-2, "micro": 4, "eps": 1e-10},
        "ema": {"decay": 0.5, "interval": 1},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        block = data
        for name in parents:
            block = block.setdefault(name, {})
        block[last] = value
    return GrpoConfig.model_validate(data)


def world(model: ToyModel, score: Any = brightness) -> World:
    return World(
        model=model,  # type: ignore[arg-type]
        conds=conds,
        prompts=PROMPTS,
        submit=submit_with(score),
        reference=nullcontext,
        latent=LATENT,
    )


def walk(cfg: GrpoConfig) -> Walk:
    r = cfg.rollout
    return Walk(
        grid=static(r.steps, 3.0).float(),
        law=r.law,
        level=r.level,
        t_at_one=None,
        reduction=cfg.policy.log_prob,
        length=r.window.size if r.window else r.trained_steps,
    )


def state(model: ToyModel, cfg: GrpoConfig) -> TrainState:
    params = dict(model.net.named_parameters())

    def write(folder: Path, weights: str, step: int) -> None:
        save_file({n: p.detach().clone() for n, p in params.items()}, folder / "weights.safetensors")

    def read(folder: Path) -> None:
        with torch.no_grad():
            for name, value in load_file(folder / "weights.safetensors").items():
                params[name].copy_(value)

    o = cfg.optim
    return TrainState.new(
        Weights(params, write, read),
        rate=LearningRate(o.lr, o.warmup, o.decay, cfg.steps * cfg.policy.epochs * cfg.policy.updates),
        betas=o.betas,
        eps=o.eps,
        weight_decay=o.weight_decay,
        grad_clip=o.grad_clip,
        ema_decay=cfg.ema.decay,
        ema_interval=cfg.ema.interval,
    )


def run(cfg: GrpoConfig, score: Any = brightness, dist: Dist | None = None, seed: int = 0) -> Any:
    """Train the toy to the end: its rows, state and model."""
    from flowkit.trainers.grpo import train

    model = ToyModel(seed)
    carried = state(model, cfg)
    rows = list(train(world(model, score), walk(cfg), cfg, carried, dist or Dist()))
    return SimpleNamespace(rows=rows, state=carried, model=model)


def weights_of(result: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in result.model.net.parameters()])
