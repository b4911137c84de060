"""Compare students with their teacher: `python docs/distill_results.py RUN... [--prompts N] [--samples K]`.

Each RUN is a folder of `flowkit distill`, all of one model. Prints one table: score and, where the reward says it,
exact share; spread of the samples of a prompt over the teacher's, in pixels and, for things that move, in what is seen
(place, size, speed, ground); energy distance to the teacher's samples, over that
spread (its other seeds are the floor); seconds to draw all latents. Writes a sheet of pictures with --sheet FILE.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowkit.assemble.students import put_on, recipe_of, student_of
from flowkit.config.distill import DistillConfig
from flowkit.config.load import resolve
from flowkit.data.prompts import read
from flowkit.evaluate.diversity import diversity
from flowkit.evaluate.spread import energy_distance, spread
from flowkit.generate import Recipe, draw_latents
from flowkit.models import FlowModel, load
from flowkit.models.text import encode_all
from flowkit.rewards import load as load_reward
from flowkit.runtime.clips import save_sheet, thumbnail
from flowkit.types import Media, Prompt


class Bench:
    """The prompts of a run, encoded, and its reward."""

    def __init__(self, cfg: DistillConfig, prompts: int, samples: int) -> None:
        self.cfg, self.samples = cfg, samples
        self.model = load(cfg.model)
        asked = read(cfg.eval.prompts or "")
        self.prompts = asked[:: max(1, len(asked) // prompts)][:prompts]
        self.table = encode_all(self.model, [p.text for p in self.prompts])
        self.reward = load_reward(next(iter(cfg.reward)))
        self.seen: list[list[Any]] = []

    def drawn(self, model: FlowModel, recipe: Recipe, seed: int) -> tuple[Tensor, float]:
        """Pixels [P, K, F, 3, H, W], and the seconds that their latents took (decoding is the same for all)."""
        jobs = [(i, seed + k) for i in range(len(self.prompts)) for k in range(self.samples)]
        begun = time.perf_counter()
        latents = [x0 for _, x0 in draw_latents(model, lambda rows: self.table[rows], jobs, recipe, 32)]
        seconds = time.perf_counter() - begun
        parts = [model.decode(x0).pixels for x0 in latents]
        return torch.cat(parts).unflatten(0, (len(self.prompts), self.samples)), seconds

    def judged(self, pixels: Tensor, theirs: Tensor, seconds: float) -> dict[str, float]:
        """The row of one sampler; `theirs` are the teacher's."""
        asked: list[Prompt] = [p for p in self.prompts for _ in range(self.samples)]
        media = Media(pixels.flatten(0, 1))
        values, details = [], []
        for i in range(0, len(asked), 32):
            scores = self.reward(Media(media.pixels[i : i + 32]), asked[i : i + 32])
            values += scores.values.tolist()
            details += scores.details
        exact = [float(d["exact"]) for d in details if "exact" in d]
        groups = [details[i : i + self.samples] for i in range(0, len(details), self.samples)]
        self.seen = self.seen or groups  # the teacher's come first
        choice = [diversity(a, b).mean for a, b in zip(groups, self.seen, strict=True) if wide_enough(b)]
        wide = [spread(a) for a in theirs]
        return {
            "mean": mean_known(values),
            "exact": mean_known(exact),
            "choice": mean_known(choice),
            "spread": sum(spread(a) for a in pixels) / sum(wide),
            "energy": sum(energy_distance(a, b) for a, b in zip(pixels, theirs, strict=True)) / sum(wide),
            "seconds": seconds,
        }


def mean_known(values: list[float]) -> float:
    """The mean without nan; nan where nothing else is left."""
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def wide_enough(details: list[Any]) -> bool:
    """Whether the teacher's clips of a prompt show things whose choice can be measured."""
    return sum("x" in d and "fault" not in d and "error" not in d for d in details) > 1


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 3, 2, 1])
    parser.add_argument("--sheet", type=Path)
    args = parser.parse_args()
    cfg = resolve(DistillConfig, args.runs[0] / "config.yaml").config
    bench = Bench(cfg, args.prompts, args.samples)
    t = cfg.teacher

    def teacher(steps: int) -> Recipe:
        settings = t.schedule.settings
        return Recipe(
            steps=steps, size=cfg.pixels, guidance=t.guidance, schedule=t.schedule.name, settings=settings
        )

    theirs, seconds = bench.drawn(bench.model, teacher(t.steps), 0)
    rows = {f"teacher, {t.steps} steps": bench.judged(theirs, theirs, seconds)}
    shown = [(f"teacher {t.steps}", theirs[:8, 0])]
    others, _ = bench.drawn(bench.model, teacher(t.steps), 10_000)
    rows[f"teacher, {t.steps} steps, other seeds"] = bench.judged(others, theirs, seconds)
    for n in args.steps:
        pixels, seconds = bench.drawn(bench.model, teacher(n), 30_000)
        rows[f"teacher, {n} steps"] = bench.judged(pixels, theirs, seconds)
        shown.append((f"teacher {n}", pixels[:8, 0]))
    for run in args.runs:
        student = student_of(run)
        model = load(cfg.model)
        put_on(model, student)
        for n in args.steps:
            pixels, seconds = bench.drawn(model, recipe_of(student, cfg.pixels, steps=n), 20_000)
            rows[f"{run.name}, {n} steps"] = bench.judged(pixels, theirs, seconds)
            shown.append((f"{run.name} {n}", pixels[:8, 0]))
    print("| | exact | mean | spread | choice | energy distance | seconds |\n|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        keys = ("exact", "mean", "spread", "choice", "energy", "seconds")
        numbers = ["-" if math.isnan(row[key]) else f"{row[key]:.3f}" for key in keys]
        print(f"| {name} | {' | '.join(numbers)} |")
    print(json.dumps(rows))
    if args.sheet:
        pictures = [thumbnail(p) for _, part in shown for p in part]
        save_sheet(args.sheet, pictures, 8, [name for name, part in shown for _ in part])


if __name__ == "__main__":
    main()
