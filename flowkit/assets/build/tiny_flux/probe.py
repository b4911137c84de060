"""What a half-trained transformer draws, and how much of it OCR reads: progress reports of the build."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from flowkit.assets.build.tiny_flux.networks import Encoder, call
from flowkit.assets.words import draw_prompt, draw_sign


@torch.no_grad()
def draw(
    net: Any, vae: Any, encoder: Encoder, prompts: list[str], steps: int, guidance: float, seed: int = 0
) -> np.ndarray:
    """Euler samples on FLUX's schedule, uint8 [B, 32, 96, 3]."""
    mu = 0.5 + (12 - 256) * (1.15 - 0.5) / (4096 - 256)
    grid = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
    grid = torch.cat([math.exp(mu) / (math.exp(mu) + 1 / grid - 1), torch.zeros(1)]).float()
    cond = encoder(prompts)
    x = torch.randn(len(prompts), 12, 64, generator=torch.Generator().manual_seed(seed))
    for t, s in pairwise(grid):
        x = x + (s - t) * call(net, x, t.expand(len(x)), cond, torch.full((len(x),), guidance))
    b, h, w, c = len(x), 2, 6, 16
    z = x.view(b, h, w, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c, 2 * h, 2 * w)
    y = vae.decode(z / vae.config.scaling_factor + vae.config.shift_factor).sample
    made: np.ndarray = ((y.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    return made


def read(pixels: np.ndarray) -> list[str]:
    """What OCR reads in each picture, upper case without spaces."""
    from rapidocr import RapidOCR
    from rapidocr.ch_ppocr_rec import TextRecInput

    engine = RapidOCR(params={"Global.log_level": "error", "Rec.rec_img_shape": [3, 48, 144]})
    found = engine._load_rec_model()(TextRecInput(img=[np.ascontiguousarray(p[..., ::-1]) for p in pixels]))
    return [t.replace(" ", "").upper() for t in found.txts]


def exact(pixels: np.ndarray, prompts: list[str]) -> float:
    """Share of the pictures in which OCR reads the quoted word exactly."""
    return float(np.mean([r == p.split('"')[1] for r, p in zip(read(pixels), prompts, strict=True)]))


def held_out(size: int, seed: int = 77) -> list[str]:
    """Prompts for progress reports."""
    rng = np.random.default_rng(seed)
    return [draw_prompt(rng, draw_sign(rng)) for _ in range(size)]
