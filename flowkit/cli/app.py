"""The `flowkit` command: a table of verbs, loaded when they are called, and the exit codes.

0 ok, 1 failed, 2 wrong usage or config, 130 and 143 ended by Ctrl-C and SIGTERM. `flowkit --help` imports
neither torch nor any verb.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flowkit.errors import UserError

VERBS: dict[str, tuple[str, str]] = {  # verb: 'module:Typer app or function', what the list of verbs says
    "sample": ("flowkit.cli.sample:command", "Draw pictures from prompts."),
    "reward": ("flowkit.cli.reward:command", "Score pictures with reward models."),
    "grpo": ("flowkit.cli.grpo:command", "Train a model by online RL on rewards (Flow-GRPO)."),
    "distill": ("flowkit.cli.distill:command", "Distil a few-step student of a model (rCM)."),
    "presets": ("flowkit.cli.presets:app", "List, show and copy the presets."),
    "doctor": ("flowkit.cli.doctor:command", "Tell what this machine has and what is missing."),
}
_DISK = {  # what a user can mend: the fix
    errno.ENOSPC: "free some space or write elsewhere",
    errno.EDQUOT: "free some space or write elsewhere",
    errno.EROFS: "write elsewhere",
    errno.EACCES: "change its rights or use another place",
    errno.EPERM: "change its rights or use another place",
}


def verbs() -> dict[str, str]:
    """The verbs whose module is there, and what each says of itself; no module is imported."""
    return {
        name: about
        for name, (target, about) in VERBS.items()
        if importlib.util.find_spec(target.partition(":")[0]) is not None
    }


class LazyGroup(TyperGroup):
    """A group that lists verbs from the table and imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=about) for name, about in verbs().items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the verb, and only now import it."""
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub if name is None else _load(name), rest


app = typer.Typer(
    name="flowkit",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: the same on a terminal and in a pipe, and quick
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        import flowkit

        typer.echo(f"flowkit {flowkit.__version__}")
        raise typer.Exit


@app.callback()
def flowkit_(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and debug messages; works after a verb too.")
    ] = False,
) -> None:
    """Post-train flow-matching image generators: online RL with reward models, sampling and scoring."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code; an error of the user is one sentence on stderr."""
    # Before torch comes in: its idle threads shall sleep, not spin on the cores where rewards are scored.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug, rest = _take_debug(sys.argv[1:] if arguments is None else arguments)
    _log_to_stderr(debug)
    try:
        with _sigterm_exits():
            typer.main.get_command(app).main(args=rest, prog_name="flowkit")
    except SystemExit as done:
        if isinstance(done.code, int):
            return done.code
        raise
    except UserError as error:
        return _tell(str(error), error.code, debug, by_main=error.told_by_main)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        place = "" if error.filename is None else f"{error.filename}: "
        reason = f"{error.strerror or 'the disk refuses'}; {_DISK[error.errno]}"
        return _tell(f"{place}{reason}", 1, debug)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _load(name: str) -> TyperCommand | TyperGroup:
    module, _, attribute = VERBS[name][0].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, rich_markup_mode=None)
        found.command(name)(function)
    command = typer.main.get_command(found)
    assert isinstance(command, (TyperCommand, TyperGroup))
    command.name = name
    return command


def _take_debug(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether --debug stands anywhere before a bare `--`, and the arguments without it.

    >>> _take_debug(["grpo", "--debug", "--", "--debug"])
    (True, ['grpo', '--', '--debug'])
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(rest) < end, [*rest, *arguments[end:]]


def _tell(sentence: str, code: int, debug: bool, *, by_main: bool = False) -> int:
    if debug:
        traceback.print_exc()
    rank = os.environ.get("RANK", "0")  # of several processes each may fail in its own way: say who speaks
    if rank != "0" and by_main:
        return code
    who = "" if rank == "0" else f" (process {rank})"
    typer.echo(f"Error{who}: {sentence}", err=True)
    return code


class _ToStderr(logging.StreamHandler[Any]):
    """Writes to what sys.stderr is when the message comes."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("the stream is always sys.stderr")


def _log_to_stderr(debug: bool) -> None:
    """Show flowkit's own log messages, and nobody else's, on stderr."""
    logger = logging.getLogger("flowkit")
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.handlers = [_ToStderr()]


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that files and worker processes are closed, and the exit code is 143."""
    main_thread = threading.current_thread() is threading.main_thread()
    ours = main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _exit_by_signal)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
