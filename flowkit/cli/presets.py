"""`flowkit presets`: list, show and copy the configs that ship with flowkit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowkit.cli.common import Force, Json, emit, emit_table
from flowkit.config import presets
from flowkit.config.strict_yaml import load_yaml

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def about() -> None:
    """List, show and copy the presets: commented configs to run as they are or to start from."""


@app.command("ls")
def list_presets(as_json: Json = False) -> None:
    """List the presets: name, verb, model, and what each is for."""
    rows = []
    for name in presets.names():
        path = presets.find(name)
        row = {"name": name, "verb": presets.algorithm_of(path), "model": load_yaml(path).data.get("model")}
        rows.append({**row, "about": presets.about(path), "file": str(path)})
    if as_json:
        emit(rows)
    else:
        emit_table([[str(row[key]) for key in ("name", "verb", "model", "about")] for row in rows])


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="A preset.")]) -> None:
    """Print a preset with its comments."""
    typer.echo(presets.find(name).read_text(encoding="utf-8"), nl=False)


@app.command("cp")
def copy(
    name: Annotated[str, typer.Argument(help="A preset.")],
    dest: Annotated[Path, typer.Argument(help="A new file, or a folder.")],
    force: Force = False,
) -> None:
    """Copy a preset, to be changed and run with --config; nothing is replaced without --force."""
    typer.echo(presets.copy(name, dest, force=force))
