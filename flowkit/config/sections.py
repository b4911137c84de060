"""The blocks that configs of several algorithms share: frozen, nothing unknown, a bound on every number."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from flowkit.config.explain import refuse
from flowkit.types import Size

ScheduleName = Literal[
    "auto",
    "static",
    "dynamic",
    "unshifted",
    "power",
    "exponential",
    "logit-exponential",
    "logit-linear",
    "sd3-rl",
    "rcm-teacher",
    "student",
]
Tracker = Literal["tensorboard", "wandb", "trackio"]

Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Guidance = Annotated[float, Field(ge=0, le=100)]
Angle = Annotated[float, Field(gt=0, lt=1.5707963)]
ModuleNames = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]

SCHEDULE_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # name: settings it needs, may have
    "auto": ((), ()),
    "static": (("shift",), ()),
    "dynamic": ((), ("mu", "terminal")),  # without mu: FLUX's, by the number of tokens
    "unshifted": ((), ()),
    "power": (("smin",), ("smax", "rho")),
    "exponential": (("smin",), ("smax",)),
    "logit-exponential": (("a",), ("b",)),
    "logit-linear": (("a",), ("b",)),
    "sd3-rl": ((), ("shift",)),
    "rcm-teacher": ((), ("shift", "sigma_max")),
    "student": ((), ("sigma_max", "thetas")),
}


class Section(BaseModel):
    """What every block of a config has in common: strict types, no unknown key, no change after reading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LoraConfig(Section):
    """Adapters: scale = alpha / rank; targets is a set that the model knows by name, or module names."""

    rank: int = Field(default=32, ge=1, le=4096)
    alpha: float = Field(default=64, gt=0, le=65536)
    targets: Literal["attention", "attention+ff"] | ModuleNames = "attention"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    path: str | None = None


class PromptsConfig(Section):
    """Prompt files, or `builtin:NAME`; `test_limit` keeps the first so many test prompts."""

    train: str = Field(min_length=1)
    test: str = Field(min_length=1)
    test_limit: Count | None = None


class ScheduleConfig(Section):
    """The grid of times: `auto` is the model family's own; the settings belong to the other names."""

    name: ScheduleName = "auto"
    shift: float | None = Field(default=None, gt=0, le=1000)
    mu: float | None = Field(default=None, ge=-20, le=20)
    terminal: float | None = Field(default=None, gt=0, lt=1)
    smin: float | None = Field(default=None, gt=0, lt=1)
    smax: float | None = Field(default=None, gt=0, le=1)
    rho: float | None = Field(default=None, gt=0, le=1000)
    a: float | None = Field(default=None, ge=-20, le=1000)
    b: float | None = Field(default=None, gt=0, le=1000)
    sigma_max: float | None = Field(default=None, gt=0, le=1e6)
    thetas: Annotated[tuple[Angle, ...], Field(strict=False)] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are given, by the name of the schedule's argument."""
        return {key: value for key, value in self.model_dump(exclude={"name"}).items() if value is not None}

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        given = self.settings
        needs, may_have = SCHEDULE_SETTINGS[self.name]
        for key in given:
            if key not in (*needs, *may_have):
                takers = [name for name, keys in SCHEDULE_SETTINGS.items() if key in (*keys[0], *keys[1])]
                raise refuse(key, f"schedule {self.name!r} takes no {key!r}; these do: {', '.join(takers)}")
        for key in needs:
            if key not in given:
                raise refuse("name", f"schedule {self.name!r} needs {key!r}; give it, or use 'auto'")
        if self.smin is not None and self.smin >= given.get("smax", 1.0):
            raise refuse("smin", f"smin {self.smin:g} must be below smax {given.get('smax', 1.0):g}")
        if self.name == "logit-linear" and given["a"] <= 0:
            raise refuse("a", f"a is {given['a']:g}, for schedule 'logit-linear' it must be more than 0")
        return self


class OptimConfig(Section):
    """AdamW; `warmup` in optimizer steps, then `decay` to 0 at the run's end; `micro` pictures in one forward."""

    lr: float = Field(gt=0, le=10)
    decay: Literal["none", "linear", "cosine"] = "none"
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0, le=1)
    weight_decay: float = Field(default=1e-4, ge=0, le=10)
    warmup: CountOrZero = 0
    grad_clip: float = Field(default=1.0, gt=0, le=1e6)
    micro: Count


