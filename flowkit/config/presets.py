"""The presets that ship with flowkit: found, listed, copied; in a checkout and in a wheel alike."""

from __future__ import annotations

from pathlib import Path

import flowkit
from flowkit.config.schema import SCHEMAS
from flowkit.config.strict_yaml import load_yaml
from flowkit.config.suggest import suggestion
from flowkit.errors import UsageError, UserError


def folder() -> Path:
    """Where presets lie: inside the package in a wheel, beside it in a checkout."""
    package = Path(flowkit.__file__).parent
    shipped = package / "presets"
    return shipped if shipped.is_dir() else package.parent / "presets"


def names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a preset; UsageError with the closest name for one that is not there."""
    if name not in names():
        raise UsageError(f"there is no preset {name!r}; {suggestion(name, names())}")
    return folder() / f"{name}.yaml"


def prompt_names() -> list[str]:
    """The names of the prompt lists that `builtin:NAME` finds, sorted."""
    return sorted(path.stem for path in (folder() / "prompts").glob("*.txt"))


def prompt_file(name: str) -> Path:
    """The file behind `builtin:NAME`; UsageError with the closest name for one that is not there."""
    if name not in prompt_names():
        guess = suggestion(f"builtin:{name}", [f"builtin:{known}" for known in prompt_names()])
        raise UsageError(f"there is no prompt list 'builtin:{name}'; {guess}")
    return folder() / "prompts" / f"{name}.txt"


def copy(name: str, dest: str | Path, *, force: bool = False) -> Path:
    """Copy a preset to a file, or into a folder under its own name; `force` replaces what is there."""
    source, target = find(name), Path(dest)
    if target.is_dir():
        target = target / source.name
    if target.exists() and not force:
        raise UserError(f"{target} exists already; name another file, or give --force to replace it")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such folder; make it first")
    target.write_bytes(source.read_bytes())
    return target


def algorithm_of(path: str | Path) -> str:
    """The algorithm that a config file is for, which is also the verb that runs it."""
    document = load_yaml(path)
    value = document.data.get("algorithm")
    if not isinstance(value, str) or value not in SCHEMAS:
        line = document.lines.get(("algorithm",))
        place = document.name if line is None else f"{document.name}:{line}"
        if value is None:
            raise UsageError(f"{place}: the key 'algorithm' is missing; it says which verb runs this file")
        raise UsageError(f"{place}: there is no algorithm {value!r}; {suggestion(str(value), SCHEMAS)}")
    return value


def about(path: str | Path) -> str:
    """What a preset says of itself: the comment in its first line."""
    first = Path(path).read_text(encoding="utf-8-sig").partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""
