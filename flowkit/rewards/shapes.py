"""Rewards of the moving things: does a clip show what its prompt asks for, and how steadily does the thing move.

The prompts are those of the embedded world ("a red square moving left", parts of it left out), the eyes are plain
image analysis (`flowkit.rewards.moving`), so both rewards are exact, quick and need nothing installed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.assets.shapes import COLOURS, DIRECTIONS, SHAPES
from flowkit.errors import UsageError
from flowkit.rewards.moving import Sight, look
from flowkit.types import Media, Prompt, Scores

if TYPE_CHECKING:
    from collections.abc import Callable

GRAMMAR = re.compile(
    rf"an? (?:({'|'.join(COLOURS)}) )?({'|'.join(SHAPES)}|thing) moving(?: ({'|'.join(DIRECTIONS)}))?\.?",
    re.IGNORECASE,
)
UNFIT = "the clip is black or holds nan"
STILL = "a picture does not move: give a clip of two frames or more"
NOT_OF_THIS_WORLD = "the prompt is not of the form 'a red square moving left'"


@dataclass(frozen=True)
class Asked:
    """What a prompt asks for; None where it leaves the choice."""

    colour: str | None
    shape: str | None
    direction: str | None


class Shapes:
    """The share of what the prompt asks for that the clip shows; 0 unless one thing of the world is seen throughout.

    Colour and shape count where the prompt names them; motion always does: the way it names, else any one of the
    four. A picture has no motion, so only colour and shape count there. Details say `colour`, `shape`, `direction`,
    `ground`, `x`, `y` (centre in the first frame, pixels), `size` (half a side of the square of the same area),
    `speed` (pixels a frame), `exact`, and `fault` where this is not one thing throughout.
    """

    def check(self, prompts: Sequence[Prompt]) -> None:
        """UsageError naming the first few prompts that are not of this world, and how many there are."""
        bad = [prompt for prompt in prompts if asked_of(prompt) is None]
        if bad:
            places = ", ".join(p.where or f"prompt {p.index}" for p in bad[:3])
            raise UsageError(
                f"{len(bad)} of {len(prompts)} prompts ask for nothing that reward 'shapes' can see "
                f"({places}{', ...' if len(bad) > 3 else ''}): write them like 'a red square moving left' (colours "
                f"{', '.join(COLOURS)}; {', '.join(SHAPES)} or thing; {', '.join(DIRECTIONS)}; colour and direction "
                'may be left out), or give the jsonl line such a "target"'
            )

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Scores:
        """Scores in [0, 1]; nan for a prompt of another world, or one that a picture can't answer."""
        return _scores(media, lambda i, sight: _judge(sight, asked_of(prompts[i]), media.pixels.shape[1]))


class Motion:
    """How steadily the one thing moves, whatever the prompt: R^2 of its path times how far it gets, at most 1.

    R^2 is that of the centres against constant velocity; a thing that gets less far than its size earns that
    share only. 0 where not every frame shows one thing. Details say `speed` (pixels a frame), `residual` (rms
    distance from the line, pixels), and `fault`.
    """

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Scores:
        """Scores in [0, 1]; nan for pictures."""
        return _scores(media, lambda _, sight: _steadiness(sight))


def asked_of(prompt: Prompt) -> Asked | None:
    """What the `target` of a prompt, else its text, asks for; None if it is not of this world.

    >>> asked_of(Prompt("a red square moving left"))
    Asked(colour='red', shape='square', direction='left')
    >>> asked_of(Prompt("a thing moving up"))
    Asked(colour=None, shape=None, direction='up')
    >>> asked_of(Prompt("a red square")) is None
    True
    """
    text = prompt.target if prompt.target is not None else prompt.text
    match = GRAMMAR.fullmatch(" ".join(text.split()))
    if match is None:
        return None
    colour, shape, direction = (part and part.lower() for part in match.groups())
    return Asked(colour, None if shape == "thing" else shape, direction)


def _scores(media: Media, judge: Callable[[int, Sight], dict[str, Any]]) -> Scores:
    import torch

    details = []
    for i, (clip, fit) in enumerate(zip(media.pixels, media.ok.tolist(), strict=True)):
        if fit:
            levels = (clip * 255).round().clamp(0, 255).float().permute(0, 2, 3, 1).contiguous().cpu().numpy()
            details.append(judge(i, look(levels)))
        else:
            details.append({"score": math.nan, "error": UNFIT})
    return Scores(torch.tensor([detail.pop("score") for detail in details], dtype=torch.float32), details)


def _judge(sight: Sight, asked: Asked | None, frames: int) -> dict[str, Any]:
    seen = _described(sight)
    if asked is None:
        return seen | {"score": math.nan, "error": NOT_OF_THIS_WORLD}
    right = [
        getattr(sight, part) == wanted
        for part, wanted in (("colour", asked.colour), ("shape", asked.shape))
        if wanted is not None
    ]
    if frames > 1:
        right.append(sight.direction is not None and asked.direction in (None, sight.direction))
    if not right:
        return seen | {"score": math.nan, "error": STILL}
    score = 0.0 if sight.fault else sum(right) / len(right)
    return seen | {"score": score, "exact": score == 1.0}


def _described(sight: Sight) -> dict[str, Any]:
    names = ("colour", "shape", "direction", "ground")
    seen: dict[str, Any] = {name: getattr(sight, name) for name in names}
    seen |= dict.fromkeys(("x", "y", "size", "speed"))
    if sight.path is not None:
        start, velocity, _ = sight.line()
        numbers = {"x": start[0], "y": start[1], "size": sight.size, "speed": math.hypot(*velocity)}
        seen |= {name: round(float(value), 3) for name, value in numbers.items()}
    return seen | ({"fault": sight.fault} if sight.fault else {})


def _steadiness(sight: Sight) -> dict[str, Any]:
    fault = {"fault": sight.fault} if sight.fault else {}
    if sight.path is None or sight.size is None:
        return {"score": 0.0, "speed": None, "residual": None} | fault
    frames = len(sight.path)
    if frames < 2:
        return {"score": math.nan, "error": STILL}
    _, velocity, residual = sight.line()
    speed = math.hypot(*velocity)
    # the variance of a path with this velocity about its mean, and what the line leaves of the path's own
    explained = speed**2 * (frames**2 - 1) / 12
    r2 = explained / (explained + residual**2) if explained > 0 else 0.0
    score = 0.0 if sight.fault else r2 * min(1.0, speed * (frames - 1) / sight.size)
    return {"score": score, "speed": round(speed, 3), "residual": round(residual, 3)} | fault
