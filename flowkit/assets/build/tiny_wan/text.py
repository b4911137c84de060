"""Stage 2: the text encoder, taught to say what the prompt asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowkit.assets.build.common import log
from flowkit.assets.build.tiny_wan.networks import TEXT_LENGTH, TEXT_WIDTH, make_text
from flowkit.assets.shapes import COLOURS, DIRECTIONS, SHAPES

PARTS: tuple[tuple[str, ...], ...] = (
    ("thing", *SHAPES),
    ("", *COLOURS),
    ("", *DIRECTIONS),
)  # the first of each says nothing


def prompts() -> tuple[list[str], Tensor]:
    """Every prompt of the world, and what it says [N, 3]: the index in each of `PARTS`."""
    texts, said = [], []
    for i, shape in enumerate(PARTS[0]):
        for j, colour in enumerate(PARTS[1]):
            for k, direction in enumerate(PARTS[2]):
                texts.append(" ".join(f"a {colour} {shape} moving {direction}".split()))
                said.append((i, j, k))
    return texts, torch.tensor(said)


def make_tokenizer() -> Any:
    """Bytes are its vocabulary."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(model_max_length=TEXT_LENGTH)


def ids_of(tokenizer: Any, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Token ids and mask, [N, TEXT_LENGTH] each."""
    out = tokenizer(texts, padding="max_length", max_length=TEXT_LENGTH, truncation=True, return_tensors="pt")
    return out.input_ids, out.attention_mask


def embed(encoder: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """What the transformer is given [N, TEXT_LENGTH, 64]: zero behind the end of the text, as in WanPipeline."""
    ids, mask = ids_of(tokenizer, texts)
    states: Tensor = encoder(ids, mask).last_hidden_state
    return states * mask[..., None]


def train_text(folder: Path, steps: int = 500) -> tuple[Any, Any]:
    """Every byte's state shall tell shape, colour and direction: one look at the text is enough."""
    torch.manual_seed(1)
    encoder, tokenizer = make_text(), make_tokenizer()
    saved = folder / "text.pt"
    if saved.exists():
        encoder.load_state_dict(torch.load(saved, weights_only=True))
        return encoder.eval().requires_grad_(False), tokenizer
    heads = nn.ModuleList(nn.Linear(TEXT_WIDTH, len(part)) for part in PARTS)
    params = [*encoder.parameters(), *heads.parameters()]
    opt = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=steps, pct_start=0.1)
    texts, said = prompts()
    ids, mask = ids_of(tokenizer, texts)
    for step in range(steps):
        states = encoder(ids, mask).last_hidden_state
        losses = []
        for head, want in zip(heads, said.T, strict=True):
            each = F.cross_entropy(
                head(states).flatten(0, 1), want[:, None].expand_as(mask).flatten(), reduction="none"
            )
            losses.append((each.view(mask.shape) * mask).sum() / mask.sum())
        opt.zero_grad()
        torch.autograd.backward(torch.stack(losses).sum())
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            log(f"text {step} parts {[round(x.item(), 4) for x in losses]}")
    torch.save(encoder.state_dict(), saved)
    return encoder.eval().requires_grad_(False), tokenizer
