"""What the builds of all bundles share: a line of progress, results kept on disk, times."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def log(text: str) -> None:
    """One line of progress."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def cached(file: Path, make: Callable[[], Any]) -> Any:
    """The saved value, or a new one, saved."""
    if not file.exists():
        torch.save(make(), file)
    return torch.load(file, weights_only=True)


def times(batch: int, rng: torch.Generator, mean: float = 0.5, std: float = 1.2) -> Tensor:
    """Logit-normal times [B], one in every 1/B of the distribution: the loss of a batch varies less."""
    u = (torch.arange(batch) + torch.rand(batch, generator=rng)) / batch
    return torch.sigmoid(mean + std * torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6)))
