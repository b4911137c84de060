"""The settings of every training verb: one class each, whose names are the keys of its presets."""

from __future__ import annotations

from flowkit.config.distill import DistillConfig
from flowkit.config.grpo import GrpoConfig
from flowkit.config.sections import RunConfig

__all__ = ["SCHEMAS", "DistillConfig", "GrpoConfig"]

#: algorithm, which is also the verb: its schema
SCHEMAS: dict[str, type[RunConfig]] = {"grpo": GrpoConfig, "distill": DistillConfig}
