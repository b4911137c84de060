"""Held-out prompts through the plain ODE: the figure a run is judged by."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain

from flowkit.errors import UserError
from flowkit.generate import Recipe, draw, draw_latents
from flowkit.models import Cond, FlowModel
from flowkit.runtime.dist import Dist
from flowkit.types import Media, Prompt, Scores

Submit = Callable[[Media, Sequence[Prompt]], "Future[dict[str, Scores]]"]


def evaluate(
    model: FlowModel,
    conds: Callable[[Sequence[int]], Cond],
    prompts: Sequence[Prompt],
    submit: Submit,
    recipe: Recipe,
    batch: int,
    seed: int,
    dist: Dist,
    *,
    together: bool = False,
) -> dict[str, float]:
    """Mean score per reward over one picture a prompt, split over the processes.

    With `together` all processes make equally many calls of the network, as one in shards needs.

    Returns:
        `eval/<reward>_mean`, `eval/<reward>_exact` where the reward says what is exact, and
        `eval/failed`, the share of pictures that some reward could not score (they are in no mean).
    """
    parts = [list(range(i, min(i + batch, len(prompts)))) for i in range(0, len(prompts), batch)]
    mine = [(i, seed) for part in parts[dist.rank :: dist.world] for i in part]
    pending = [
        submit(media, [prompts[i] for i, _ in jobs])
        for jobs, media in draw(model, conds, mine, recipe, batch)
    ]
    if together and dist.rank >= len(parts) % dist.world > 0:
        list(draw_latents(model, conds, [(i, seed) for i in parts[0]], recipe, batch))
    own: dict[str, list[float]] = defaultdict(list)
    scored, failed = [], None
    try:
        scored = [future.result() for future in pending]
    except UserError as error:
        failed = error
    dist.all_or_none(failed)
    for scores in scored:
        for name, s in scores.items():
            values = s.values.tolist()
            own[f"eval/{name}_mean"] += values
            own[f"eval/{name}_exact"] += [
                float(d["exact"]) for d, v in zip(s.details, values, strict=True) if "exact" in d and v == v
            ]
            own["eval/failed"] += [float(math.isnan(v)) for v in values]
    rows = dist.gather_objects(dict(own))
    row = {}
    for name in sorted(set(chain.from_iterable(rows))):
        known = [v for r in rows for v in r.get(name, []) if not math.isnan(v)]
        if known:
            row[name] = sum(known) / len(known)
    return row
