"""`flowkit distill`: a few-step student of a flow model by rCM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flowkit.cli.training import again, resolved_of
from flowkit.config.load import print_config
from flowkit.config.schema import DistillConfig


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides such as dmd.scale=0.02.", metavar="[KEY=VALUE]...")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A preset; `flowkit presets ls` lists them.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config file instead of a preset.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The teacher: builtin:NAME, a folder, or a hub id.")
    ] = None,
    fd_type: Annotated[
        int | None,
        typer.Option(
            min=0, max=2, help="Derivative of the student: 0 exact, 1 differenced in time, 2 in both."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Iterations: turns of student or critic.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every draw.")] = None,
    out: Annotated[str | None, typer.Option(help="Run folder.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the student.")] = None,
    make_data: Annotated[
        bool,
        typer.Option("--make-data", help="Only let the teacher make the latents; goes on where it stopped."),
    ] = False,
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
    plot_times: Annotated[
        Path | None,
        typer.Option("--plot-times", help="Only draw the angles that training samples, as an SVG."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config with the source of each value.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON document.")] = False,
) -> None:
    """Distil a guided teacher of many steps into a student of 1 to 4, by rCM: consistency and distribution matching."""
    flags = {
        "model": model,
        "scm.fd_type": fd_type,
        "steps": steps,
        "seed": seed,
        "out": out,
        "device": device,
        "optim.lr": lr,
    }
    resolved = resolved_of("distill", DistillConfig, preset, config, flags, overrides)
    if show:
        typer.echo(print_config(resolved), nl=False)
        return
    if plot_times is not None:
        from flowkit.assemble.plot_times import plot

        plot(resolved.config, plot_times)
        typer.echo(f"the angles of training are drawn in {plot_times}")
        return
    if dry_run:
        from flowkit.assemble.plan_distill import plan, told

        typer.echo(told(plan(resolved.config, processes), as_json=as_json), nl=False)
        return
    if processes > 1:
        from flowkit.runtime.dist import launch

        raise typer.Exit(launch(processes, again(sys.argv[1:])))
    from flowkit.assemble import distill

    if make_data:
        typer.echo(f"{distill.make_data(resolved)} latents in {resolved.config.data.path}")
        return
    distill.run(resolved, resume=resume, fresh=fresh, force=force)
