"""What an embedded bundle holds to: `python -m flowkit.assets.measure tiny-flux` prints it as JSON.

Exact OCR by steps and guidance, and how far the inks, grounds and fonts that the model draws, where the prompt leaves
them open, are from the shares of the data (total variation).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from flowkit.assets.words import (
    CELLS,
    FONTS,
    GROUNDS,
    INKS,
    PAIRS,
    Sign,
    X,
    Y,
    draw_prompt,
    draw_sign,
    prompt_of,
    render,
)
from flowkit.generate import Recipe, draw
from flowkit.models import FlowModel, load
from flowkit.models.text import encode_all
from flowkit.rewards import load as load_reward
from flowkit.types import Media, Prompt, Size

SETTINGS = (
    (28, 3.0),
    (28, 1.0),
    (6, 3.0),
    (6, 1.0),
    (4, 3.0),
    (4, 1.0),
    (3, 1.0),
    (2, 3.0),
    (2, 1.0),
    (1, 3.0),
    (1, 1.0),
)


def pictures(model: FlowModel, prompts: Sequence[str], steps: int, guidance: float, batch: int = 64) -> Media:
    """One picture a prompt by Euler's method on the model's own schedule."""
    table = encode_all(model, prompts)
    recipe = Recipe(steps=steps, size=Size(96, 32), guidance=guidance)
    jobs = [(i, 0) for i in range(len(prompts))]
    drawn = [m.pixels for _, m in draw(model, lambda rows: table[rows], jobs, recipe, batch)]
    return Media(torch.cat(drawn))


def spelled(media: Media, prompts: Sequence[str]) -> tuple[float, float]:
    """Share read exactly, and mean OCR score."""
    scores = load_reward("ocr")(media, [Prompt(p, i) for i, p in enumerate(prompts)])
    return float(np.mean([d["exact"] for d in scores.details])), float(scores.values.mean())


def nearest(pixels: np.ndarray, word: str) -> Sign:
    """The sign of this word that a picture [32, 96, 3] in [0, 1] is nearest to."""
    best, found = float("inf"), Sign(word, *PAIRS[0], next(iter(FONTS)))
    low, high = (np.array(c, float) for c in (GROUNDS["black"], INKS["white"]))
    for font, cell, x, y in product(FONTS, range(CELLS - len(word) + 1), X, Y):
        sign = Sign(word, "white", "black", font, cell, x, y)
        mask = ((render(sign) - low) / (high - low)).clip(0, 1)
        for ink, ground in PAIRS:
            made = mask * np.array(INKS[ink]) / 255 + (1 - mask) * np.array(GROUNDS[ground]) / 255
            distance = float(((made - pixels) ** 2).mean())
            if distance < best:
                best, found = distance, replace(sign, ink=ink, ground=ground)
    return found


def variation(found: Sequence[str], data: dict[str, float]) -> float:
    """Total variation between the shares of what was found and those of the data."""
    counts = Counter(found)
    return 0.5 * sum(abs(counts[name] / len(found) - share) for name, share in data.items())


def modes(media: Media, words: Sequence[str]) -> dict[str, float]:
    """Total variation of inks, grounds and fonts from the data, for pictures whose prompts leave them open."""
    signs = [nearest(p[0].permute(1, 2, 0).numpy(), w) for p, w in zip(media.pixels, words, strict=True)]
    shares = {
        "ink": {name: sum(i == name for i, _ in PAIRS) / len(PAIRS) for name in INKS},
        "ground": {name: sum(g == name for _, g in PAIRS) / len(PAIRS) for name in GROUNDS},
        "font": {name: 1 / len(FONTS) for name in FONTS},
    }
    return {
        name: round(variation([getattr(s, name) for s in signs], data), 4) for name, data in shares.items()
    }


@torch.no_grad()
def round_trip(model: Any, signs: Sequence[Sign]) -> dict[str, float]:
    """What the autoencoder alone keeps of rendered pictures: share still read, and mean absolute error in [-1, 1]."""
    x = torch.from_numpy(np.stack([render(s) for s in signs])).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = model.vae.decode(model.vae.encode(x).latent_dist.mean).sample
    exact, _ = spelled(Media((y / 2 + 0.5).clamp(0, 1)[:, None]), [f'"{s.word}"' for s in signs])
    return {"exact": round(exact, 3), "error": round(float((y - x).abs().mean()), 4)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", choices=["tiny-flux", "tiny-wan"])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--model", help="another model of that world, instead of the bundle")
    args = parser.parse_args()
    name = args.model or f"builtin:{args.bundle}"
    if args.bundle == "tiny-wan":
        from flowkit.assets import measure_clips

        measure_clips.measure(args.prompts, name)
        return
    model = load(name)
    rng = np.random.default_rng(20)
    prompts = [draw_prompt(rng, draw_sign(rng)) for _ in range(args.prompts)]
    found: dict[str, object] = {
        "autoencoder": round_trip(model, [draw_sign(rng) for _ in range(args.prompts)])
    }
    print(json.dumps(found), flush=True)
    for steps, guidance in SETTINGS:
        exact, mean = spelled(pictures(model, prompts, steps, guidance), prompts)
        found[f"steps {steps} guidance {guidance:g}"] = {"exact": round(exact, 3), "mean": round(mean, 3)}
        print(json.dumps(found), flush=True)
    words = [draw_sign(rng) for _ in range(args.prompts)]
    asked = [prompt_of(s, ink=False, ground=False, font=False) for s in words]
    for guidance in (1.0, 3.0):
        drawn = pictures(model, asked, 28, guidance)
        found[f"total variation, guidance {guidance:g}"] = modes(drawn, [s.word for s in words])
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
