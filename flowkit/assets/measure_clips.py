"""What tiny-wan holds to: `python -m flowkit.assets.measure tiny-wan` prints it as JSON.

The rewards `shapes` and `motion` by steps and guidance on fully described prompts, how far the grounds that the model
draws are from the shares of the data, how much of the world's choice the clips of one prompt have left, and what the
autoencoder alone keeps of rendered clips.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch

from flowkit.assets.measure import variation
from flowkit.assets.shapes import FRAMES, GROUNDS, HEIGHT, WIDTH, Scene, draw_scene, prompt_of, render
from flowkit.data.prompts import read
from flowkit.evaluate.diversity import diversity
from flowkit.generate import Recipe, draw
from flowkit.models import FlowModel, load
from flowkit.models.text import encode_all
from flowkit.rewards import load as load_reward
from flowkit.rewards.shapes import asked_of
from flowkit.types import Media, Prompt, Size

SETTINGS = ((50, 3.0), (50, 1.0), (8, 3.0), (4, 3.0), (3, 3.0), (2, 3.0), (1, 3.0))
ASKED, OFTEN = 6, 32  # prompts whose diversity is measured, and clips of each
Row = tuple[str, dict[str, float]]


def clips(model: FlowModel, prompts: Sequence[str], steps: int, guidance: float, batch: int = 32) -> Media:
    """One clip a prompt by Euler's method on the model's own schedule; equal prompts get other noise."""
    table = encode_all(model, prompts)
    recipe = Recipe(steps=steps, size=Size(WIDTH, HEIGHT, FRAMES), guidance=guidance)
    jobs = [(i, 0) for i in range(len(prompts))]
    drawn = [m.pixels for _, m in draw(model, lambda rows: table[rows], jobs, recipe, batch)]
    return Media(torch.cat(drawn))


def seen(media: Media, prompts: Sequence[str]) -> dict[str, float]:
    """Share of clips that show all that is asked, mean `shapes` and `motion`, total variation of the grounds.

    Clips that can't be scored, such as black ones, count as 0.
    """
    asked = [Prompt(p, i) for i, p in enumerate(prompts)]
    scores, motion = (load_reward(name)(media, asked) for name in ("shapes", "motion"))
    grounds = [d.get("ground") or "none" for d in scores.details]
    found = {
        "exact": float(np.mean([d.get("exact", False) for d in scores.details])),
        "mean": float(scores.values.nan_to_num(0.0).mean()),
        "motion": float(motion.values.nan_to_num(0.0).mean()),
        "grounds": variation(grounds, {name: 1 / len(GROUNDS) for name in GROUNDS} | {"none": 0.0}),
    }
    return {name: round(value, 3) for name, value in found.items()}


def choice(media: Media, prompts: Sequence[str], worlds: Sequence[Sequence[Scene]]) -> dict[str, float]:
    """Diversity of clips [P * K, F, 3, H, W], K in a row of each prompt: the mean over the prompts, and how many.

    Args:
        media: the clips.
        prompts: P texts.
        worlds: for each, scenes that it may stand for.
    """
    often, found = len(media) // len(prompts), []
    for i, (text, scenes) in enumerate(zip(prompts, worlds, strict=True)):
        details = load_reward("shapes")(media[i * often : (i + 1) * often], [Prompt(text, i)] * often).details
        found.append(diversity(details, [asdict(scene) for scene in scenes]))
    known = [asdict(one) | {"mean": one.mean} for one in found if one.seen > 1]
    means = {name: float(np.mean([part[name] for part in known])) for name in (known[0] if known else ())}
    return {name: round(value, 3) for name, value in means.items()} | {"prompts": len(known)}


def scenes_of(prompt: str, rng: np.random.Generator, count: int) -> list[Scene]:
    """Scenes of the world that a prompt may stand for."""
    asked = asked_of(Prompt(prompt))
    if asked is None:
        raise ValueError(f"{prompt!r} is no prompt of the moving things")
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = draw_scene(rng)
        if asked.shape in (None, scene.shape) and asked.direction in (None, scene.direction):
            scenes.append(
                replace(scene, colour=asked.colour or scene.colour)
            )  # on which nothing else depends
    return scenes


@torch.no_grad()
def kept(model: FlowModel, scenes: Sequence[Scene]) -> dict[str, float]:
    """What the autoencoder alone keeps of rendered clips: `seen`, and the mean absolute error in [0, 1]."""
    pixels = torch.from_numpy(render(scenes)).permute(0, 1, 4, 2, 3).float() / 255
    back = torch.cat([model.decode(model.encode_media(part)).pixels for part in torch.split(pixels, 32)])
    error = float((back - pixels).abs().mean())
    return {**seen(Media(back), [prompt_of(s) for s in scenes]), "error": round(error, 4)}


def rows(model: FlowModel, count: int, settings: Sequence[tuple[int, float]] = SETTINGS) -> Iterator[Row]:
    """The figures one after another: autoencoder, then each setting on `count` prompts, then diversity."""
    rng = np.random.default_rng(21)
    yield "autoencoder", kept(model, [draw_scene(rng) for _ in range(count)])
    prompts = [prompt_of(draw_scene(rng)) for _ in range(count)]
    for steps, guidance in settings:
        yield f"steps {steps} guidance {guidance:g}", seen(clips(model, prompts, steps, guidance), prompts)
    test = [prompt.text for prompt in read("builtin:shapes-test")]
    asked = test[:: len(test) // ASKED][:ASKED]
    worlds = [scenes_of(text, rng, 200) for text in asked]
    for steps, guidance in settings:
        media = clips(model, [text for text in asked for _ in range(OFTEN)], steps, guidance)
        yield f"diversity, steps {steps} guidance {guidance:g}", choice(media, asked, worlds)


def measure(count: int, model: str = "builtin:tiny-wan") -> None:
    """Print all of it, a line a figure, and then the whole."""
    found: dict[str, dict[str, float]] = {}
    for name, row in rows(load(model), count):
        found[name] = row
        print(json.dumps({name: row}), flush=True)
    print(json.dumps(found, indent=1))
