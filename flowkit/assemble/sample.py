"""`flowkit sample`: prompts to a folder of pictures or clips."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flowkit.assemble import students
from flowkit.assemble.common import cache_folder
from flowkit.assemble.students import student_of
from flowkit.errors import UsageError
from flowkit.generate import Recipe, draw, grid_of
from flowkit.models import load, lora
from flowkit.models.bundle import Defaults
from flowkit.models.text import encode_all
from flowkit.runtime.clips import FPS, MP4, save_mp4, save_sheet, thumbnail
from flowkit.runtime.device import pick
from flowkit.runtime.files import disk_errors, remove, write_json
from flowkit.runtime.media import MANIFEST, SHEET, Row, append_row, picture_name, read_manifest, save_png
from flowkit.types import Prompt, Size

ON_SHEET, CLIPS_ON_SHEET = 64, 16


@dataclass(frozen=True)
class Ask:
    """What the command line says; what is None is the model's own.

    Attributes:
        model: name or path; None takes the base that `lora` names, else the embedded model.
        steps, guidance: None for the model's own.
        size: width and height in pixels (its frames do not count), None for the model's own.
        frames: of a clip, 1 for a picture, None for the model's own.
        images: pictures a prompt, with seeds seed, seed + 1, ...
        batch: pictures in one call, None for 16, or 1 clip.
        fps: frames a second of clips, None for 16.
        student: a few-step student: its header says base, times and guidance.
        sigma_max, thetas: other times than the student's own.
        force_guidance: let `guidance` differ from what was distilled into the student.
    """

    model: str | None
    lora: str | None
    weights: str | None
    steps: int | None
    guidance: float | None
    size: Size | None
    law: str
    level: float
    solver: str
    schedule: str
    settings: dict[str, Any]
    seed: int
    images: int
    batch: int | None
    dtype: str
    device: str
    frames: int | None = None
    fps: int | None = None
    student: str | None = None
    sigma_max: float | None = None
    thetas: tuple[float, ...] | None = None
    force_guidance: bool = False


def sample(
    ask: Ask,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    force: bool,
    progress: Callable[[int, int, float], None],
) -> dict[str, Any]:
    """Draw every prompt and write pictures, manifest and contact sheet; returns what was done, fit for JSON.

    Raises:
        UsageError: a size that the model cannot make, frames a second of a picture, a folder that holds
            pictures already.
        UserError: missing or broken weights, a LoRA that fits nothing, a full disk.
    """
    student = None if ask.student is None else student_of(ask.student)
    known = base_of(ask.lora or ask.weights) if student is None else student.base
    base = ask.model or known or "builtin:tiny-flux"
    model = load(base, dtype=ask.dtype, device=pick(ask.device))
    own = model.bundle.defaults(model.family)
    if student is None:
        recipe = recipe_of(ask, own, trained_for(ask.lora or ask.weights))
    else:
        recipe = students.recipe_of(
            student,
            size_of(ask, replace(own, size=student.size or own.size)),
            steps=ask.steps,
            sigma_max=ask.sigma_max,
            thetas=ask.thetas,
            guidance=ask.guidance,
            force_guidance=ask.force_guidance,
        )
    model.check_size(recipe.size)
    moving = recipe.size.frames > 1
    if ask.fps is not None and not moving:
        raise UsageError(f"--fps goes with clips, and {recipe.size} is a picture.")
    grid = grid_of(model, recipe.steps, recipe.size, recipe.schedule, recipe.settings)
    check_folder(out, force)
    if student is not None:
        students.put_on(model, student)
    if ask.weights is not None:
        lora.load_full(model, ask.weights)
    if ask.lora is not None:
        lora.load_lora(model, ask.lora)
    table = encode_all(model, [p.text for p in prompts], cache_folder())
    take_folder(out)
    jobs = [(n, ask.seed + k) for n in range(len(prompts)) for k in range(ask.images)]
    fps, batch = ask.fps or FPS, ask.batch or (1 if moving else 16)
    about = {
        "model": base,
        "lora": ask.lora,
        "weights": ask.weights,
        "student": ask.student,
        **recipe.as_dict(),
    }
    about |= {"fps": fps} if moving else {}
    begun, bad = time.perf_counter(), 0
    shown: list[tuple[str, Tensor]] = []
    # Noise is addressed by the prompt's index in its own file, so a part of a file draws the same pictures.
    addressed = [(prompts[n].index, seed) for n, seed in jobs]
    rows = {prompts[n].index: n for n, _ in jobs}
    done = 0
    for part, media in draw(
        model, lambda at: table[[rows[i] for i in at]].to(model.device), addressed, recipe, batch
    ):
        for (index, seed), pixels, ok in zip(part, media.pixels, media.ok.tolist(), strict=True):
            prompt = prompts[rows[index]]
            name = picture_name(index, seed, MP4 if moving else ".png")
            text = {"prompt": prompt.text, "flowkit": {**about, "index": index, "seed": seed}}
            if moving:
                save_mp4(out / name, pixels, text, fps)
            else:
                save_png(out / name, pixels[0], text)
            append_row(out, Row(name, prompt.text, index, seed, prompt.target, prompt.meta))
            bad += not ok
            if len(shown) < (CLIPS_ON_SHEET if moving else ON_SHEET):
                shown.append((f"{index} {prompt.text}", thumbnail(pixels)))
        done += len(part)
        progress(done, len(jobs), time.perf_counter() - begun)
    columns = max(1, min(ask.images if ask.images > 1 else 8, 8))
    save_sheet(out / SHEET, [p for _, p in shown], columns, [label for label, _ in shown], fps=fps)
    seconds = time.perf_counter() - begun
    report = {
        "folder": str(out),
        "pictures": len(jobs),
        "black_or_nan": bad,
        "seconds": round(seconds, 3),
        "images_per_second": round(len(jobs) / seconds, 3),
        "times": [round(t, 6) for t in grid.tolist()],
        **about,
    }
    write_json(out / "recipe.json", report)
    return report


def recipe_of(ask: Ask, own: Defaults, trained: dict[str, Any]) -> Recipe:
    """The recipe of the pictures; what was not asked for is what the weights were trained for, or the model's own."""
    schedule, settings = ask.schedule, ask.settings
    if schedule == "auto" and ask.steps is None and trained:
        settings = {k: v for k, v in trained["schedule"].items() if k != "name"}
        schedule = trained["schedule"]["name"]
    guidance = trained.get("guidance", own.guidance) if ask.guidance is None else ask.guidance
    return Recipe(
        steps=ask.steps or trained.get("steps", own.steps),
        size=size_of(ask, own),
        guidance=guidance,
        law=ask.law,
        level=ask.level,
        solver=ask.solver,
        schedule=schedule,
        settings=settings,
    )


