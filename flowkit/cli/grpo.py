"""`flowkit grpo`: online RL of a flow model with reward models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flowkit.cli.training import again, resolved_of
from flowkit.config.load import print_config
from flowkit.config.schema import GrpoConfig


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides such as optim.lr=1e-4.", metavar="[KEY=VALUE]...")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A preset; `flowkit presets ls` lists them.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config file instead of a preset.")] = None,
    model: Annotated[str | None, typer.Option(help="builtin:NAME, a folder, or a hub id.")] = None,
    student: Annotated[
        str | None,
        typer.Option(help="A few-step student of `flowkit distill` to train further, at its own times."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Rounds of rollouts.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every draw.")] = None,
    out: Annotated[str | None, typer.Option(help="Run folder.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Start this many processes on this machine (or use torchrun).")
    ] = 1,
    resume: Annotated[Path | None, typer.Option(help="A checkpoint or run folder to go on from.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; with --force where a run would be deleted.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete what stands in the way.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything that needs no weights, and say what would run."),
    ] = False,
    show: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config with the source of each value.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON document.")] = False,
) -> None:
    """Train a flow model by Flow-GRPO: groups of pictures, scored, compared, and made likelier or less so."""
    flags = {
        "model": model,
        "student": student,
        "steps": steps,
        "seed": seed,
        "out": out,
        "device": device,
        "optim.lr": lr,
    }
    resolved = resolved_of("grpo", GrpoConfig, preset, config, flags, overrides)
    if resolved.config.student is not None:
        from flowkit.assemble.students import adopted

        resolved = adopted(resolved)
    if show:
        typer.echo(print_config(resolved), nl=False)
        return
    if dry_run:
        from flowkit.assemble.plan import plan, told

        found = plan(resolved.config, processes)
        typer.echo(told(found, as_json=as_json), nl=False)
        return
    if processes > 1:
        from flowkit.runtime.dist import launch

        raise typer.Exit(launch(processes, again(sys.argv[1:])))
    from flowkit.assemble.grpo import run

    run(resolved, resume=resume, fresh=fresh, force=force)
