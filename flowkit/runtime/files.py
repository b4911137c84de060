"""Files that are whole or absent, and disk errors said in one sentence."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flowkit.errors import UserError


@contextmanager
def disk_errors(what: str, path: Path) -> Iterator[None]:
    """Turns a disk error in the body into a UserError 'cannot WHAT PATH: reason'.

    safetensors wraps the errors of the disk (full, read-only) in its own type.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot {what} {path}: {reason}; free some space or choose another folder"
        ) from error
    except SafetensorError as error:
        raise UserError(f"cannot {what} {path}: {error}") from error


def sync(path: Path) -> None:
    """Hands one file or folder to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Hands every file and folder under `folder`, and the folder itself, to the disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file that after a crash holds its old content or its new, never a part; makes its folder."""
    with disk_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
        try:
            with partial.open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of a text in utf-8, line ends as they stand."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of a value as indented JSON; nan and infinity are refused (ValueError)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def remove(path: Path) -> None:
    """Removes a file or a folder with all it holds; a path that is not there is no error."""
    with disk_errors("remove", path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
