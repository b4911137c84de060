"""What a round of Flow-GRPO consists of, and what it prints.

A round is a list of chunks. A chunk is a batch of trajectories that is rolled out, replayed and summed as
one, so a replay has the shapes of its rollout and the ratio starts at exactly 1. Which samples belong to
one optimizer step is decided by groups alone: chunk size and process count never change the gradient.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowkit.rollout import Trajectories
from flowkit.runtime.dist import Dist
from flowkit.trainers.meters import Row, mean
from flowkit.types import Scores


@dataclass
class Chunk:
    """A batch of trajectories: rows of whole or part groups, in one optimizer step."""

    update: int
    group: list[int]  # [B] slot of the round, one per prompt draw
    prompt: list[int]  # [B]
    sample: list[int]  # [B] member of its group
    kept: Trajectories | None = None
    future: Future[dict[str, Scores]] | None = None
    advantage: Tensor | None = None  # [B] on the model's device
    alive: list[bool] = field(default_factory=list)  # [B]
    rows: Tensor | None = (
        None  # int64: the living of them, on the model's device, so that picking them never waits
    )
    scores: dict[str, Tensor] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)  # why pictures have no score

    def __len__(self) -> int:
        return len(self.prompt)


def split(updates: Sequence[int], drawn: Sequence[int], base: int, samples: int, micro: int) -> list[Chunk]:
    """Cut the groups of each optimizer step into chunks of at most `micro` trajectories.

    >>> [(c.update, c.group, c.sample) for c in split([0, 1], [7, 9], 0, 3, 2)]
    [(0, [0, 0], [0, 1]), (0, [0], [2]), (1, [1, 1], [0, 1]), (1, [1], [2])]
    """
    chunks = []
    for update in sorted(set(updates)):
        rows = [
            (base + g, prompt, k)
            for g, (u, prompt) in enumerate(zip(updates, drawn, strict=True))
            if u == update
            for k in range(samples)
        ]
        for i in range(0, len(rows), micro):
            group, prompt, sample = zip(*rows[i : i + micro], strict=True)
            chunks.append(Chunk(update, list(group), list(prompt), list(sample)))
    return chunks


def dead_slots(mine: Sequence[Chunk], dist: Dist) -> set[int]:
    """Slots in which no trajectory of any process may be trained on."""
    seen: dict[int, bool] = defaultdict(bool)
    own = [(g, a) for c in mine for g, a in zip(c.group, c.alive, strict=True)]
    for g, alive in itertools.chain.from_iterable(dist.gather_objects(own)):
        seen[g] |= alive
    return {g for g, alive in seen.items() if not alive}


def len_of(chunks: Sequence[Chunk], dist: Dist) -> int:
    """Trajectories of all processes."""
    return sum(dist.gather_objects(sum(len(c) for c in chunks)))


def round_metrics(chunks: Sequence[Chunk], dist: Dist) -> Row:
    """Rewards of the round, over all processes, with TRL's names where they exist."""
    own: dict[str, list[float]] = defaultdict(list)
    for chunk in chunks:
        for name, values in chunk.scores.items():
            own[name] += values.tolist()
    groups = [
        (g, value) for c in chunks for g, value in zip(c.group, c.scores["total"].tolist(), strict=True)
    ]
    rows, members = dist.gather_objects(dict(own)), itertools.chain.from_iterable(dist.gather_objects(groups))
    joined = {
        name: torch.tensor([v for r in rows for v in r.get(name, [])], dtype=torch.float64)
        for name in sorted(set(itertools.chain.from_iterable(rows)))
    }
    by_group: dict[int, list[float]] = defaultdict(list)
    for g, value in members:
        if value == value:
            by_group[g].append(value)
    spread = [torch.tensor(v, dtype=torch.float64).std(unbiased=False).item() for v in by_group.values()]
    flat = [min(v) == max(v) for v in by_group.values()]
    whole = joined.pop("total")
    row = {
        "reward": whole.nanmean().item(),
        "reward_std": mean(spread),
        "frac_reward_zero_std": mean([float(f) for f in flat]),
        "frac_failed": 1 - whole.isfinite().double().mean().item(),
    }
    for name, values in joined.items():
        row[f"rewards/{name}/mean"] = values.nanmean().item()
    return row
