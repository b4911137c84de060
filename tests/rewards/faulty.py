"""Rewards with faults, named by tests as tests.rewards.faulty:NAME."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowkit.errors import UsageError, UserError
from flowkit.types import Media, Prompt, Scores


def redness(media: Media, prompts: Sequence[Prompt]) -> Tensor:
    return media.pixels[:, :, 0].mean((1, 2, 3))


def numbers(media: Media, prompts: Sequence[Prompt]) -> list[float]:
    return [float(p.index) for p in prompts]


def stumbles(media: Media, prompts: Sequence[Prompt]) -> list[float]:
    if any(p.text == "bad" for p in prompts):
        raise ZeroDivisionError("no ink")
    return [float(p.index) for p in prompts]


def gives_nan(media: Media, prompts: Sequence[Prompt]) -> list[float]:
    return [float("inf") if p.text == "bad" else 1.0 for p in prompts]


def gives_up(media: Media, prompts: Sequence[Prompt]) -> list[float]:
    raise UserError("the reward server is down: start it")


def short(media: Media, prompts: Sequence[Prompt]) -> list[float]:
    return [1.0]


def words(media: Media, prompts: Sequence[Prompt]) -> str:
    return "good"


def odd_details(media: Media, prompts: Sequence[Prompt]) -> Scores:
    return Scores(torch.ones(len(media)), [{"seen": object()} for _ in prompts])


def talks(media: Media, prompts: Sequence[Prompt]) -> list[float]:
    print("a reward talks")
    return [1.0] * len(prompts)


def vague(media: Media, prompts: Sequence[Prompt]) -> Scores:
    return Scores(torch.ones(len(media)), [{"sure": float("nan")} for _ in prompts])


def dies(media: Media, prompts: Sequence[Prompt]) -> list[float]:
    """Is killed over every picture whose text is not a path, and once for each path."""
    once = Path(prompts[0].text)
    if not (once.is_absolute() and once.exists()):
        if once.is_absolute():
            once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(prompts)


def sleeps(media: Media, prompts: Sequence[Prompt]) -> list[float]:
    if prompts[0].text == "sleep":
        time.sleep(600)
    return [1.0] * len(prompts)


def threads(media: Media, prompts: Sequence[Prompt]) -> list[float]:
    """1 in a process that is not the one named by the text, and has one thread for mathematics."""
    single = torch.get_num_threads() == 1 and os.environ["OMP_NUM_THREADS"] == "1"
    return [float(single and str(os.getpid()) != p.text) for p in prompts]


class Learned:
    """A reward that is built once and looks at the prompts first."""

    def __init__(self) -> None:
        self.calls = 0

    def check(self, prompts: Sequence[Prompt]) -> None:
        if any(not p.text for p in prompts):
            raise UsageError("a prompt is empty")

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> list[float]:
        self.calls += 1
        return [float(self.calls)] * len(prompts)


class Mute:
    """No reward: it can't be called."""


not_callable = 3
