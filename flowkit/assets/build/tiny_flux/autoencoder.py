"""Stage 2: the autoencoder."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowkit.assets.build.common import log
from flowkit.assets.build.tiny_flux.networks import make_vae
from flowkit.assets.words import draw_sign, render


def to_tensor(pixels: np.ndarray) -> Tensor:
    """uint8 [B, H, W, 3] -> float [B, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def pictures(seed: int, batch: int) -> Iterator[Tensor]:
    """Endless batches of rendered signs, [B, 3, 32, 96] in [-1, 1]."""
    rng = np.random.default_rng(seed)
    while True:
        signs = [replace(draw_sign(rng), cell=0) for _ in range(batch)]  # convolutions know no cells
        yield to_tensor(np.stack([render(s) for s in signs]))


def train_vae(folder: Path, steps: int = 2600, kl: float = 5e-4, batch: int = 32) -> Any:
    """L1 plus a KL that is strong for an autoencoder: smooth latents are what makes the flow learnable."""
    vae = make_vae()
    saved = folder / "vae.pt"
    if saved.exists():
        vae.load_state_dict(torch.load(saved, weights_only=True))
        return set_scale(vae.eval().requires_grad_(False))
    opt = torch.optim.AdamW(vae.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    start = time.time()
    for step, x in zip(range(steps), pictures(2, batch), strict=False):
        for group in opt.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        with torch.autocast("cpu", torch.bfloat16):
            mean, logvar = vae.encoder(x).chunk(2, 1)
            logvar = logvar.clamp(-20, 10)
            y = vae.decoder(mean + (0.5 * logvar).exp() * torch.randn_like(mean))
        distance = (y - x).abs().mean() + 0.5 * (y - x).square().mean()
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).float().mean()
        torch.autograd.backward(distance + kl * min(1.0, step / 800) ** 2 * divergence)
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            pace = (time.time() - start) / (step + 1)
            log(f"vae {step} distance {distance.item():.4f} kl {divergence.item():.3f} {pace:.3f} s/step")
            torch.save(vae.state_dict(), folder / "vae.part.pt")
    torch.save(vae.state_dict(), saved)
    return set_scale(vae.eval().requires_grad_(False))


def set_scale(vae: Any) -> Any:
    """Scale and shift that give the latents of the data mean 0 and standard deviation 1."""
    with torch.no_grad():
        z = torch.cat(
            [vae.encode(x).latent_dist.mean for x, _ in zip(pictures(3, 64), range(4), strict=False)]
        )
    vae.register_to_config(
        scaling_factor=round(1 / z.std().item(), 4), shift_factor=round(z.mean().item(), 4)
    )
    return vae
