"""What tiny-wan holds to: `python -m flowkit.assets.measure tiny-wan` prints it as JSON.

Exact share and mean of reward `shapes` by steps and guidance on fully described prompts, what the autoencoder alone
keeps of rendered clips, and how far the grounds that the model draws are from the shares of the data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flowkit.assets.measure import variation
from flowkit.assets.shapes import FRAMES, GROUNDS, HEIGHT, WIDTH, draw_scene, prompt_of, render
from flowkit.generate import Recipe, draw
from flowkit.models import FlowModel, load
from flowkit.models.text import encode_all
from flowkit.rewards import load as load_reward
from flowkit.types import Media, Prompt, Size

SETTINGS = ((50, 3.0), (50, 1.0), (8, 3.0), (4, 3.0), (3, 3.0), (2, 3.0), (1, 3.0))


def clips(model: FlowModel, prompts: Sequence[str], steps: int, guidance: float, batch: int = 32) -> Media:
    """One clip a prompt by Euler's method on the model's own schedule."""
    table = encode_all(model, prompts)
    recipe = Recipe(steps=steps, size=Size(WIDTH, HEIGHT, FRAMES), guidance=guidance)
    jobs = [(i, 0) for i in range(len(prompts))]
    drawn = [m.pixels for _, m in draw(model, lambda rows: table[rows], jobs, recipe, batch)]
    return Media(torch.cat(drawn))


def seen(media: Media, prompts: Sequence[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Exact share and mean score, and the details."""
    scores = load_reward("shapes")(media, [Prompt(p, i) for i, p in enumerate(prompts)])
    exact = float(np.mean([d["exact"] for d in scores.details]))
    return {"exact": round(exact, 3), "mean": round(float(scores.values.mean()), 3)}, list(scores.details)


@torch.no_grad()
def kept(model: FlowModel, count: int) -> dict[str, float]:
    """What the autoencoder alone keeps of rendered clips."""
    rng = np.random.default_rng(21)
    scenes = [draw_scene(rng) for _ in range(count)]
    pixels = torch.from_numpy(render(scenes)).permute(0, 1, 4, 2, 3).float() / 255
    back = torch.cat([model.decode(model.encode_media(part)).pixels for part in torch.split(pixels, 32)])
    error = float((back - pixels).abs().mean())
    return {**seen(Media(back), [prompt_of(s) for s in scenes])[0], "error": round(error, 4)}


def measure(count: int) -> None:
    """Print all of it."""
    model = load("builtin:tiny-wan")
    rng = np.random.default_rng(20)
    prompts = [prompt_of(draw_scene(rng)) for _ in range(count)]
    found: dict[str, object] = {"autoencoder": kept(model, count)}
    print(json.dumps(found), flush=True)
    for steps, guidance in SETTINGS:
        share, details = seen(clips(model, prompts, steps, guidance), prompts)
        grounds = [d["ground"] or "none" for d in details]
        tv = variation(grounds, {name: 1 / len(GROUNDS) for name in GROUNDS})
        found[f"steps {steps} guidance {guidance:g}"] = {**share, "grounds": round(tv, 3)}
        print(json.dumps(found), flush=True)
    print(json.dumps(found, indent=1))
