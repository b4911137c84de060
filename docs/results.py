"""Make the picture of the README: `python docs/results.py runs/seed-0 runs/seed-1 runs/seed-2`.

Curves of held-out exact OCR and of the training reward, one a run, and the first run's previews before and after.
The runs are those of `flowkit grpo --preset tiny-ocr --seed N --out runs/seed-N`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def rows(run: Path) -> list[dict[str, float]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main(runs: list[Path], out: Path) -> None:
    """Draw the figure and print the gains."""
    figure = plt.figure(figsize=(10, 6.2), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(2.2, 1, 1))
    held, reward = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    for run in runs:
        table = rows(run)
        points = [(r["step"], r["eval/ocr_exact"]) for r in table if "eval/ocr_exact" in r]
        held.plot(*zip(*points, strict=True), marker="o", label=run.name)
        reward.plot(
            [r["step"] for r in table[1:]], [r["reward"] for r in table[1:]], alpha=0.8, label=run.name
        )
        minutes = sum(r.get("step_time", 0) for r in table) / 60
        first, last = points[0][1], points[-1][1]
        print(
            f"{run.name}: exact OCR {first:.3f} -> {last:.3f} ({last - first:+.3f}), {minutes:.1f} min of rounds"
        )
    held.set_title("held-out prompts read exactly (averaged weights, ODE)")
    reward.set_title("reward of the round")
    for axes in (held, reward):
        axes.set_xlabel("round")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    previews = sorted((runs[0] / "previews").glob("step-*.png"))
    for line, (name, path) in enumerate((("before", previews[0]), ("after", previews[-1]))):
        axes = figure.add_subplot(grid[1 + line, :])
        axes.imshow(plt.imread(path))
        axes.set_ylabel(name)
        axes.set(xticks=[], yticks=[])
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main([Path(a) for a in sys.argv[1:]], Path(__file__).parent / "images" / "tiny-ocr.png")
