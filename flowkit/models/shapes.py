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
        max_tokens_side: most tokens along one side (learned or cropped position table), None = no bound.
        scheduler: scheduler_config.json.
    """

    name: str
    channels: int
    factor: int
    patch: int
    max_tokens_side: int | None
    scheduler: Mapping[str, Any]

    @property
    def multiple(self) -> int:
        """Width and height are multiples of this many pixels."""
        return self.factor * self.patch

    def nearest(self, size: Size) -> Size:
        """The legal size nearest to the one asked for."""

        def side(pixels: int) -> int:
            count = max(1, round(pixels / self.multiple))
            return self.multiple * min(count, self.max_tokens_side or count)

        return Size(side(size.width), side(size.height))

    def check_size(self, size: Size) -> None:
        """Accept what the family can make.

        Raises:
            UsageError: a size off the grid or out of bounds; it names the nearest legal one.
        """
        near = self.nearest(size)
        if size != near:
            bound = f", at most {self.multiple * self.max_tokens_side} a side" if self.max_tokens_side else ""
            raise UsageError(
                f"Size {size} cannot be made by {self.name}, which draws single pictures with sides that are "
                f"multiples of {self.multiple} pixels{bound}; the nearest legal size is {near}."
            )

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """[channels, height, width] of the latent of one picture."""
        self.check_size(size)
        return self.channels, size.height // self.factor, size.width // self.factor

    def tokens(self, size: Size) -> int:
        """Picture tokens that the transformer sees, text not counted."""
        return (size.width // self.multiple) * (size.height // self.multiple)

    def schedule(self, n: int, size: Size) -> Tensor:
        """The model's own grid, float64 [n + 1]: dynamic or static shift, then stretch, as its json says.

        Raises:
            UserError: the config asks for a schedule that flowkit does not read from there.
        """
        config = self.scheduler
        odd = [key for key in _UNSUPPORTED if config.get(key)]
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
            grid = times.static(n, config.get("shift", 1.0))
        terminal = config.get("shift_terminal")
        return times.stretch(grid, terminal) if terminal else grid
