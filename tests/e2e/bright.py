"""A reward that needs no package: how bright a picture is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowkit.types import Media, Prompt


def score(media: Media, prompts: Sequence[Prompt]) -> Tensor:
    return media.pixels.flatten(1).mean(1)
