"""The settings of an rCM run; the names are the keys of its presets."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from flowkit.config.explain import refuse
from flowkit.config.sections import (
    Angle,
    Count,
    CountOrZero,
    Decay,
    Guidance,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    Section,
    Share,
)
from flowkit.config.suggest import suggestion

Loss = Literal["dcm", "scm", "scm+dmd", "dmd"]
LOSSES: tuple[Loss, ...] = ("dcm", "scm", "scm+dmd", "dmd")
NEED_DATA = ("dcm", "scm", "scm+dmd")  # losses that noise a latent of the data


class DataConfig(Section):
    """What the student learns from.

    `made`: latents that the teacher draws from `prompts`, kept as shards in `path` (`--make-data`);
    `shards`: latents in `path`; `media`: pictures or clips in `path`, encoded once into shards beside them;
    `prompts`: no latents at all, for a run of `dmd` alone.
    """

    kind: Literal["made", "shards", "media", "prompts"] = "made"
    path: str | None = None
    prompts: str | None = None
    count: Count = 1024
    shard: Count = 256
    batch: Count = 64

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.kind != "prompts" and self.path is None:
            raise refuse("path", f"data of kind {self.kind!r} needs a path: the folder of its files")
        if self.kind in ("made", "prompts") and self.prompts is None:
            raise refuse(
                "prompts", f"data of kind {self.kind!r} needs prompts: a prompt file, or builtin:NAME"
            )
        return self


class TeacherConfig(Section):
    """The model as it is: its guidance is distilled; steps and schedule make the data and the teacher's figures."""

    guidance: Guidance
    steps: int = Field(default=50, ge=1, le=1000)
    schedule: ScheduleConfig = ScheduleConfig()


class StudentConfig(Section):
    """The student's sampler: times atan(sigma_max), then `thetas`, then 0; DMD simulates 1 to `steps` of them."""

    sigma_max: float = Field(default=80.0, gt=0, le=1e6)
    thetas: Annotated[tuple[Angle, ...], Field(strict=False)] = (1.5, 1.4, 1.0)
    steps: Count = 4

    @model_validator(mode="after")
    def _check(self) -> StudentConfig:
        if any(a <= b for a, b in pairwise(self.thetas)):
            raise refuse("thetas", f"thetas {list(self.thetas)} do not fall; give them from large to small")
        if self.steps > 1 + len(self.thetas):
            raise refuse(
                "steps", f"{self.steps} steps need {self.steps - 1} thetas, but there are {len(self.thetas)}"
            )
        return self


class ScmConfig(Section):
    """The consistency loss: `fd_type` 0 exact, 1 a difference in time, 2 a difference in x and time.

    `fd_step` None is the smallest that the dtype resolves; `warmup` counts steps of the student.
    """

    scale: float = Field(default=1.0, ge=0, le=1e6)
    fd_type: Literal[0, 1, 2] = 0
    fd_step: float | None = Field(default=None, gt=0, le=0.2)
    warmup: CountOrZero = 1000
    tangent_warmup_scope: Literal["data", "all"] = "data"


class DcmConfig(Section):
    """Discrete consistency: one of `steps` equal steps of a grid shifted by `shift`."""

    steps: Count = 50
    shift: float = Field(default=5.0, gt=0, le=1000)


class DmdConfig(Section):
    """Distribution matching: its weight, and the student's share of the turns, one in `freq`."""

    scale: float = Field(default=0.01, ge=0, le=1e6)
    freq: int = Field(default=5, ge=2, le=1000)


class TimeConfig(Section):
    """A distribution of times: `log-normal` of sigma = tan theta, or `uniform-shift`; within [lo, hi] of tau."""

    name: Literal["log-normal", "uniform-shift"] = "log-normal"
    mean: float = Field(default=0.0, ge=-20, le=20)
    std: float = Field(default=1.6, gt=0, le=20)
    shift: float = Field(default=1.0, gt=0, le=1000)
    lo: Share = 0.0
    hi: Share = 1.0

    @model_validator(mode="after")
    def _check(self) -> TimeConfig:
        if self.lo >= self.hi:
            raise refuse("lo", f"lo {self.lo:g} is not below hi {self.hi:g}; both are times tau in [0, 1]")
        return self


class TimesConfig(Section):
    """p_G of the consistency loss, p_D of DMD and the critic (rCM's names)."""

    student: TimeConfig = TimeConfig(mean=-0.8)
    critic: TimeConfig = TimeConfig()


class DistillOptim(OptimConfig):
    """The student's AdamW, and the critic's, which differs in its rate; `offload` parks the idle one's moments."""

    lr: float = Field(gt=0, le=10)
    critic_lr: float = Field(gt=0, le=10)
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.0, 0.999)
    weight_decay: float = Field(default=0.01, ge=0, le=10)
    warmup: CountOrZero = 100
    grad_clip: float = Field(default=1e6, gt=0, le=1e6)
    offload: bool = False


