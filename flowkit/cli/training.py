"""What the training verbs share: the config of a command line, and the same line for several processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flowkit.config.load import Resolved, override, resolve
from flowkit.config.presets import algorithm_of, find
from flowkit.config.sections import RunConfig
from flowkit.errors import UsageError

T = TypeVar("T", bound=RunConfig)


def resolved_of(
    verb: str,
    schema: type[T],
    preset: str | None,
    config: Path | None,
    flags: Mapping[str, Any],
    overrides: Sequence[str] | None,
) -> Resolved[T]:
    """The config that a preset or a file, flags and overrides make together; the later ones hold.

    Args:
        verb: what was typed.
        schema: its config.
        preset: name of a preset, or None.
        config: a config file, or None.
        flags: dotted key -> value, None for a flag that was not given.
        overrides: KEY=VALUE.

    Raises:
        UsageError: neither or both of preset and config, a file of another verb, or a wrong value.
    """
    if (preset is None) == (config is None):
        raise UsageError(
            "Give one of --preset NAME and --config FILE; `flowkit presets ls` lists the presets."
        )
    file = find(preset) if preset is not None else config
    if file is None:
        raise AssertionError("one of preset and config is given")
    own = algorithm_of(file)
    if own != verb:
        raise UsageError(f"{file.name} is a config of `flowkit {own}`, not of `flowkit {verb}`.")
    given = [override(key, value) for key, value in flags.items() if value is not None]
    return resolve(schema, file, [*given, *(overrides or [])])


def again(arguments: list[str]) -> list[str]:
    """The same command line for one of several processes: without --processes.

    >>> again(["grpo", "--processes", "2", "--steps=3", "--processes=2"])[-2:]
    ['grpo', '--steps=3']
    """
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--processes="):
            skip = False
        elif argument == "--processes":
            skip = True
        else:
            kept.append(argument)
    return [sys.executable, "-m", "flowkit", *kept]
