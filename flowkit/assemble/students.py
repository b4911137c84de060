"""Few-step students on disk: what their header says, put onto the base that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowkit.config.load import Resolved
from flowkit.config.schema import GrpoConfig
from flowkit.config.sections import ScheduleConfig, parse_size
from flowkit.errors import UsageError, UserError
from flowkit.flow.student import student_thetas
from flowkit.generate import Recipe
from flowkit.models import FlowModel, lora
from flowkit.models.files import read_header
from flowkit.models.weights import file_of, header_of
from flowkit.runtime.checkpoint import newest
from flowkit.types import Size


@dataclass(frozen=True)
class Student:
    """A student's file and header.

    Attributes:
        path: the file.
        base: the model that it was distilled from.
        base_sha: fingerprint of that model's transformer.
        is_lora: whether the file holds a LoRA, or else all weights.
        sampler: sigma_max, thetas, guidance and the like, as they were trained.
        size: of the pictures or clips that it was trained on, where the file says it.
    """

    path: Path
    base: str
    base_sha: str | None
    is_lora: bool
    sampler: dict[str, Any]
    size: Size | None


def student_of(path: str | Path) -> Student:
    """Read the header of a student: a file, a checkpoint folder that holds one, or a run folder (its newest).

    Raises:
        UserError: a missing or broken file, or weights that are no student's.
    """
    folder = Path(path).expanduser()
    if (folder / "checkpoints").is_dir():
        folder = newest(folder) or folder
    place = folder / "transformer" if (folder / "transformer").is_dir() else folder
    header = header_of(place)
    sampler = header.get("sampler", {})
    if header.get("kind") != "student":
        what = f"holds {header['kind']} weights" if "kind" in header else "does not say what it holds"
        raise UserError(f"{path} {what}, and is no student of `flowkit distill`; use --lora or --weights.")
    if not sampler.keys() >= {"sigma_max", "thetas", "steps", "guidance"} or "base_model" not in header:
        raise UserError(f"{path} has a student's header without base_model or times; write it again.")
    file = file_of(place)
    names = read_header(file).keys()
    return Student(
        file,
        str(header["base_model"]),
        header.get("base_sha"),
        any(".lora_" in name for name in names),
        sampler,
        parse_size(sampler["size"]) if "size" in sampler else None,
    )


def put_on(model: FlowModel, student: Student) -> None:
    """Load a student onto its base.

    Raises:
        UserError: another base (by its transformer's fingerprint) or family, or weights that do not fit.
    """
    own = model.bundle.fingerprint("transformer")
    if student.base_sha is not None and student.base_sha != own:
        raise UserError(
            f"{student.path} is a student of {student.base} (transformer {student.base_sha[:12]}), but {model.name} "
            f"has transformer {own[:12]}: give its own base by --model."
        )
    if student.is_lora:
        lora.load_lora(model, student.path)
    else:
        lora.load_full(model, student.path)


def adopted(resolved: Resolved[GrpoConfig]) -> Resolved[GrpoConfig]:
    """The config of a run that goes on from a student, with the student's own times and guidance in it.

    Raises:
        UserError: a missing or broken file, or weights of no student.
        UsageError: a schedule, guidance or kind of training that is not the student's.
    """
    cfg = resolved.config
    assert cfg.student is not None
    student = student_of(cfg.student)
    own, rollout = student.sampler, cfg.rollout
    kind = "lora" if student.is_lora else "full"
    if cfg.train != kind:
        raise UsageError(f"{student.path} holds {kind} weights, but train is {cfg.train}: use train={kind}.")
    if rollout.guidance != own["guidance"]:
        raise UsageError(
            f"rollout.guidance is {rollout.guidance:g}, but the student samples at {own['guidance']:g}: "
            f"use rollout.guidance={own['guidance']:g}."
        )
    if rollout.schedule.name not in ("auto", "student"):
        raise UsageError(
            f"rollout.schedule is {rollout.schedule.name!r}, but a student has times of its own: use 'auto'."
        )
    times = {"sigma_max": own["sigma_max"], "thetas": tuple(own["thetas"]), **rollout.schedule.settings}
    try:
        student_thetas(max(rollout.steps, cfg.eval.steps or 1), times["sigma_max"], times["thetas"])
    except ValueError as error:
        raise UsageError(f"rollout.steps or eval.steps: {error}.") from None
    schedule = ScheduleConfig(name="student", **times)
    changed = cfg.model_copy(update={"rollout": rollout.model_copy(update={"schedule": schedule})})
    own_keys = {f"rollout.schedule.{key}": "student" for key in ("name", *times)}
    return Resolved(changed, {**resolved.sources, **own_keys})


def recipe_of(
    student: Student,
    size: Size,
    *,
    steps: int | None = None,
    sigma_max: float | None = None,
    thetas: Sequence[float] | None = None,
    guidance: float | None = None,
    force_guidance: bool = False,
) -> Recipe:
    """How a student is sampled: by its own times and guidance, where nothing else is asked for.

    Raises:
        UsageError: guidance on a student whose guidance was distilled, or more steps than it has times.
    """
    own = student.sampler
    times = tuple(own["thetas"] if thetas is None else thetas)
    if (
        guidance is not None
        and guidance != own["guidance"]
        and own.get("guidance_distilled")
        and not force_guidance
    ):
        raise UsageError(
            f"--guidance {guidance:g}: the guidance of this student is distilled into it (it samples at "
            f"{own['guidance']:g}); leave it out, or add --force-guidance."
        )
    asked = steps or min(int(own["steps"]), 1 + len(times))
    if asked > 1 + len(times):
        raise UsageError(
            f"--steps {asked}: this student has times for 1 to {1 + len(times)} steps; give more by --thetas."
        )
    first = own["sigma_max"] if sigma_max is None else sigma_max
    try:
        student_thetas(asked, first, times)
    except ValueError as error:
        raise UsageError(f"--thetas or --sigma-max: {error}.") from None
    return Recipe(
        steps=asked,
        size=size,
        guidance=own["guidance"] if guidance is None else guidance,
        law="consistency",
        schedule="student",
        settings={"sigma_max": first, "thetas": times},
    )
