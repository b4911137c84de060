"""(a) The sampling loop over the bare sum of its transformer calls: what flowkit adds around the network.

python benchmarks/sampling.py            # prints JSON; the ratio should stay under 1.05
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from flowkit.generate import Recipe, grid_of, solve
from flowkit.models import load
from flowkit.types import Size

BATCH, STEPS, ROUNDS = 16, 6, 15


LIMIT = 1.05


@torch.no_grad()
def main() -> None:
    """Time both in turns, so that a drift of the machine meets both alike."""
    model = load("builtin:tiny-flux")
    size = Size(96, 32)
    cond = model.encode(['the word "CAT"'] * BATCH)
    recipe = Recipe(steps=STEPS, size=size)
    grid = grid_of(model, STEPS, size)
    x = torch.randn(BATCH, *model.latent_shape(size))
    t = grid[1].expand(BATCH)

    def loop() -> None:
        solve(lambda x, t: model.velocity(x, t, cond, 1.0), x, grid, recipe, lambda step: x)

    def bare() -> None:
        for _ in range(STEPS):
            model.velocity(x, t, cond, 1.0)

    bare()  # warm
    ratios = []
    for n in range(ROUNDS):
        times = {}
        for work in (loop, bare) if n % 2 else (bare, loop):
            begun = time.perf_counter()
            work()
            times[work] = time.perf_counter() - begun
        ratios.append(times[loop] / times[bare])
    middle = statistics.median(ratios)
    print(json.dumps({"sampling_over_bare_calls": middle, "limit": LIMIT, "rounds": sorted(ratios)}))
    sys.exit(middle > LIMIT)


if __name__ == "__main__":
    main()
