"""What the reward `shapes` forgives, and what it costs: `python benchmarks/shapes_reward.py [--clips N]`.

Rendered clips, worn by noise, a shift of colour or a blur, are judged against their own full prompts. Prints the share
that is exact, and the time of a clip on one thread (of the processor, so that other work does not count).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch

from flowkit.assets.shapes import draw_scene, prompt_of, render
from flowkit.rewards import load
from flowkit.types import Media, Prompt

BLURS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)


def blurred(clips: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian blur of every frame of clips [N, F, H, W, 3], the border repeated."""
    reach = int(4 * sigma + 1)
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    for axis in (2, 3):
        wide = np.pad(clips, [(reach, reach) if i == axis else (0, 0) for i in range(5)], mode="edge")
        size = clips.shape[axis]
        clips = sum(w * np.take(wide, range(i, i + size), axis) for i, w in enumerate(weights))
    return clips


def worn(clips: np.ndarray, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """The clips as they are, and worn in one way after another."""
    yield "as rendered", clips
    yield "noise of 6/255", clips + rng.normal(0, 6, clips.shape)
    yield "colour shifted by 12/255", clips + 12 * rng.choice([-1, 1], (len(clips), 1, 1, 1, 3))
    for sigma in BLURS:
        yield f"blur of {sigma:g} pixels", blurred(clips, sigma)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=600)
    count = parser.parse_args().clips
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    scenes = [draw_scene(rng) for _ in range(count)]
    prompts = [Prompt(prompt_of(scene), i) for i, scene in enumerate(scenes)]
    reward = load("shapes")
    print("| clips | exact | ms a clip |\n|---|---|---|")
    for name, clips in worn(render(scenes).astype(np.float64), rng):
        pixels = torch.from_numpy(clips.round().clip(0, 255)).permute(0, 1, 4, 2, 3).float() / 255
        begun = time.process_time()
        details = reward(Media(pixels), prompts).details
        spent = (time.process_time() - begun) / count
        print(f"| {name} | {np.mean([d['exact'] for d in details]):.3f} | {1000 * spent:.1f} |", flush=True)


if __name__ == "__main__":
    main()
