"""Peak memory of distillation on one base with two adapters over that on three networks, same config otherwise.

python benchmarks/roles_memory.py [MILLIONS]     # prints JSON; the ratio should stay under .5

Each runs `flowkit distill` (two iterations: the student's and the critic's) in a process of its own on a FLUX of
so many million parameters, 250 unless told. What the same run takes with a network of next to no size, for
libraries, text encoders and autoencoder, is subtracted from both.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

import flowkit

LIMIT = 0.5
TINY = Path(flowkit.__file__).parent / "assets" / "tiny-flux"


def write_model(folder: Path, millions: float) -> Path:
    """The embedded FLUX with a random transformer of about `millions` parameters in it."""
    import torch
    from diffusers import FluxTransformer2DModel

    shutil.copytree(TINY, folder)
    config = json.loads((TINY / "transformer" / "config.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder / "transformer")
    kept = (
        "in_channels",
        "joint_attention_dim",
        "pooled_projection_dim",
        "guidance_embeds",
        "axes_dims_rope",
    )
    heads = 8 if millions >= 1 else 1
    torch.manual_seed(0)
    # a double block has 36 w^2 parameters for a width of w = 32 heads x 8, a single one 12 w^2
    width = heads * config["attention_head_dim"]
    blocks = max(1, round(millions * 1e6 / (12 * width**2)))
    FluxTransformer2DModel(
        **{key: config[key] for key in kept},
        attention_head_dim=config["attention_head_dim"],
        num_attention_heads=heads,
        num_layers=1,
        num_single_layers=blocks,
    ).save_pretrained(folder / "transformer")
    return folder


def peak(folder: Path, model: Path, networks: str) -> int:
    """Bytes that a run of two iterations takes at most."""
    prompts = folder / "prompts.txt"
    prompts.write_text('the word "CAT"\nthe word "DOG"\n', encoding="utf-8")
    config = {
        "algorithm": "distill",
        "model": str(model),
        "steps": 2,
        "out": str(folder / f"run {networks} {model.name}"),
        "size": "96x32",
        "dtype": "float32",
        "train": "lora",
        "lora": {"rank": 8, "alpha": 8},
        "networks": networks,
        "batch": 2,
        "data": {
            "kind": "made",
            "path": str(folder / model.name) + "-latents",
            "prompts": str(prompts),
            "count": 2,
        },
        "teacher": {"guidance": 3.0, "steps": 2},
        "stages": {"scm+dmd": 2},
        "dmd": {"freq": 2},
        "optim": {"lr": 1e-4, "critic_lr": 1e-4, "micro": 2},
        "preview": {"every": 99},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    code = (
        "import resource, sys\nfrom flowkit.cli.app import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "distill", "--config", str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    status, kilobytes = done.stdout.split()[-2:]
    if status != "0":
        raise SystemExit(done.stderr)
    return int(kilobytes) * 1024


def main() -> None:
    """Measure the three runs one after the other."""
    millions = float(sys.argv[1]) if len(sys.argv) > 1 else 250
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = (write_model(folder / n, m) for n, m in (("small", 0.1), ("large", millions)))
        weights = sum(f.stat().st_size for f in (large / "transformer").glob("*.safetensors"))
        floor = peak(folder, small, "one base")
        one, three = (peak(folder, large, networks) - floor for networks in ("one base", "three"))
    report = {
        "one_base_over_three": round(one / three, 3),
        "limit": LIMIT,
        "one_base_over_weights": round(one / weights, 2),
        "three_over_weights": round(three / weights, 2),
        "weights_MB": round(weights / 1e6),
        "floor_MB": round(floor / 1e6),
    }
    print(json.dumps(report))
    sys.exit(one / three > LIMIT)


if __name__ == "__main__":
    main()
