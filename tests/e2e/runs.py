"""Small real runs of `flowkit grpo` and `flowkit distill` in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[2]

# lines run before a command: it dies in its update of this number, or as it publishes its second checkpoint
KILL_IN_UPDATE = """
import os
from flowkit.trainers.state import TrainState
real, calls = TrainState.update, []
def update(self):
    calls.append(1)
    if len(calls) == {call}:
        os.kill(os.getpid(), 9)
    return real(self)
TrainState.update = update
"""
KILL_BEFORE_RENAME = """
import os
from flowkit.runtime import checkpoint
real, calls = checkpoint._publish, []
def publish(partial, final):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), 9)
    return real(partial, final)
checkpoint._publish = publish
"""


def config(folder: Path, model: str, **changes: object) -> Path:
    """Write a config of a few quick rounds; keys are dotted with `__`."""
    for name, count in (("train", 6), ("test", 3)):
        lines = [f'the word "{chr(65 + i) * 3}"' for i in range(count)]
        (folder / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    data: dict[str, object] = {
        "algorithm": "grpo",
        "model": model,
        "steps": 4,
        "out": str(folder / "run"),
        "size": "32x32",
        "dtype": "float32",
        "device": "cpu",
        "train": "lora",
        "lora": {"rank": 2, "alpha": 4.0},
        "prompts": {"train": str(folder / "train.txt"), "test": str(folder / "test.txt")},
        "rollout": {"groups": 4, "samples": 2, "steps": 3, "window": {"size": 1, "hi": 2}},
        "reward": {"tests.e2e.bright:score": 1.0},
        "reward_workers": 0,
        "policy": {"updates": 2},
        "optim": {"lr": 1e-3, "eps": 1e-6, "micro": 2},
        "checkpoint": {"every": 1, "keep": 10},
        "eval": {"every": 2},
        "preview": {"every": 2, "prompts": 2},
        "report_to": [],
    }
    return written(folder, data, changes)


def distill_config(folder: Path, model: str, **changes: object) -> Path:
    """Write a config of a few quick iterations through three stages; keys are dotted with `__`."""
    for name, count in (("train", 5), ("test", 2)):
        lines = [f'the word "{chr(65 + i) * 3}"' for i in range(count)]
        (folder / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    data: dict[str, object] = {
        "algorithm": "distill",
        "model": model,
        "steps": 7,
        "out": str(folder / "run"),
        "size": "32x32",
        "dtype": "float32",
        "device": "cpu",
        "train": "lora",
        "lora": {"rank": 2, "alpha": 4.0},
        "batch": 4,
        "data": {
            "kind": "made",
            "path": str(folder / "latents"),
            "prompts": str(folder / "train.txt"),
            "count": 8,
            "shard": 4,
            "batch": 3,
        },
        "teacher": {"guidance": 2.0, "steps": 3},
        "stages": {"dcm": 1, "scm": 2, "scm+dmd": 4},
        "scm": {"warmup": 2},
        "dmd": {"freq": 2},
        "optim": {"lr": 1e-3, "critic_lr": 1e-3, "warmup": 0, "eps": 1e-6, "micro": 2},
        "reward": {"tests.e2e.bright:score": 1.0},
        "reward_workers": 0,
        "probe_every": 2,
        "checkpoint": {"every": 1, "keep": 10},
        "eval": {
            "every": 4,
            "prompts": str(folder / "test.txt"),
            "steps": [1, 2],
            "teacher_steps": [3, 1],
        },
        "preview": {"every": 4, "prompts": 2},
        "report_to": [],
    }
    return written(folder, data, changes)


def written(folder: Path, data: dict[str, object], changes: dict[str, object]) -> Path:
    """The config with its changes, as a file."""
    for key, value in changes.items():
        *parents, last = key.split("__")
        block = data
        for name in parents:
            block = block.setdefault(name, {})  # type: ignore[assignment]
        block[last] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def flowkit(*arguments: object, patch: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a new process, with Python lines run before it."""
    code = f"import sys\n{patch}\nfrom flowkit.cli.app import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        check=False,
    )


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    return {
        f"{path.relative_to(checkpoint)}:{name}": value
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def rows_of(run: Path) -> list[dict[str, float]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
