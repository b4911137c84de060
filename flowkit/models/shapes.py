"""What a family can draw, known from its json files alone: sizes, latents, tokens and the default times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowkit.errors import UsageError, UserError
from flowkit.flow import schedule as times
from flowkit.types import Size

_UNSUPPORTED = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
)


@dataclass(frozen=True)
class Shape:
    """Sizes of one model.

    Attributes:
        name: the model, for messages.
        channels: channels of a latent.
        factor: pixels to a latent, each way.
        patch: latents to a token, each way.
        max_tokens_side: most tokens along one side (learned or cropped position table), None = no bound; for
            clips in time too.
        scheduler: scheduler_config.json.
        temporal: frames to a latent frame after the first, which is a latent by itself; None = single pictures.
    """

    name: str
    channels: int
    factor: int
    patch: int
    max_tokens_side: int | None
    scheduler: Mapping[str, Any]
    temporal: int | None = None

    @property
    def multiple(self) -> int:
        """Width and height are multiples of this many pixels."""
        return self.factor * self.patch

    def nearest(self, size: Size) -> Size:
        """The legal size nearest to the one asked for."""

        def count(real: float) -> int:
            tokens = max(1, round(real))
            return min(tokens, self.max_tokens_side or tokens)

        width, height = (self.multiple * count(side / self.multiple) for side in (size.width, size.height))
        if self.temporal is None:
            return Size(width, height)
        return Size(width, height, 1 + self.temporal * (count(1 + (size.frames - 1) / self.temporal) - 1))

    def check_size(self, size: Size) -> None:
        """Accept what the family can make.

        Raises:
            UsageError: a size off the grid or out of bounds; it names the nearest legal one.
        """
        near = self.nearest(size)
        if size != near:
            bound = f", at most {self.multiple * self.max_tokens_side} a side" if self.max_tokens_side else ""
            kind = "single pictures" if self.temporal is None else f"clips of {self.temporal}k+1 frames"
            raise UsageError(
                f"Size {size} cannot be made by {self.name}, which draws {kind} with sides that are "
                f"multiples of {self.multiple} pixels{bound}; the nearest legal size is {near}."
            )

    def latent_frames(self, size: Size) -> int:
        """Frames of the latent: 1 for a picture, (F - 1) / temporal + 1 for a clip of F frames."""
        return 1 if self.temporal is None else 1 + (size.frames - 1) // self.temporal

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """[channels, height, width] of the latent of one picture, [channels, frames, height, width] of a clip."""
        self.check_size(size)
        plane = (size.height // self.factor, size.width // self.factor)
        if self.temporal is None:
            return (self.channels, *plane)
        return (self.channels, self.latent_frames(size), *plane)

    def tokens(self, size: Size) -> int:
        """Picture tokens that the transformer sees, text not counted."""
        return self.latent_frames(size) * (size.width // self.multiple) * (size.height // self.multiple)

    def schedule(self, n: int, size: Size) -> Tensor:
        """The model's own grid, float64 [n + 1]: dynamic or static shift, then stretch, as its json says.

        Raises:
            UserError: the config asks for a schedule that flowkit does not read from there.
        """
        config = self.scheduler
        odd = [key for key in _UNSUPPORTED if config.get(key)]
        if "flow_shift" in config and not config.get("use_flow_sigmas"):
            odd.append("use_flow_sigmas=false")
        dynamic = bool(config.get("use_dynamic_shifting"))
        if dynamic and config.get("time_shift_type", "exponential") != "exponential":
            odd.append(f"time_shift_type={config['time_shift_type']}")
        if odd:
            raise UserError(
                f"The scheduler config of {self.name} sets {', '.join(odd)}, which has no counterpart here; "
                "name the schedule yourself with --schedule."
            )
        if dynamic:
            mu = times.mu_of(
                self.tokens(size),
                tokens_lo=config.get("base_image_seq_len", 256),
                mu_lo=config.get("base_shift", 0.5),
                tokens_hi=config.get("max_image_seq_len", 4096),
                mu_hi=config.get("max_shift", 1.15),
            )
            grid = times.dynamic(n, mu)
        else:
            # the name in FlowMatchEulerDiscreteScheduler, and that in UniPCMultistepScheduler
            grid = times.static(n, config.get("shift", config.get("flow_shift", 1.0)))
        terminal = config.get("shift_terminal")
        return times.stretch(grid, terminal) if terminal else grid
