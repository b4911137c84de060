"""Stage 5: the bundle, in the ordinary diffusers folder layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowkit.assets.build.common import log
from flowkit.assets.build.tiny_flux.networks import Encoder
from flowkit.assets.words import HEIGHT, WIDTH


def write_bundle(out: Path, encoder: Encoder, vae: Any, net: Any) -> None:
    """Everything in the ordinary diffusers folder layout, weights in float16 to be small."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    FluxPipeline(
        scheduler=scheduler,
        vae=vae.half(),
        text_encoder=encoder.clip.half(),
        tokenizer=encoder.clip_tokenizer,
        text_encoder_2=encoder.t5.half(),
        tokenizer_2=encoder.t5_tokenizer,
        transformer=net.half(),
    ).save_pretrained(out)
    defaults = {"size": f"{WIDTH}x{HEIGHT}", "steps": 28, "guidance": 3.0}
    (out / "flowkit.json").write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    log(
        f"wrote {sum(f.stat().st_size for f in out.rglob('*.safetensors')) / 2**20:.1f} MB of weights to {out}"
    )
