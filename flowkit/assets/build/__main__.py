"""Train the embedded bundles from nothing: `python -m flowkit.assets.build tiny-flux --out DIR`.

Four stages, each seeded, each keeping its result in DIR/.build so that an interrupted build goes on:
text encoders (byte-level T5 and a tiny CLIP, taught to spell the prompt), the autoencoder, the flow
transformer, and guidance distillation, which teaches the transformer's guidance embedding to answer
with v_u + g (v_c - v_u) in one call, as FLUX.1-dev does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from flowkit.assets.build.tiny_flux.autoencoder import train_vae
from flowkit.assets.build.tiny_flux.bundle import write_bundle
from flowkit.assets.build.tiny_flux.flow import train_flow
from flowkit.assets.build.tiny_flux.guidance import train_guidance
from flowkit.assets.build.tiny_flux.text import train_text


def main() -> None:
    """Command line of the build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", choices=["tiny-flux"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=["text", "vae", "flow", "guidance", "write"], default="write")
    parser.add_argument("--flow-steps", type=int, default=8_000)
    parser.add_argument("--guidance-steps", type=int, default=1_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    work = args.out / ".build"
    work.mkdir(parents=True, exist_ok=True)
    encoder = train_text(work)
    if args.stage == "text":
        return
    vae = train_vae(work)
    if args.stage == "vae":
        return
    net = train_flow(work, encoder, vae, args.flow_steps)
    if args.stage == "flow":
        return
    net = train_guidance(work, encoder, vae, net, args.guidance_steps)
    write_bundle(args.out, encoder, vae, net)


if __name__ == "__main__":
    main()
