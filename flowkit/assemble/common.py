"""What several verbs need assembled."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from flowkit.config.schema import GrpoConfig
from flowkit.config.sections import OptimConfig, RunConfig
from flowkit.data.prompts import read
from flowkit.errors import UsageError
from flowkit.models import FlowModel, load, lora
from flowkit.models.injection import ADAPTER
from flowkit.runtime.folder import HARMLESS
from flowkit.trainers.state import Weights
from flowkit.types import Prompt

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where text encodings are kept between runs: FLOWKIT_CACHE, else the user's cache folder."""
    base = os.environ.get("FLOWKIT_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowkit"


def prompt_files(cfg: GrpoConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on, and held-out ones.

    Raises:
        UsageError: broken files, or fewer prompts than one round draws.
    """
    train, test = read(cfg.prompts.train), read(cfg.prompts.test)[: cfg.prompts.test_limit]
    if cfg.rollout.groups > len(train):
        raise UsageError(
            f"rollout.groups={cfg.rollout.groups} is more than the {len(train)} prompts of {cfg.prompts.train}: "
            f"use rollout.groups={len(train)} or fewer"
        )
    return train, test


def harmless(optim: OptimConfig) -> frozenset[str]:
    """Keys that a resumed run may change; the number of steps is none of them where the rate depends on it."""
    return HARMLESS if optim.decay == "none" else HARMLESS - {"steps"}


def inputs(model: FlowModel, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Digests of what a training run reads, by config key: a resumed run must find the same."""
    asked = json.dumps([(p.text, p.target, p.meta) for p in prompts], sort_keys=True).encode()
    networks = "|".join(model.bundle.fingerprint(part) for part in ("transformer", "vae"))
    return {"prompts.train": hashlib.sha256(asked).hexdigest(), "model": networks}


def model_of(cfg: RunConfig, device: str) -> FlowModel:
    """The config's model on a device, its size checked before any weights are read."""
    model = load(cfg.model, dtype=cfg.dtype, device=device, decode_batch=cfg.decode_batch)
    model.check_size(cfg.pixels)
    return model


def prepare(model: FlowModel, cfg: RunConfig, adapter: str = ADAPTER) -> None:
    """Make the configured weights trainable: all of them, a new LoRA, or the LoRA of a file."""
    c = cfg.lora
    if cfg.train == "full":
        lora.train_all(model)
    elif c.path is None or adapter != ADAPTER:
        lora.add_lora(model, c.rank, c.alpha, c.targets, c.dropout, cfg.seed, adapter)
    else:
        lora.load_lora(model, c.path)
        ranks = {p.shape[0] for name, p in lora.trainable(model).items() if ".lora_A." in name}
        if ranks != {c.rank}:
            found = ", ".join(map(str, sorted(ranks)))
            log.warning("%s brings rank %s; lora.rank %d is not used", c.path, found, c.rank)


def weights_of(
    model: FlowModel, cfg: RunConfig, params: Mapping[str, Parameter], info: Mapping[str, Any]
) -> Weights:
    """How the trained weights are written and read, in the layout that diffusers loads.

    Args:
        model: whose weights they are.
        cfg: says whether they are a LoRA or all.
        params: the parameters that are trained.
        info: fields of the `flowkit` header; of `trained` the step is added.
    """
    full = cfg.train == "full"
    read = lora.load_full if full else lora.load_lora
    inside = "transformer" if full else ""

    def save(folder: Path, weights: str, step: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        about = {**info, "weights": weights, "trained": {**info["trained"], "step": step}}
        (folder / inside).mkdir(parents=True, exist_ok=True)
        if full:
            lora.save_full(model, folder / inside, about, tensors)
        else:
            lora.save_lora(model, folder / inside, about)

    return Weights(dict(params), save, lambda folder: read(model, folder / inside))
