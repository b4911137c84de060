"""What a run ran on: versions, git commit, hardware. Written into env.json; nothing here fails a run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "flowkit", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow",
    "imageio-ffmpeg",
    "rapidocr", "onnxruntime", "rapidfuzz",
)  # fmt: skip


def describe(seed: int | None = None) -> dict[str, Any]:
    """The content of env.json; what can't be found out is None."""
    return {
        "seed": seed,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "git": git_commit(Path(__file__).resolve().parent),
        "hardware": hardware(),
    }


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """The commit that a folder of a checkout is at, with '+changes' where tracked files differ, or None."""
    commit = _git(folder, "rev-parse", "HEAD")
    # A flowkit that is installed inside some other project's checkout is not at that project's commit.
    if commit is None or _git(folder, "ls-files", "--error-unmatch", "env.py") is None:
        return None
    return commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def hardware() -> dict[str, Any]:
    """System, processor, cores, memory in bytes, and the CUDA devices with their memory."""
    import torch

    cards = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    known = [torch.cuda.get_device_properties(card) for card in cards]
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": _memory(),
        "cuda": torch.version.cuda,
        "devices": [{"name": card.name, "memory": card.total_memory} for card in known],
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
