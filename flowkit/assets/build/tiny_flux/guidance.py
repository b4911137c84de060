"""Stage 4: guidance distilled into the transformer's guidance embedding, as in FLUX.1-dev."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowkit.assets.build.common import cached, log, times
from flowkit.assets.build.tiny_flux.flow import data_set
from flowkit.assets.build.tiny_flux.networks import Encoder, call, make_transformer


def train_guidance(
    folder: Path, encoder: Encoder, vae: Any, teacher: Any, steps: int, batch: int = 64
) -> Any:
    """Guidance distillation: the student at guidance g answers as the teacher's v_u + g (v_c - v_u).

    Guidance comes in between t = .9 and .7: at higher noise, where ink and ground are decided, it would narrow
    their shares (guidance in a limited interval, arXiv:2404.07724).
    """
    net = make_transformer()
    net.load_state_dict(teacher.state_dict())
    saved = folder / "guided.pt"
    if saved.exists():
        net.load_state_dict(torch.load(saved, weights_only=True))
        return net.eval().requires_grad_(False)
    latents, prompts = cached(folder / "data.pt", lambda: data_set(vae, 60_000, seed=4))
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-4, total_steps=steps, pct_start=0.1)
    shadow = {n: p.detach().clone() for n, p in net.named_parameters()}
    with torch.no_grad():
        empty = encoder([""])

    def loss_of(x: Tensor, t: Tensor, g: Tensor, c: Tensor, p: Tensor, target: Tensor) -> Tensor:
        return (call(net, x, t, (c, p), g) - target).square().mean()

    step_loss, ask = torch.compile(loss_of), torch.compile(call)
    rng, total, start = torch.Generator().manual_seed(6), 0.0, time.time()
    for step in range(steps):
        pick = torch.randint(len(latents), (batch,), generator=rng).tolist()
        t = times(batch, rng)
        g = 1 + 4 * torch.rand(batch, generator=rng) * (torch.rand(batch, generator=rng) > 0.15)
        strength = 1 + (g - 1) * ((0.9 - t) / 0.2).clamp(0, 1)
        x0 = latents[pick]
        x = torch.lerp(x0, torch.randn(x0.shape, generator=rng), t[:, None, None])
        with torch.no_grad():
            c, p = encoder([prompts[i] for i in pick])
            ones = torch.ones(batch)
            vc = ask(teacher, x, t, (c, p), ones)
            vu = ask(teacher, x, t, (empty[0].expand_as(c), empty[1].expand_as(p)), ones)
        loss = step_loss(x, t, g, c, p, vu + strength[:, None, None] * (vc - vu))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(shadow.values()), [q.detach() for q in net.parameters()], 0.005)
        total += loss.item()
        if (step + 1) % 100 == 0:
            log(f"guidance {step + 1} loss {total / 100:.5f} {(time.time() - start) / (step + 1):.3f} s/step")
            total = 0.0
    torch.save(shadow, saved)
    net.load_state_dict(shadow)
    return net.eval().requires_grad_(False)
