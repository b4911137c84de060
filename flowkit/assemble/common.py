"""What several verbs need assembled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from flowkit.config.schema import GrpoConfig
from flowkit.data.prompts import read
from flowkit.errors import UsageError
from flowkit.models import FlowModel, load
from flowkit.types import Prompt


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


def inputs(model: FlowModel, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Digests of what a training run reads, by config key: a resumed run must find the same."""
    asked = json.dumps([(p.text, p.target, p.meta) for p in prompts], sort_keys=True).encode()
    networks = "|".join(model.bundle.fingerprint(part) for part in ("transformer", "vae"))
    return {"prompts.train": hashlib.sha256(asked).hexdigest(), "model": networks}


def model_of(cfg: GrpoConfig, device: str) -> FlowModel:
    """The config's model on a device, its size checked before any weights are read."""
    model = load(cfg.model, dtype=cfg.dtype, device=device, decode_batch=cfg.decode_batch)
    model.check_size(cfg.pixels)
    return model
