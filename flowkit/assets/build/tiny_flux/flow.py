"""Stage 3: the flow transformer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowkit.assets.build.common import cached, log, times
from flowkit.assets.build.tiny_flux.autoencoder import to_tensor
from flowkit.assets.build.tiny_flux.networks import Encoder, call, make_transformer, pack
from flowkit.assets.build.tiny_flux.probe import draw, exact, held_out
from flowkit.assets.words import draw_prompt, draw_sign, render


def data_set(vae: Any, size: int, seed: int) -> tuple[Tensor, list[str]]:
    """Packed latents [N, 12, 64] (a sample of the posterior each) and their prompts, made once."""
    rng = np.random.default_rng(seed)
    latents, prompts = [], []
    for start in range(0, size, 256):
        signs = [draw_sign(rng) for _ in range(min(256, size - start))]
        prompts += [draw_prompt(rng, s) for s in signs]
        with torch.no_grad():
            z = vae.encode(to_tensor(np.stack([render(s) for s in signs]))).latent_dist.mean
        latents.append(pack((z - vae.config.shift_factor) * vae.config.scaling_factor))
    return torch.cat(latents), prompts


def train_flow(
    folder: Path,
    encoder: Encoder,
    vae: Any,
    steps: int,
    batch: int = 64,
    lr: float = 1.5e-3,
    report: int = 500,
) -> Any:
    """Rectified flow with 10 % of the prompts dropped; the guidance input says 1 throughout."""
    net = make_transformer()
    saved = folder / "flow.pt"
    if saved.exists():
        net.load_state_dict(torch.load(saved, weights_only=True))
        return net.eval().requires_grad_(False)
    latents, prompts = cached(folder / "data.pt", lambda: data_set(vae, 60_000, seed=4))
    opt = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    shadow = {n: p.detach().clone() for n, p in net.named_parameters()}

    def loss_of(x0: Tensor, eps: Tensor, t: Tensor, c: Tensor, p: Tensor) -> Tensor:
        x = (1 - t[:, None, None]) * x0 + t[:, None, None] * eps
        v = call(net, x, t, (c, p), torch.ones_like(t))
        return (v - (eps - x0)).square().mean()

    step_loss = torch.compile(loss_of)
    rng = torch.Generator().manual_seed(5)
    first, start, total = 0, time.time(), 0.0
    part = folder / "flow.part.pt"
    if part.exists():
        state = torch.load(part, weights_only=True)
        net.load_state_dict(state["net"])
        shadow, first = state["shadow"], state["step"]
        opt.load_state_dict(state["opt"])
        rng.set_state(state["rng"])
    for step in range(first, steps):
        pick = torch.randint(len(latents), (batch,), generator=rng).tolist()
        drop = torch.rand(batch, generator=rng) < 0.1
        with torch.no_grad():
            c, p = encoder(["" if d else prompts[i] for i, d in zip(pick, drop, strict=True)])
        x0 = latents[pick]
        t = times(batch, rng)
        loss = step_loss(x0, torch.randn(x0.shape, generator=rng), t, c, p)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        rate = min(1.0, (step + 1) / 200) * min(1.0, max(0.02, (steps - step) / (0.5 * steps)))
        for group in opt.param_groups:
            group["lr"] = lr * rate
        opt.step()
        opt.zero_grad()
        decay = min(0.999, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(shadow.values()), [q.detach() for q in net.parameters()], 1 - decay)
        total += loss.item()
        if (step + 1) % 100 == 0:
            pace = (time.time() - start) / (step + 1 - first)
            log(f"flow {step + 1} loss {total / 100:.4f} {pace:.3f} s/step")
            total = 0.0
        if (step + 1) % report == 0:
            torch.save(
                {
                    "net": net.state_dict(),
                    "shadow": shadow,
                    "step": step + 1,
                    "opt": opt.state_dict(),
                    "rng": rng.get_state(),
                },
                part,
            )
            probe = make_transformer()
            probe.load_state_dict(shadow)
            asked = held_out(64)
            scores = {n: exact(draw(probe, vae, encoder, asked, n, 1.0), asked) for n in (1, 6, 28)}
            log(f"flow {step + 1} exact OCR of 64 without guidance, by steps: {scores}")
    torch.save(shadow, saved)
    net.load_state_dict(shadow)
    return net.eval().requires_grad_(False)
