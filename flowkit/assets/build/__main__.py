"""Train the embedded bundles from nothing: `python -m flowkit.assets.build tiny-flux --out DIR`.

Each stage is seeded and keeps its result in DIR/.build, so that an interrupted build goes on.

tiny-flux: text encoders (byte-level T5 and a tiny CLIP, taught to spell the prompt), the autoencoder, the flow
transformer, and guidance distillation, which teaches the transformer's guidance embedding to answer with
v_u + g (v_c - v_u) in one call, as FLUX.1-dev does.

tiny-wan: the text encoder (byte-level UMT5), the autoencoder, the flow transformer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from flowkit.assets.build import tiny_flux, tiny_wan

STAGES = ("text", "vae", "flow", "guidance", "write")


def main() -> None:
    """Command line of the build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", choices=["tiny-flux", "tiny-wan"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=STAGES, default="write", help="the last stage to run")
    parser.add_argument("--flow-steps", type=int)
    parser.add_argument("--guidance-steps", type=int, default=1_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    work = args.out / ".build"
    work.mkdir(parents=True, exist_ok=True)
    last = STAGES.index(args.stage)
    if args.bundle == "tiny-flux":
        tiny_flux.build(args.out, work, last, args.flow_steps or 8_000, args.guidance_steps)
    else:
        tiny_wan.build(args.out, work, last, args.flow_steps or 12_000)


if __name__ == "__main__":
    main()