class EmaConfig(Section):
    """Moving average of the trained weights, moved every `interval` optimizer steps."""

    decay: Decay = 0.9
    interval: Count = 8


class CheckpointConfig(Section):
    """A checkpoint every so many iterations and at the end; the newest `keep` stay."""

    every: Count = 10
    keep: Count = 3


class EvalConfig(Section):
    """Held-out prompts with EMA weights and the plain ODE; what is None is the rollout's."""

    every: Count = 20
    steps: int | None = Field(default=None, ge=1, le=1000)
    guidance: Guidance | None = None
    limit: Count | None = None
    batch: Count = 16


class PreviewConfig(Section):
    """Pictures of the same prompts and seeds every so many iterations."""

    every: Count = 10
    prompts: Count = 8


class RunConfig(Section):
    """What every training run has: a model, a seed, a number of iterations, a folder."""

    algorithm: str
    model: str = Field(min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: Count
    out: str = Field(min_length=1)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = "auto"
    gradient_checkpointing: bool = False
    decode_batch: Count = 8
    text_batch: Count = 16
    size: str
    train: Literal["full", "lora"] = "lora"
    lora: LoraConfig = LoraConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    preview: PreviewConfig = PreviewConfig()
    report_to: Annotated[tuple[Tracker, ...], Field(strict=False)] = ("tensorboard",)

    @property
    def pixels(self) -> Size:
        """`size` as numbers."""
        return parse_size(self.size)

    @field_validator("size")
    @classmethod
    def _check_size(cls, value: str) -> str:
        parse_size(value)
        return value

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", value):
            raise ValueError(f"device {value!r} is not one of auto, cpu, mps, cuda, cuda:0 and so on")
        return value

    @model_validator(mode="after")
    def _check_trained(self) -> RunConfig:
        if self.train == "full" and self.lora.path is not None:
            raise refuse(
                "lora.path", "lora.path is given but train is 'full'; use train=lora, or drop the path"
            )
        if self.train == "full" and not self.float32_weights:
            raise refuse(
                "dtype", "full weights in bfloat16 lose small updates; use dtype=float32, or train=lora"
            )
        return self

    @property
    def float32_weights(self) -> bool:
        """Whether the transformer's own weights are held in float32, whatever its calls are computed in."""
        return self.dtype == "float32"


def parse_size(text: str) -> Size:
    """WIDTHxHEIGHT in pixels, or WIDTHxHEIGHTxFRAMES of a clip, as numbers; without frames it is one picture.

    Width and height go from 8 to 16384, frames from 1 to 9999; ValueError with the fix for anything else.

    >>> parse_size("96x32")
    Size(width=96, height=32, frames=1)
    >>> str(parse_size("832x480x81"))
    '832x480x81'
    """
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})(?:x([0-9]{1,5}))?", text)
    if match is None:
        raise ValueError(
            f"size {text!r} is not WIDTHxHEIGHT in pixels, such as 512x512, "
            "nor WIDTHxHEIGHTxFRAMES, such as 832x480x81"
        )
    width, height, frames = int(match[1]), int(match[2]), int(match[3] or 1)
    if not (8 <= width <= 16384 and 8 <= height <= 16384 and 1 <= frames <= 9999):
        raise ValueError(
            f"size {text!r} is out of range; width and height go from 8 to 16384 pixels, frames from 1 to 9999"
        )
    return Size(width, height, frames)


RESOLUTIONS: dict[str, dict[str, Size]] = {  # name: aspect: pixels
    "480p": {
        "1:1": Size(640, 640),
        "4:3": Size(640, 480),
        "3:4": Size(480, 640),
        "16:9": Size(832, 480),
        "9:16": Size(480, 832),
    },
    "720p": {
        "1:1": Size(960, 960),
        "4:3": Size(960, 720),
        "3:4": Size(720, 960),
        "16:9": Size(1280, 720),
        "9:16": Size(720, 1280),
    },
}
