"""The nouns that every layer shares. Nothing here imports torch at run time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file. Two prompts may share a text; the index tells them apart.

    Attributes:
        text: what the model is asked for.
        index: position in its file, from 0 (blank lines and comments not counted).
        target: what a reward should find (for OCR: the words), if the file says it.
        meta: every other field of a jsonl line.
        where: 'file:line', for messages.
    """

    text: str
    index: int = 0
    target: str | None = None
    meta: dict[str, Any] = field(default_factory=dict, hash=False)
    where: str = ""


@dataclass(frozen=True)
class Size:
    """Pixels of a picture or clip."""

    width: int
    height: int
    frames: int = 1

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")


@dataclass(frozen=True)
class Media:
    """Decoded pictures or clips: pixels [B, F, 3, H, W], float32 on the CPU, in [0, 1] where the decode went well.

    A picture whose decode went wrong stays in the batch as it is (nan, or black), so that it can be
    counted; `ok` says which are fit to be scored.
    """

    pixels: Tensor  # [B, F, 3, H, W]

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def ok(self) -> Tensor:
        """Bool [B]: finite everywhere and not black all over."""
        flat = self.pixels.flatten(1)
        finite: Tensor = flat.isfinite().all(1)
        return finite & (flat.nan_to_num(0.0).amax(1) > 0)

    def __getitem__(self, index: slice | Tensor | list[int]) -> Media:
        return Media(self.pixels[index])


@dataclass(frozen=True)
class Scores:
    """What one reward says of one batch: values [B] float32, nan where it could not score; details one dict each."""

    values: Tensor  # [B]
    details: list[dict[str, Any]]
