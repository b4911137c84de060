"""What a distillation run is judged by on the way: held-out figures and previews of student and teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from flowkit.assemble.latents import teachers
from flowkit.config.distill import DistillConfig
from flowkit.evaluate.heldout import evaluate
from flowkit.generate import Recipe, draw
from flowkit.models import Cond, FlowModel
from flowkit.models.roles import Role
from flowkit.rewards.pool import RewardPool
from flowkit.runtime.clips import save_sheet, thumbnail
from flowkit.runtime.dist import Dist
from flowkit.trainers.rcm import World
from flowkit.trainers.state import DistillState
from flowkit.types import Prompt


class Judge:
    """Held-out figures and previews: the averaged student at each number of steps, the teacher at the start."""

    def __init__(
        self,
        cfg: DistillConfig,
        world: World,
        state: DistillState,
        prompts: Sequence[Prompt],
        conds: Callable[[Sequence[int]], Cond] | None,
        pool: RewardPool | None,
        dist: Dist,
    ) -> None:
        self.cfg, self.world, self.state, self.prompts = cfg, world, state, prompts
        self.conds, self.pool, self.dist = conds, pool, dist

    def evaluate(self) -> dict[str, float]:
        """`eval/student-N_<reward>_<figure>` for each N of eval.steps, and at step 0 `eval/teacher-N_...`."""
        asked: list[tuple[Role, int]] = [("student", n) for n in self.cfg.eval.steps]
        if self.state.step == 0:
            asked = [*(("teacher", n) for n in self.cfg.eval.teacher_steps), *asked]
        row: dict[str, float] = {}
        if self.conds is None or self.pool is None:
            return row
        for role, n in asked:
            with self.shown(role, averaged=True) as model:
                found = evaluate(
                    model,
                    self.conds,
                    self.prompts,
                    self.pool.submit,
                    self.recipe(role, n),
                    self.cfg.eval.batch,
                    self.cfg.seed,
                    self.dist,
                    together=self.cfg.shard,
                )
            row |= {name.replace("eval/", f"eval/{role}-{n}_"): value for name, value in found.items()}
        return row

    def preview(self, path: Path) -> None:
        """The same prompts and noise for the student, its average, and the teacher, a row each."""
        if self.conds is None or not (self.dist.main or self.cfg.shard):
            return
        jobs = [(i, self.cfg.seed) for i in range(min(self.cfg.preview.prompts, len(self.prompts)))]
        rows: list[tuple[Role, bool, int, str]] = [
            *(("student", False, n, f"raw {n}") for n in self.cfg.eval.steps),
            *(("student", True, n, f"ema {n}") for n in self.cfg.eval.steps),
            ("teacher", True, self.cfg.teacher.steps, f"teacher {self.cfg.teacher.steps}"),
        ]
        shown = []
        for role, averaged, n, label in rows:
            with self.shown(role, averaged=averaged) as model:
                for part, media in draw(model, self.conds, jobs, self.recipe(role, n), self.cfg.eval.batch):
                    shown += [(f"{label} {i}", thumbnail(media.pixels[k])) for k, (i, _) in enumerate(part)]
        text = {"prompts": [self.prompts[i].text for i, _ in jobs], "step": self.state.step}
        if self.dist.main:
            save_sheet(path, [p for _, p in shown], len(jobs), [label for label, _ in shown], text)

    @contextmanager
    def shown(self, role: Role, *, averaged: bool) -> Iterator[FlowModel]:
        """The network of a role, with the student's average in it."""
        with ExitStack() as stack:
            if averaged and role == "student":
                stack.enter_context(self.state.student.averaged())
            yield stack.enter_context(self.world.roles.wear(role))

    def recipe(self, role: Role, steps: int) -> Recipe:
        """How a role is sampled."""
        c, s = self.cfg, self.cfg.student
        if role == "student":
            settings = {"sigma_max": s.sigma_max, "thetas": s.thetas}
            return Recipe(
                steps=steps,
                size=c.pixels,
                guidance=self.world.own_guidance,
                law="consistency",
                schedule="student",
                settings=settings,
            )
        return replace(teachers(c), steps=steps)
