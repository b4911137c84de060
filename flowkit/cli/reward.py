"""`flowkit reward`: score a folder of pictures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowkit.errors import UsageError

if TYPE_CHECKING:
    from flowkit.score import Report


def command(
    folder: Annotated[
        Path, typer.Argument(help="Pictures or .mp4 clips, with manifest.jsonl or with --prompts.")
    ],
    reward: Annotated[
        list[str],
        typer.Option(
            "--reward", "-r", help="A reward, or NAME=WEIGHT; repeatable. ocr, jpeg, my_pkg.mod:fn ..."
        ),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(help="Prompt file, one prompt a picture, for a folder without manifest.jsonl."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write; FOLDER/scores.jsonl if not given.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that score; 0 for none but this.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Pictures, or frames, in one call of a reward.")] = 32,
    max_failed: Annotated[
        float, typer.Option(min=0, max=1, help="Share of pictures that may stay without a score.")
    ] = 0.2,
    force: Annotated[bool, typer.Option("--force", help="Overwrite scores.jsonl.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
) -> None:
    """Score pictures: a table of the rewards, and scores.jsonl with what each reward saw."""
    from flowkit.score import score_folder

    weights = parse(reward)
    report = score_folder(
        folder,
        weights,
        prompts=prompts,
        out=out,
        workers=workers,
        batch=batch,
        force=force,
        progress=_progress,
    )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), ensure_ascii=False))
    elif sys.stdout.isatty():
        _rich(report)
    else:
        typer.echo(plain(report))
    report.refuse(max_failed)


def parse(rewards: list[str]) -> dict[str, float]:
    """Rewards as typed, NAME or NAME=WEIGHT, to weights by name; UsageError for what is neither.

    >>> parse(["ocr", "jpeg=0.1"])
    {'ocr': 1.0, 'jpeg': 0.1}
    """
    weights: dict[str, float] = {}
    for text in rewards:
        name, equals, weight = text.partition("=")
        try:
            value = float(weight) if equals else 1.0
        except ValueError:
            value = math.nan
        if not name or not math.isfinite(value):
            raise UsageError(f"--reward {text}: write NAME or NAME=WEIGHT, such as jpeg=0.1")
        if name in weights:
            raise UsageError(f"--reward {name} stands twice: give it once, with its weight")
        weights[name] = value
    return weights


HEAD = ("reward", "weight", "mean", "std", "nan", "exact")


def table(report: Report) -> Sequence[tuple[str, ...]]:
    """The rows under HEAD: one a reward, and the total when there are several."""
    rows = []
    for name, one in report.rewards.items():
        weight = f"{report.weights[name]:g}" if name in report.weights else ""
        rows.append((name, weight, _figure(one.mean), _figure(one.std), str(one.nan), _figure(one.exact)))
    return rows if len(report.weights) > 1 else rows[:1]


def plain(report: Report) -> str:
    """The table and the counts as lines of text."""
    rows = [HEAD, *table(report)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, foot(report)])


def foot(report: Report) -> str:
    """One line under the table: how many pictures, how many without a score, and where the details are."""
    lost = f", {report.failed} failed, {report.unfit} black or nan" if report.failed or report.unfit else ""
    return f"{report.pictures} pictures{lost}; details in {report.scores}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{done}/{of} pictures" + ("\n" if done == of else ""), err=True, nl=False)


def _rich(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(*HEAD)
    for row in table(report):
        shown.add_row(*row)
    console = Console()
    console.print(shown)
    console.print(foot(report), markup=False, highlight=False)
