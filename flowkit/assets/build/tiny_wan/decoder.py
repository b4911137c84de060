"""The last part of stage 1: the decoder alone, on latents that stay as they are.

Encoder and decoder trained together settle on soft edges, which the reward `shapes` refuses. With the encoder fixed,
the flow's latents keep their meaning, and the decoder learns to draw a sharp thing of a latent that is a little off.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowkit.assets.build.common import log
from flowkit.assets.build.tiny_wan.autoencoder import clips

OFF = 0.05  # standard deviation of the noise on the latents, in their own


def sharpen(vae: Any, folder: Path, steps: int = 4000, batch: int = 8, lr: float = 1e-3) -> Any:
    """Train the decoder on noisy latents: L1 first of all, eight times as much on the thing and around it."""
    saved = folder / "decoder.pt"
    if saved.exists():
        vae.load_state_dict(torch.load(saved, weights_only=True))
        return vae.eval().requires_grad_(False)
    drawing = [*vae.post_quant_conv.parameters(), *vae.decoder.parameters()]
    for weight in drawing:
        weight.requires_grad_(True)
    opt = torch.optim.AdamW(drawing, lr=lr, weight_decay=1e-4, fused=True)
    rng, start = torch.Generator().manual_seed(6), time.time()
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    for step, x in zip(range(steps), clips(7, batch), strict=False):
        for group in opt.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        with torch.no_grad():
            z = vae.encode(x).latent_dist.mean
            z = z + OFF * std * torch.randn(z.shape, generator=rng)
        apart = vae.decode(z).sample - x
        loss = ((apart.abs() + 0.25 * apart.square()) * (1 + 7 * around(x))).mean()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(drawing, 1.0)
        opt.step()
        opt.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            log(f"decoder {step} loss {loss.item():.4f} {(time.time() - start) / (step + 1):.3f} s/step")
    torch.save(vae.state_dict(), saved)
    return vae.eval().requires_grad_(False)


def around(x: Tensor) -> Tensor:
    """1 on the thing of clips [B, 3, F, H, W] and within two pixels of it, else 0: [B, 1, F, H, W]."""
    thing = ((x - x[..., :1, :1]).abs().amax(1, keepdim=True) > 0.1).float()
    return nn.functional.max_pool3d(thing, (1, 5, 5), stride=1, padding=(0, 2, 2))
