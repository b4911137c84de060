"""Stage 4: the bundle, in the ordinary diffusers folder layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowkit.assets.build.common import log
from flowkit.assets.shapes import FRAMES, HEIGHT, WIDTH

GUIDANCE = 3.0


def write_bundle(out: Path, encoder: Any, tokenizer: Any, vae: Any, net: Any) -> None:
    """Everything in the ordinary diffusers folder layout, weights in float16 to be small."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder.half(),
        vae=vae.half(),
        scheduler=scheduler,
        transformer=net.half(),
    ).save_pretrained(out)
    defaults = {"size": f"{WIDTH}x{HEIGHT}x{FRAMES}", "steps": 50, "guidance": GUIDANCE}
    (out / "flowkit.json").write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    log(
        f"wrote {sum(f.stat().st_size for f in out.rglob('*.safetensors')) / 2**20:.1f} MB of weights to {out}"
    )
