"""Stage 3: the flow transformer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowkit.assets.build.common import cached, log, times
from flowkit.assets.build.tiny_wan.autoencoder import to_tensor
from flowkit.assets.build.tiny_wan.networks import call, make_transformer
from flowkit.assets.build.tiny_wan.text import embed, prompts
from flowkit.assets.shapes import draw_prompt, draw_scene, render


def normalise(vae: Any, z: Tensor) -> Tensor:
    """Latents with mean 0 and standard deviation 1 in each channel, as the flow sees them."""
    mean, std = (torch.tensor(vae.config[f"latents_{what}"]).view(1, -1, 1, 1, 1) for what in ("mean", "std"))
    return (z - mean) / std


@torch.no_grad()
def data_set(vae: Any, size: int, seed: int) -> tuple[Tensor, list[str]]:
    """Latents [N, 16, 3, 4, 4] of rendered clips, and a prompt for each."""
    rng = np.random.default_rng(seed)
    latents, asked = [], []
    for start in range(0, size, 64):
        scenes = [draw_scene(rng) for _ in range(min(64, size - start))]
        asked += [draw_prompt(rng, s) for s in scenes]
        latents.append(normalise(vae, vae.encode(to_tensor(render(scenes))).latent_dist.mean))
    return torch.cat(latents), asked


def train_flow(
    folder: Path,
    encoder: Any,
    tokenizer: Any,
    vae: Any,
    steps: int,
    batch: int = 64,
    lr: float = 1.2e-3,
    report: int = 1000,
) -> Any:
    """Rectified flow with 10 % of the prompts dropped."""
    torch.manual_seed(2)
    net = make_transformer()
    saved = folder / "flow.pt"
    if saved.exists():
        net.load_state_dict(torch.load(saved, weights_only=True))
        return net.eval().requires_grad_(False)
    latents, asked = cached(folder / "data.pt", lambda: data_set(vae, 16_000, seed=4))
    texts, _ = prompts()
    with torch.no_grad():
        table = embed(encoder, tokenizer, [*texts, ""])
    row = torch.tensor([texts.index(p) for p in asked])
    opt = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    shadow = {n: p.detach().clone() for n, p in net.named_parameters()}

    def loss_of(x0: Tensor, eps: Tensor, t: Tensor, text: Tensor) -> Tensor:
        at = t[:, None, None, None, None]
        return (call(net, (1 - at) * x0 + at * eps, t, text) - (eps - x0)).square().mean()

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
        pick = torch.randint(len(latents), (batch,), generator=rng)
        drop = torch.rand(batch, generator=rng) < 0.1
        text = table[torch.where(drop, len(texts), row[pick])]
        x0, t = latents[pick], times(batch, rng)
        loss = step_loss(x0, torch.randn(x0.shape, generator=rng), t, text)
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
            state = {"net": net.state_dict(), "shadow": shadow, "step": step + 1}
            torch.save({**state, "opt": opt.state_dict(), "rng": rng.get_state()}, part)
    torch.save(shadow, saved)
    net.load_state_dict(shadow)
    return net.eval().requires_grad_(False)