class PowerEmaConfig(Section):
    """Power average of the student (EDM2): its width as a share of the training so far."""

    width: float = Field(default=0.1, gt=0, lt=0.2886)


class DistillEvalConfig(Section):
    """Held-out prompts with the averaged student at each of `steps`; the teacher once, at the start."""

    every: Count = 100
    prompts: str | None = None
    limit: Count | None = None
    batch: Count = 16
    steps: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] = (1, 2, 4)
    teacher_steps: Annotated[tuple[Count, ...], Field(strict=False)] = ()


class DistillConfig(RunConfig):
    """One rCM run (arXiv:2510.08431). An iteration (`steps`) is one turn of the student or the critic.

    `stages` are losses with their iterations, in the order in which they stand. With `shard` the weights of the
    three networks are split over the processes (FSDP2): float32 weights, calls in `dtype`.
    """

    algorithm: Literal["distill"]
    networks: Literal["one base", "three"] = "one base"
    shard: bool = False
    batch: Count
    data: DataConfig
    teacher: TeacherConfig
    student: StudentConfig = StudentConfig()
    stages: dict[str, CountOrZero] = Field(min_length=1)
    scm: ScmConfig = ScmConfig()
    dcm: DcmConfig = DcmConfig()
    dmd: DmdConfig = DmdConfig()
    times: TimesConfig = TimesConfig()
    optim: DistillOptim
    ema: PowerEmaConfig = PowerEmaConfig()
    reward: dict[str, float] = Field(default={})
    reward_workers: int = Field(default=1, ge=0, le=1024)
    reward_batch: Count = 32
    max_dropped: Share = 0.2
    probe_every: CountOrZero = 50
    eval: DistillEvalConfig = DistillEvalConfig()

    def stage_at(self, i: int) -> tuple[Loss, int]:
        """The loss of iteration i (from 0), and the iteration that its stage began with."""
        start = 0
        for loss in self.stages:
            if i < start + self.stages[loss]:
                return loss, start  # type: ignore[return-value]
            start += self.stages[loss]
        raise IndexError(f"iteration {i} is behind the last stage")

    @property
    def float32_weights(self) -> bool:
        """Shards hold float32 weights and compute in `dtype`."""
        return self.shard or self.dtype == "float32"

    @property
    def turns(self) -> list[tuple[str, int, int]]:
        """Each stage within `steps`: its loss, and how many turns student and critic have in it."""
        found, left = [], self.steps
        for loss, asked in self.stages.items():
            count = min(asked, left)
            left -= count
            student = math.ceil(count / self.dmd.freq) if "dmd" in loss else count
            found.append((loss, student, count - student))
        return found

    @model_validator(mode="after")
    def _check(self) -> DistillConfig:
        for loss in self.stages:
            if loss not in LOSSES:
                raise refuse("stages", f"there is no stage {loss!r}; {suggestion(loss, LOSSES)}")
        whole = sum(self.stages.values())
        if self.steps > whole:
            raise refuse(
                "steps",
                f"the stages have {whole} iterations together, fewer than steps {self.steps}; add to one",
            )
        used = [loss for loss, count in self.stages.items() if count and loss in NEED_DATA]
        if self.data.kind == "prompts" and used:
            raise refuse(
                "data.kind",
                f"data of prompts alone has nothing for stage {used[0]!r} to noise: use kind: made (the teacher "
                "makes the latents), or stages of dmd alone",
            )
        if self.train == "full" and self.networks == "one base":
            raise refuse(
                "networks",
                "one base carries two adapters, but train is 'full'; use networks: three, or train: lora",
            )
        if self.shard and self.train != "full":
            raise refuse(
                "shard",
                "shards are for all weights: use train: full, or shard: false (a LoRA's base is held whole)",
            )
        if self.shard and self.optim.offload:
            raise refuse("optim.offload", "moments in shards stay where they are; use offload: false")
        if max(self.eval.steps) > 1 + len(self.student.thetas):
            raise refuse(
                "eval.steps",
                f"the student samples in at most {1 + len(self.student.thetas)} steps; see student.thetas",
            )
        if self.reward and self.eval.prompts is None:
            raise refuse(
                "eval.prompts", "rewards need held-out prompts to judge: a prompt file, or builtin:NAME"
            )
        if self.lora.dropout:
            raise refuse(
                "lora.dropout",
                "the derivative and the target of one network would drop other weights than its output; use 0",
            )
        if self.optim.micro > self.batch:
            raise refuse("optim.micro", f"micro {self.optim.micro} is more than the batch of {self.batch}")
        return self
