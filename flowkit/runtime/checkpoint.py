"""Checkpoints that are complete or absent: `checkpoints/step-000100/` in a run folder.

A checkpoint is written into a partial folder and renamed when all of it is on the disk; the name is the
mark of completeness. It is renamed back before it is removed, so a kill at any moment leaves nothing
that looks complete and is not.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from pathlib import Path

from flowkit.runtime.files import disk_errors, remove, sync, sync_tree

_COMPLETE = re.compile(r"step-(\d{6,})")
_PARTIAL = re.compile(r"step-\d{6,}\.partial-[0-9a-f]+")


def name_of(step: int) -> str:
    """The folder's name of a step.

    >>> name_of(100)
    'step-000100'
    """
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step of a complete checkpoint, or None for anything else: partial, stray, empty, not a folder."""
    match = _COMPLETE.fullmatch(path.name)
    if not match or path.name != name_of(int(match[1])) or not path.is_dir() or not any(path.iterdir()):
        return None
    return int(match[1])


def steps(folder: Path) -> list[int]:
    """The steps of a run folder's complete checkpoints, rising; compared as numbers."""
    parent = folder / "checkpoints"
    if not parent.is_dir():
        return []
    return sorted(step for path in parent.iterdir() if (step := step_of(path)) is not None)


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in a run folder."""
    return folder / "checkpoints" / name_of(step)


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in a run folder, or None."""
    done = steps(folder)
    return path_of(folder, done[-1]) if done else None


def save(folder: Path, step: int, write: Callable[[Path], object], keep: int) -> Path:
    """Writes the checkpoint of a step and returns its folder; one process at a time in a run folder.

    Args:
        folder: the run folder.
        step: finished iterations. A step that is already complete is left as it is, and `write` not called.
        write: fills an empty folder.
        keep: how many complete checkpoints stay, the newest; the last one always stays.

    Raises:
        UserError: the disk is full or read-only; what was complete before stays complete.
    """
    final = path_of(folder, step)
    with disk_errors("save", final):
        final.parent.mkdir(parents=True, exist_ok=True)
        for path in final.parent.iterdir():
            if _PARTIAL.fullmatch(path.name):
                remove(path)  # left by a killed run
        if step_of(final) is None:
            partial = _partial(final)
            partial.mkdir()
            try:
                write(partial)
                sync_tree(partial)
                _publish(partial, final)
            except BaseException:
                remove(partial)
                raise
        prune(folder, keep)
    return final


def prune(folder: Path, keep: int) -> None:
    """Removes all complete checkpoints but the newest `keep`, and never the last one."""
    for step in steps(folder)[: -max(keep, 1)]:
        discard(path_of(folder, step))


def discard(path: Path) -> None:
    """Removes a checkpoint; killed half way, it leaves a partial folder that the next save removes."""
    partial = _partial(path)
    path.rename(partial)
    remove(partial)


def _partial(final: Path) -> Path:
    return final.with_name(f"{final.name}.partial-{secrets.token_hex(4)}")


def _publish(partial: Path, final: Path) -> None:
    """The moment at which a checkpoint comes to be. An empty folder of that name gives way."""
    partial.replace(final)
    sync(final.parent)
