"""`flowkit sample`: pictures or clips of prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flowkit.errors import UsageError
from flowkit.types import Prompt, Size


def command(
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeatable.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A prompt file, or builtin:NAME.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many prompts of the file.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="builtin:NAME, a folder, or a hub id; the LoRA's own base if not given."),
    ] = None,
    lora: Annotated[
        str | None, typer.Option(help="A LoRA file, or a checkpoint folder that holds one.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Full transformer weights: a file, or a folder that holds them.")
    ] = None,
    student: Annotated[
        str | None,
        typer.Option(
            help="A few-step student of `flowkit distill`: a file or checkpoint; all else is in it."
        ),
    ] = None,
    num_images: Annotated[
        int, typer.Option(min=1, help="Pictures a prompt, with seeds SEED, SEED+1, ...")
    ] = 1,
    steps: Annotated[int | None, typer.Option(help="Sampling steps; the model's own if not given.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale; 1 for none.")] = None,
    law: Annotated[str, typer.Option(help="ode, flow-sde, dance, cps or consistency.")] = "ode",
    noise_level: Annotated[float | None, typer.Option(min=0, help="Noise level of the law.")] = None,
    solver: Annotated[str, typer.Option(help="For law ode: euler, heun or unipc.")] = "euler",
    schedule: Annotated[
        str, typer.Option(help="auto, static, dynamic, unshifted, sd3-rl or rcm-teacher.")
    ] = "auto",
    shift: Annotated[
        float | None, typer.Option(min=0.001, help="Static shift (implies --schedule static).")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="WxH in pixels, or WxHxFRAMES; the model's own if not given.")
    ] = None,
    resolution: Annotated[
        str | None, typer.Option(help="480p or 720p, with --aspect, instead of --size.")
    ] = None,
    aspect: Annotated[str | None, typer.Option(help="1:1, 4:3, 3:4, 16:9 (if not given) or 9:16.")] = None,
    frames: Annotated[
        int | None,
        typer.Option(
            min=1, max=9999, help="Frames of a clip, 1 for a picture; the model's own if not given."
        ),
    ] = None,
    fps: Annotated[
        int | None, typer.Option(min=1, max=240, help="Frames a second of clips; 16 if not given.")
    ] = None,
    sigma_max: Annotated[
        float | None, typer.Option(min=0.001, help="With --student: the first noise level, tan theta.")
    ] = None,
    thetas: Annotated[
        str | None, typer.Option(help="With --student: the angles after the first, such as 1.5,1.4,1.0.")
    ] = None,
    force_guidance: Annotated[
        bool, typer.Option("--force-guidance", help="With --student: another --guidance than its own.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first picture of each prompt.")] = 0,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Pictures in one call; changes nothing but speed. 16, or 1 clip, if not given."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("samples"),
    force: Annotated[bool, typer.Option("--force", help="Replace pictures that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a sentence.")] = False,
) -> None:
    """Draw pictures or clips: PNGs or MP4s with their recipe inside, manifest.jsonl and a contact sheet."""
    from flowkit.config.grpo import LEVELS
    from flowkit.config.sections import SCHEDULE_SETTINGS
    from flowkit.data.prompts import read

    if (prompt is None) == (prompts is None):
        raise UsageError("Give prompts by --prompt TEXT (repeatable) or by --prompts FILE, one of the two.")
    if steps is not None and steps < 1:
        raise UsageError(f"--steps {steps}: at least 1 step is needed.")
    if limit is not None and prompts is None:
        raise UsageError("--limit goes with --prompts FILE.")
    if shift is not None:
        if schedule not in ("auto", "static", "sd3-rl"):
            raise UsageError(f"--shift goes with --schedule static or sd3-rl, not with {schedule}.")
        schedule = "static" if schedule == "auto" else schedule
    _one_of("--law", law, ("ode", "consistency", *LEVELS))
    _one_of("--schedule", schedule, SCHEDULE_SETTINGS)
    _one_of("--solver", solver, ("euler", "heun", "unipc"))
    _one_of("--dtype", dtype, ("float32", "bfloat16"))
    if law == "ode" and noise_level:
        raise UsageError("--noise-level goes with a noisy law, such as --law flow-sde.")
    if law == "consistency" and noise_level is not None:
        raise UsageError("--law consistency has no noise level: it draws all noise anew at every step.")
    if noise_level is not None and noise_level > LEVELS.get(law, noise_level):
        raise UsageError(f"--noise-level {noise_level:g}: law {law} takes at most {LEVELS[law]:g}.")
    missing = [key for key in SCHEDULE_SETTINGS[schedule][0] if key != "shift" or shift is None]
    if missing == ["shift"]:
        raise UsageError(f"--schedule {schedule} needs --shift.")
    if missing:
        raise UsageError(
            f"--schedule {schedule} needs {', '.join(missing)}, which only a config can give "
            "(rollout.schedule); use another schedule here."
        )
    if law != "ode" and solver != "euler":
        raise UsageError(f"--solver {solver} solves --law ode; a noisy law has its own steps.")
    pixels, frames = _size(size, resolution, aspect, frames)
    angles = _student(student, sigma_max, thetas, force_guidance, {
        "--lora": lora is not None, "--weights": weights is not None, "--law": law != "ode",
        "--schedule or --shift": schedule != "auto", "--solver": solver != "euler",
    })  # fmt: skip
    asked = (
        read(prompts)[:limit]
        if prompts is not None
        else [Prompt(text, i, where=f"--prompt {i + 1}") for i, text in enumerate(prompt or [])]
    )
    for given in asked:
        if not given.text.strip():
            raise UsageError(f"{given.where}: the prompt is empty.")

    from flowkit.assemble.sample import Ask, sample

    report = sample(
        Ask(
            model=model,
            lora=lora,
            weights=weights,
            steps=steps,
            guidance=guidance,
            size=pixels,
            law=law,
            level=0.7 if noise_level is None and law in LEVELS else noise_level or 0.0,
            solver=solver,
            schedule=schedule,
            settings={} if shift is None else {"shift": shift},
            seed=seed,
            images=num_images,
            batch=batch,
            dtype=dtype,
            device=device,
            frames=frames,
            fps=fps,
            student=student,
            sigma_max=sigma_max,
            thetas=angles,
            force_guidance=force_guidance,
        ),
        asked,
        out,
        force=force,
        progress=_progress,
    )
    if report["black_or_nan"]:
        typer.echo(
            f"{report['black_or_nan']} of {report['pictures']} pictures are black or hold nan.", err=True
        )
    if as_json:
        typer.echo(json.dumps(report))
    else:
        typer.echo(
            f"{report['pictures']} {'clips' if 'fps' in report else 'pictures'} in {report['folder']} "
            f"({report['images_per_second']:.3g} a second)"
        )
    if report["black_or_nan"] == report["pictures"]:
        raise typer.Exit(1)


def _progress(done: int, of: int, seconds: float) -> None:
    if sys.stderr.isatty():
        rate = done / seconds
        left = (of - done) / rate
        end = "\n" if done == of else ""
        typer.echo(
            f"\r{done}/{of} pictures, {rate:.3g} a second, {left:.0f} s left " + end, err=True, nl=False
        )


def _size(
    size: str | None, resolution: str | None, aspect: str | None, frames: int | None
) -> tuple[Size | None, int | None]:
    """Width and height, and frames, as the four options give them; None is the model's own."""
    from flowkit.config.sections import RESOLUTIONS, parse_size

    if resolution is not None:
        if size is not None:
            raise UsageError("Give one of --size and --resolution.")
        _one_of("--resolution", resolution, RESOLUTIONS)
        _one_of("--aspect", aspect or "16:9", RESOLUTIONS[resolution])
        return RESOLUTIONS[resolution][aspect or "16:9"], frames
    if aspect is not None:
        raise UsageError("--aspect goes with --resolution.")
    if size is None:
        return None, frames
    try:
        pixels = parse_size(size)
    except ValueError as error:
        raise UsageError(f"--size: {error}.") from None
    if size.count("x") == 1:
        return pixels, frames
    if frames not in (None, pixels.frames):
        raise UsageError(f"--size {size} and --frames {frames} say different numbers of frames.")
    return replace(pixels, frames=1), pixels.frames


def _student(
    student: str | None,
    sigma_max: float | None,
    thetas: str | None,
    force_guidance: bool,
    others: Mapping[str, bool],
) -> tuple[float, ...] | None:
    """The angles that were typed; UsageError for options that contradict --student, or need it."""
    if student is None:
        for option, given in (
            ("--sigma-max", sigma_max),
            ("--thetas", thetas),
            ("--force-guidance", force_guidance),
        ):
            if given:
                raise UsageError(f"{option} goes with --student.")
        return None
    for option, is_given in others.items():
        if is_given:
            raise UsageError(f"{option} does not go with --student, whose sampler is its own.")
    if thetas is None:
        return None
    try:
        return tuple(float(part) for part in thetas.split(","))
    except ValueError:
        raise UsageError(
            f"--thetas {thetas!r}: give angles with commas between, such as 1.5,1.4,1.0."
        ) from None


def _one_of(option: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value that is not one of the known, with the closest of them."""
    from flowkit.config.suggest import suggestion

    if value not in list(known):
        raise UsageError(f"{option} {value!r} is unknown; {suggestion(value, known)}")
