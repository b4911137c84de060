"""Distillation with each network in shards over the processes: what it needs, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from flowkit.assemble.latents import missing_of
from flowkit.config.distill import DistillConfig
from flowkit.errors import UsageError, UserError
from flowkit.models import FlowModel, sharding
from flowkit.runtime.dist import Dist
from flowkit.trainers.state import Shards, Weights


def in_shards(
    weights: Weights, net: nn.Module, tensors: Callable[[], Mapping[str, Tensor]], dist: Dist
) -> Weights:
    """The same weights, of a network in shards; `tensors` is what their file holds."""
    shards = Shards(tensors, changed=lambda: sharding.refresh(net), world=dist.world, keep=dist.main)
    return replace(weights, shards=shards)


def check_shards(cfg: DistillConfig, processes: int) -> None:
    """Refuse what shards can't do.

    Raises:
        UsageError: one process, or a batch that does not deal each process as many samples.
    """
    if not cfg.shard:
        return
    if processes == 1:
        raise UsageError("shard: true splits the weights over processes: add --processes N, or use torchrun")
    if cfg.batch % processes:
        near = max(processes, round(cfg.batch / processes) * processes)
        raise UsageError(
            f"batch {cfg.batch} does not deal {processes} processes as many samples each, which shards need: "
            f"use batch={near}"
        )


def refuse_missing(model: FlowModel, cfg: DistillConfig) -> None:
    """Latents of the teacher must be there before its weights are in shards.

    Raises:
        UserError: some are missing.
    """
    if cfg.data.kind == "made" and (count := len(missing_of(model, cfg))):
        raise UserError(
            f"{count} files of latents are missing in {cfg.data.path}, and a teacher in shards makes none: "
            "make them first, by the same command with --make-data"
        )
