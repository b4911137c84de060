"""The settings of a Flow-GRPO run; the names are the keys of its presets."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from flowkit.config.explain import refuse
from flowkit.config.sections import (
    Count,
    CountOrZero,
    EmaConfig,
    EvalConfig,
    Guidance,
    OptimConfig,
    PromptsConfig,
    RunConfig,
    ScheduleConfig,
    Section,
    Share,
)

LawName = Literal["ode", "flow-sde", "dance", "cps", "consistency"]
KlName = Literal["path", "exact", "velocity"]
Reduction = Literal["mean", "sum", "unit"]

LEVELS: dict[str, float] = {"flow-sde": 2.0, "dance": 2.0, "cps": 1.0}  # law: its highest noise level


class WindowConfig(Section):
    """Noise and training only in steps [start, start + size), start drawn per group from [lo, hi - size]."""

    size: Count
    lo: CountOrZero = 0
    hi: Count


class RolloutConfig(Section):
    """How trajectories are drawn: `groups` prompts a round, `samples` pictures of each."""

    groups: Count
    samples: int = Field(ge=2, le=10**6, description="a group of one has no advantage")
    steps: int = Field(ge=1, le=1000)
    guidance: Guidance = 1.0
    law: LawName = "flow-sde"
    level: float = Field(default=0.7, ge=0, le=2)
    schedule: ScheduleConfig = ScheduleConfig()
    t_at_one: Literal["next"] | Annotated[float, Field(gt=0, lt=1)] = "next"
    window: WindowConfig | None = None
    train_fraction: float = Field(default=0.99, gt=0, le=1)

    @property
    def trained_steps(self) -> int:
        """How many steps, from the first on, may be trained; the rest, where t is tiny, never is."""
        return math.floor(self.steps * self.train_fraction + 1e-9)  # as flow.windows.trained_steps

    @model_validator(mode="after")
    def _check_law(self) -> RolloutConfig:
        law, level = self.law, self.level
        if law == "ode":
            laws = ", ".join((*LEVELS, "consistency"))
            raise refuse("law", f"law 'ode' has no noise to learn from; use one of {laws}")
        top = LEVELS.get(law)
        if top is not None and not 0 < level <= top:
            raise refuse(
                "level", f"level {level:g} does not fit law {law!r}: use more than 0, at most {top:g}"
            )
        if law in ("cps", "consistency") and self.trained_steps == self.steps:
            fraction = f"train_fraction {self.train_fraction:g}"
            reason = f"trains the last step, where law {law!r} has no noise"
            raise refuse("train_fraction", f"{fraction} {reason}; use 0.99")
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> RolloutConfig:
        trained = self.trained_steps
        if trained < 1:
            least = math.ceil(1 / self.train_fraction - 1e-9)
            fix = f"use {least} or more steps"
            fraction = f"train_fraction {self.train_fraction:g} of {self.steps}"
            raise refuse("steps", f"{fraction} steps leaves none to train; {fix}")
        if self.window is None:
            return self
        size, lo, hi = self.window.size, self.window.lo, self.window.hi
        limit = f"the {trained} trained of {self.steps} steps"
        if size > trained:
            raise refuse("window.size", f"a window of {size} is larger than {limit}; use size 1 to {trained}")
        if hi > trained:
            raise refuse("window.hi", f"hi {hi} lets the window pass {limit}; use hi {trained} or less")
        if lo >= hi:
            raise refuse("window.lo", f"the window's lo {lo} is not below its hi {hi}; use lo 0 to {hi - 1}")
        if size > hi - lo:
            fix = f"use size 1 to {hi - lo}"
            raise refuse("window.size", f"a window of {size} does not fit into steps {lo} to {hi}; {fix}")
        return self


class PolicyConfig(Section):
    """Advantages, clip range and KL; `updates` optimizer steps in each inner epoch, `refill` extra rounds."""

    std: Literal["group", "global"] = "group"
    history: Literal["epoch", "run"] = "epoch"
    adv_clip: float = Field(default=2.0, gt=0, le=1000)
    clip: float = Field(default=1e-3, gt=0, lt=1)
    kl: float = Field(default=0.0, ge=0, le=1000)
    kl_kind: KlName = "path"
    log_prob: Reduction = "mean"
    epochs: int = Field(default=1, ge=1, le=1000)
    updates: int = Field(default=2, ge=1, le=10**6)
    refill: int = Field(default=0, ge=0, le=1000)


class GrpoConfig(RunConfig):
    """One Flow-GRPO run (arXiv:2505.05470). An iteration (`steps`) is one round of rollouts."""

    algorithm: Literal["grpo"]
    student: str | None = None  # a few-step student of `flowkit distill` to go on from
    prompts: PromptsConfig
    rollout: RolloutConfig
    reward: dict[str, float] = Field(min_length=1)
    reward_workers: int = Field(default=1, ge=0, le=1024)
    reward_batch: Count = 32
    max_failed: Share = 0.2
    policy: PolicyConfig = PolicyConfig()
    optim: OptimConfig
    ema: EmaConfig = EmaConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _check(self) -> GrpoConfig:
        groups, updates = self.rollout.groups, self.policy.updates
        if groups % updates:  # a group is compared with itself, so it lies in one optimizer step as a whole
            legal = " or ".join(str(n) for n in _near_divisors(groups, updates))
            raise refuse(
                "policy.updates",
                f"{groups} groups do not split into {updates} equal updates; use updates {legal}",
            )
        if not any(self.reward.values()):
            raise refuse("reward", "every reward has weight 0, so nothing is learned; give one a weight")
        if self.student is not None and self.rollout.law != "consistency":
            raise refuse(
                "rollout.law",
                f"a student samples by law 'consistency', not {self.rollout.law!r}; use rollout.law=consistency",
            )
        if self.student is not None and self.lora.path is not None:
            raise refuse("lora.path", "a student brings its own weights; leave lora.path out")
        if self.lora.dropout:
            raise refuse(
                "lora.dropout",
                "a replayed step would drop other weights than its rollout did, so no ratio would start at 1; use 0",
            )
        return self


def _near_divisors(n: int, wanted: int) -> list[int]:
    """The divisors of n next to a number, below and above it."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = sorted({*small, *(n // d for d in small)})
    below = [d for d in divisors if d < wanted][-1:]
    return below + [d for d in divisors if d > wanted][:1]