def size_of(ask: Ask, own: Defaults) -> Size:
    """The size asked for, or the model's own."""
    return replace(ask.size or own.size, frames=ask.frames or own.size.frames)


def trained_for(weights: str | None) -> dict[str, Any]:
    """Steps, guidance and schedule that a file of flowkit's names in its header; empty for other files."""
    if weights is None:
        return {}
    from flowkit.models.weights import header_of

    header = header_of(weights)
    found: dict[str, Any] = header.get("sampler", {})
    if header.get("kind") == "student":
        raise UsageError(
            f"{weights} is a few-step student: give it as --student, which samples it as it was trained."
        )
    return found if found.keys() >= {"steps", "guidance", "schedule"} else {}


def base_of(weights: str | None) -> str | None:
    """The base model that a file of flowkit's names in its header."""
    if weights is None:
        return None
    from flowkit.models.weights import header_of

    found = header_of(weights)
    return str(found["base_model"]) if "base_model" in found else None


def check_folder(out: Path, force: bool) -> None:
    """Refuse a folder with pictures in it, unless they are to be replaced."""
    if not force and ((out / MANIFEST).exists() or any(out.glob("*.png")) or any(out.glob(f"*{MP4}"))):
        raise UsageError(f"{out} holds pictures already: name another folder, or replace them with --force")


def take_folder(out: Path) -> None:
    """Make the folder, and remove what an earlier call put there: the pictures that its manifest names."""
    if (out / MANIFEST).exists():
        for row in read_manifest(out):
            remove(out / row.file)
    for name in (MANIFEST, SHEET, "recipe.json"):
        remove(out / name)
    with disk_errors("make", out):
        out.mkdir(parents=True, exist_ok=True)
