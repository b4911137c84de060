"""Prompts to pictures: the sampler that `flowkit sample`, evaluation and previews share.

The noise of a picture depends on its seed and the index of its prompt alone: not on the batch, nor on the
other prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flowkit.errors import UsageError
from flowkit.flow.laws import LAWS
from flowkit.flow.schedule import SCHEDULES, mu_of
from flowkit.flow.solvers import SOLVERS
from flowkit.models import Cond, FlowModel
from flowkit.models.unipc import unipc
from flowkit.rollout import Velocity
from flowkit.runtime.seeds import noise
from flowkit.types import Media, Size

SOLVER_NAMES = (*SOLVERS, "unipc")
Job = tuple[int, int]  # index of the prompt, seed


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a picture besides the weights, the prompt and the index.

    Attributes:
        steps: network calls of the Euler solver.
        size: pixels.
        guidance: scale of the guidance, 1 for none.
        law: how a step is drawn; `ode` is solved by `solver`.
        level: the law's noise level.
        solver: euler, heun or unipc.
        schedule: name in SCHEDULES, or auto for the model's own.
        settings: what the named schedule takes, such as shift.
    """

    steps: int
    size: Size
    guidance: float = 1.0
    law: str = "ode"
    level: float = 0.0
    t_at_one: float | None = None
    solver: str = "euler"
    schedule: str = "auto"
    settings: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return {**asdict(self), "size": str(self.size)}


def grid_of(
    model: FlowModel, steps: int, size: Size, schedule: str = "auto", settings: dict[str, Any] | None = None
) -> Tensor:
    """The grid of times [steps + 1], float32, falling to 0: one function for rollout, replay, preview and eval.

    Raises:
        UsageError: the schedule does not take a setting, needs one that is not given, or has no grid of so many steps.
    """
    settings = dict(settings or {})
    if schedule == "auto":
        return model.schedule(steps, size).float()
    if schedule == "dynamic":
        settings.setdefault("mu", mu_of(model.shape.tokens(size)))
    try:
        return SCHEDULES[schedule](steps, **settings).float()
    except (TypeError, ValueError) as error:
        raise UsageError(f"schedule {schedule!r}: {error}") from None


def solve(
    velocity: Velocity, x: Tensor, grid: Tensor, recipe: Recipe, drawn: Callable[[int], Tensor]
) -> Tensor:
    """Walk noise x [B, ...] to data by the recipe; `drawn(step)` gives the noise of a noisy step."""
    if recipe.law == "ode":
        return (
            unipc(velocity, x, grid)
            if recipe.solver == "unipc"
            else SOLVERS[recipe.solver](velocity, x, grid)
        )
    for step, (t, s) in enumerate(pairwise(grid)):
        v = velocity(x, t.to(x).expand(len(x)))
        mean, std = LAWS[recipe.law](x, v, t, s, recipe.level, t_at_one=recipe.t_at_one)
        x = mean + std * drawn(step)
    return x


def draw(
    model: FlowModel,
    conds: Callable[[Sequence[int]], Cond],
    jobs: Sequence[Job],
    recipe: Recipe,
    batch: int,
) -> Iterator[tuple[Sequence[Job], Media]]:
    """Pictures of jobs, `batch` at a time, in order."""
    for part, x0 in draw_latents(model, conds, jobs, recipe, batch):
        yield part, model.decode(x0)


@torch.no_grad()
def draw_latents(
    model: FlowModel,
    conds: Callable[[Sequence[int]], Cond],
    jobs: Sequence[Job],
    recipe: Recipe,
    batch: int,
) -> Iterator[tuple[Sequence[Job], Tensor]]:
    """The latents of jobs [B, ...], `batch` at a time, in order."""
    grid = grid_of(model, recipe.steps, recipe.size, recipe.schedule, recipe.settings).to(model.device)
    shape = model.latent_shape(recipe.size)
    for start in range(0, len(jobs), batch):
        part = jobs[start : start + batch]
        cond = conds([i for i, _ in part])

        def drawn(*what: int | str, part: Sequence[Job] = part) -> Tensor:
            each = [noise(shape, seed, "sample", i, *what) for i, seed in part]
            return torch.stack(each).to(model.device)

        def velocity(x: Tensor, t: Tensor, cond: Cond = cond) -> Tensor:
            return model.velocity(x, t, cond, recipe.guidance)

        yield part, solve(velocity, drawn("start") * grid[0], grid, recipe, lambda step: drawn("step", step))
