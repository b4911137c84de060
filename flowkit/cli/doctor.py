"""`flowkit doctor`: what this machine has, what is missing, and what that would switch on."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

import flowkit
from flowkit.cli.common import Json, emit, emit_table

REQUIRED = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "pillow",
    "imageio-ffmpeg",
    "pydantic",
    "pyyaml",
    "rich",
    "typer",
)
OPTIONAL = (  # package, what it switches on, how to get it
    ("rapidocr", "reward ocr", "pip install 'flowkit[ocr]'"),
    ("onnxruntime", "reward ocr", "pip install 'flowkit[ocr]'"),
    ("rapidfuzz", "reward ocr", "pip install 'flowkit[ocr]'"),
    ("tensorboard", "report_to: [tensorboard]", "pip install tensorboard"),
    ("wandb", "report_to: [wandb]", "pip install 'flowkit[trackers]'"),
    ("trackio", "report_to: [trackio]", "pip install 'flowkit[trackers]'"),
    ("matplotlib", "rebuilding tiny-flux (python -m flowkit.assets.build)", "pip install 'flowkit[build]'"),
)
GIB = 2**30


def command(as_json: Json = False) -> None:
    """Tell versions, devices, optional packages and what each switches on, the model cache and disk space."""
    report = examine()
    if as_json:
        emit(report)
    else:
        _print(report)
    if report["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Everything that `flowkit doctor` says; `problems` holds what keeps flowkit from working."""
    packages = {name: _version(name) for name in REQUIRED}
    problems = [
        f"{name} is not installed; run pip install {name}" for name, found in packages.items() if not found
    ]
    devices: list[dict[str, Any]] = []
    try:
        devices = _devices()
    except (ImportError, OSError) as error:
        problems.append(f"torch can't be imported ({error}); reinstall it")
    cache = hub_cache()
    places = {str(Path.cwd()): "current folder", str(_existing(cache)): "model cache"}
    return {
        "flowkit": flowkit.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
        "optional": [
            {"name": name, "version": _version(name), "for": use, "get": get} for name, use, get in OPTIONAL
        ],
        "devices": devices,
        "cache": {"folder": str(cache), "models": _cached_models(cache), "offline": _offline()},
        "disk": [{"folder": folder, "what": what, **_space(folder)} for folder, what in places.items()],
        "problems": problems,
    }


def hub_cache() -> Path:
    """Where the hub keeps models: HF_HUB_CACHE, else HF_HOME/hub, else its folder below the home folder."""
    if found := os.environ.get("HF_HUB_CACHE"):
        return Path(found).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "hub"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    found: list[dict[str, Any]] = [
        {
            "name": "cpu",
            "what": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
    ]
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        bf16 = card.major >= 8
        memory = round(card.total_memory / GIB, 1)
        found.append({"name": f"cuda:{i}", "what": card.name, "memory_gib": memory, "bfloat16": bf16})
    if torch.backends.mps.is_available():
        found.append({"name": "mps", "what": "Apple GPU"})
    return found


def _cached_models(cache: Path) -> list[str]:
    """Ids of the models of which a snapshot lies in the cache."""
    return sorted(
        folder.name.removeprefix("models--").replace("--", "/")
        for folder in cache.glob("models--*")
        if any((folder / "snapshots").glob("*/*"))
    )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _space(folder: str) -> dict[str, float]:
    usage = shutil.disk_usage(folder)
    return {"free_gib": round(usage.free / GIB, 1), "total_gib": round(usage.total / GIB, 1)}


def _print(report: dict[str, Any]) -> None:
    typer.echo(f"flowkit {report['flowkit']}, Python {report['python']}, {report['system']}")
    typer.echo("\nPackages")
    emit_table([["", name, found or "missing"] for name, found in report["packages"].items()])
    typer.echo("\nOptional")
    emit_table(
        [
            ["", row["name"], row["version"] or "missing", row["for"] if row["version"] else _missing(row)]
            for row in report["optional"]
        ]
    )
    typer.echo("\nDevices")
    emit_table([["", row["name"], ", ".join(_features(row))] for row in report["devices"]] or [["", "none"]])
    cache = report["cache"]
    typer.echo(
        f"\nModel cache {cache['folder']}" + (" (offline: nothing is fetched)" if cache["offline"] else "")
    )
    emit_table(
        [["", model] for model in cache["models"]] or [["", "no models; builtin:tiny-flux needs none"]]
    )
    typer.echo("\nDisk")
    emit_table(
        [
            ["", row["what"], f"{row['free_gib']} of {row['total_gib']} GiB free", row["folder"]]
            for row in report["disk"]
        ]
    )
    for problem in report["problems"]:
        typer.echo(f"\nProblem: {problem}")


def _missing(row: dict[str, Any]) -> str:
    return f"would switch on {row['for']}: {row['get']}"


def _features(device: dict[str, Any]) -> list[str]:
    features = [device["what"]]
    if "threads" in device:
        features.append(f"{device['threads']} threads")
    if "memory_gib" in device:
        features.append(f"{device['memory_gib']} GiB")
        features.append("bfloat16" if device["bfloat16"] else "no bfloat16: use dtype=float32")
    return features
