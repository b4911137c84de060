"""What several verbs share: options, and results on stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def emit(document: Any) -> None:
    """Write one JSON document to stdout; nan and infinity, which JSON does not have, become null."""
    typer.echo(json.dumps(_finite(document), ensure_ascii=False, allow_nan=False, indent=2))


def emit_table(rows: Sequence[Sequence[str]]) -> None:
    """Write rows to stdout in columns as wide as their longest entry; the last is left ragged."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        typer.echo("  ".join([*cells, row[-1]]).rstrip())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
