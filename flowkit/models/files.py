"""Safetensors on disk: written whole or not at all, read with a named refusal for everything else."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowkit.errors import UserError

_MEBIBYTE = 1 << 20


def _foreign(path: Path, head: bytes) -> str:
    """What a file that has no safetensors header is instead, as the end of a sentence."""
    text = head.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights; run `git lfs pull` where it came from"
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "is an HTML page, most likely an error page saved by a download; download it again"
    if head.startswith(b"GGUF"):
        return "is a GGUF file; flowkit reads safetensors only"
    if head.startswith(b"PK\x03\x04") or head[:2] in {b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"}:
        return "is a pickle (a torch .bin/.pth/.ckpt file), which is never opened; convert it to safetensors"
    return "is not a safetensors file; flowkit reads safetensors only"


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, checked against the file's size; no tensor is read.

    Raises:
        UserError: missing, empty, truncated, Git LFS pointer, HTML page, pickle, GGUF or otherwise broken.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder where a .safetensors file is expected.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(512)
            if not head:
                raise UserError(f"{path} is empty (0 bytes); copy or download it again.")
            length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
            if len(head) < 9 or head[8:9] != b"{" or length > 100 * _MEBIBYTE:
                raise UserError(f"{path} {_foreign(path, head)}.")
            if 8 + length > size:
                raise UserError(
                    f"{path} is truncated: its header alone needs {8 + length} bytes and it has {size}; "
                    "copy or download it again."
                )
            file.seek(8)
            raw = file.read(length)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        header: dict[str, Any] = json.loads(raw)
        tensors = {k: v for k, v in header.items() if k != "__metadata__"}
        ends = [int(v["data_offsets"][1]) for v in tensors.values()]
    except (ValueError, KeyError, TypeError, IndexError):
        raise UserError(f"{path} has a broken safetensors header; copy or download it again.") from None
    need = 8 + length + max(ends, default=0)
    if size < need:
        raise UserError(
            f"{path} is truncated: its header says {need} bytes and the file has {size}; "
            "copy or download it again."
        )
    return header


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors (memory-mapped, on the CPU) and header metadata of a file.

    Raises:
        UserError: everything `read_header` refuses, and a file that holds no tensor at all.
    """
    header = read_header(path)
    if not header.keys() - {"__metadata__"}:
        raise UserError(f"{path} holds no tensors.")
    try:
        with safe_open(str(path), framework="pt") as file:
            return {k: file.get_tensor(k) for k in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is a broken safetensors file: {error}.") from None


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file, whole or not at all: temp file beside it, fsync, rename, reopen, compare bits.

    Raises:
        UserError: nothing to write, no room, no permission, or what was read back differs.
    """
    if not tensors:
        raise UserError(f"Nothing to write to {path}: the set of tensors is empty.")
    # a clone each: safetensors refuses tensors that share storage, and a later step must not change them
    plain = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(plain, str(temporary), metadata=dict(metadata))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"Could not write {path}: {reason}; free space or choose another folder.") from None
    finally:
        if temporary.exists():
            temporary.unlink()
    found, header = read_safetensors(path)
    if header != dict(metadata) or found.keys() != plain.keys():
        raise UserError(f"{path} reads back with other names than were written; check the disk.")
    for key, value in plain.items():
        if not same_bits(found[key], value):
            raise UserError(
                f"{path} reads back with other values in {key} than were written; check the disk."
            )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit: nan equals the same nan, 0.0 does not equal -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: missing, unreadable, empty, not JSON or not an object.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    if not raw:
        raise UserError(f"{path} is empty (0 bytes); copy or download it again.")
    try:
        value = json.loads(raw)
    except ValueError:
        known = _foreign(path, raw[:512])
        reason = known if "safetensors file" not in known else "is not valid JSON; copy or download it again"
        raise UserError(f"{path} {reason}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds JSON but not an object; copy or download it again.")
    return value


def fingerprint(files: list[Path]) -> str:
    """Hex digest of the files' names, sizes and first, middle and last MiB: fast on many gigabytes.

    Weights that differ only outside those places share a fingerprint; training moves every weight.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for start in {0, max(0, size // 2 - _MEBIBYTE // 2), max(0, size - _MEBIBYTE)}:
                file.seek(start)
                digest.update(hashlib.sha256(file.read(_MEBIBYTE)).digest())
    return digest.hexdigest()
