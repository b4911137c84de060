"""Stage 1: text encoders that are taught to spell the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from flowkit.assets.build.common import log
from flowkit.assets.build.tiny_flux.networks import TEXT_LENGTH, WIDTH_TEXT, Encoder
from flowkit.assets.words import FONTS, GROUNDS, INKS, LETTERS, draw_prompt, draw_sign

MAX_LETTERS = 5


def text_batch(
    rng: np.random.Generator, size: int
) -> tuple[list[str], list[Any], list[tuple[int, int, int]]]:
    """Prompts, their signs, and what each prompt says of ink, ground and font (0 = open)."""
    prompts, signs, said = [], [], []
    for _ in range(size):
        sign = draw_sign(rng)
        prompt = draw_prompt(rng, sign)
        tail = prompt.rsplit('"', 1)[1]
        said.append(
            (
                (1 + list(INKS).index(sign.ink)) if " in " in tail else 0,
                (1 + list(GROUNDS).index(sign.ground)) if " on " in tail else 0,
                (1 + list(FONTS).index(sign.font)) if ", " in tail else 0,
            )
        )
        prompts.append(prompt)
        signs.append(sign)
    return prompts, signs, said


def train_text(folder: Path, steps: int = 1200) -> Encoder:
    """Teach T5 which letter stands where, and CLIP what is said of ink, ground and font."""
    encoder = Encoder(folder / "clip")
    saved = folder / "text.pt"
    if saved.exists():
        encoder.load_state_dict(torch.load(saved, weights_only=True))
        return encoder.eval().requires_grad_(False)
    heads = nn.ModuleDict(
        {
            "letter": nn.Linear(WIDTH_TEXT, 27),
            "place": nn.Linear(WIDTH_TEXT, MAX_LETTERS + 1),
            "said": nn.Linear(WIDTH_TEXT, 7 + 6 + 3),
            "seen": nn.Linear(WIDTH_TEXT, 7 + 6 + 3),
        }
    )
    params = [*encoder.parameters(), *heads.parameters()]
    opt = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=steps, pct_start=0.1)
    rng = np.random.default_rng(1)
    for step in range(steps):
        prompts, signs, said = text_batch(rng, 64)
        sequence, pooled = encoder(prompts)
        letter = torch.full((64, TEXT_LENGTH), 26)
        place = torch.full((64, TEXT_LENGTH), MAX_LETTERS)
        for b, sign in enumerate(signs):
            for i, c in enumerate(sign.word):
                letter[b, 10 + i], place[b, 10 + i] = LETTERS.index(c), i
        want = torch.tensor(said)
        losses = [
            F.cross_entropy(heads["letter"](sequence).flatten(0, 1), letter.flatten()),
            F.cross_entropy(heads["place"](sequence).flatten(0, 1), place.flatten()),
        ]
        # the attributes must be readable at every letter as well, so that one look at a letter is enough
        near = heads["seen"](sequence[:, 10:12])
        for logits, target in ((heads["said"](pooled), want), (near, want[:, None].expand(-1, 2, -1))):
            for part, index in zip(logits.split([7, 6, 3], -1), range(3), strict=True):
                losses.append(F.cross_entropy(part.flatten(0, -2), target[..., index].flatten()))
        loss = torch.stack(losses).sum()
        opt.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            log(f"text {step} loss {loss.item():.4f} parts {[round(x.item(), 4) for x in losses]}")
    torch.save(encoder.state_dict(), saved)
    return encoder.eval().requires_grad_(False)
