"""JPEG size as a reward: how well, or how badly, a picture compresses.

DDPO (arXiv:2305.13301) takes the size in kB at quality 95; Flow-GRPO divides it by 500 to bring it near
the scale of the other rewards. Both rewards here are divided, so that one is the other with its sign turned.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowkit.types import Media, Prompt, Scores

if TYPE_CHECKING:
    from torch import Tensor

QUALITY = 95
SCALE = 500.0  # kB a unit of reward


class Jpeg:
    """Sign times size in kB (1 kB = 1000 bytes) over 500, the mean over the frames of a clip."""

    def __init__(self, sign: float) -> None:
        self.sign = sign

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Scores:
        """Details say `kilobytes` and `quality`; the prompts do not matter."""
        import torch

        sizes = [_kilobytes(clip) for clip in media.pixels]
        return Scores(
            torch.tensor([self.sign * size / SCALE for size in sizes], dtype=torch.float32),
            [{"kilobytes": round(size, 3), "quality": QUALITY} for size in sizes],
        )


def compressibility() -> Jpeg:
    """Smaller files are better: -kB / 500."""
    return Jpeg(-1.0)


def incompressibility() -> Jpeg:
    """Bigger files are better: kB / 500."""
    return Jpeg(1.0)


def _kilobytes(clip: Tensor) -> float:
    from PIL import Image

    frames = (clip * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    total = 0
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, format="JPEG", quality=QUALITY)
        total += buffer.tell()
    return total / 1000 / len(frames)
