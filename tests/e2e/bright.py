"""A reward that needs no package: how bright a picture is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowkit.types import Media, Prompt


def score(media: Media, prompts: Sequence[Prompt]) -> Tensor:
    return media.pixels.flatten(1).mean(1)


def odd_only(media: Media, prompts: Sequence[Prompt]) -> Tensor:
    """Brightness, but every second prompt scores the same whatever is drawn: its groups are refilled."""
    return torch.where(torch.tensor([p.index % 2 == 1 for p in prompts]), score(media, prompts), 0.0)
