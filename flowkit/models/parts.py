"""What the adapters share: tokens, encoders' lifetime, and the VAE."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowkit.types import Media

_ATTENTION = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
#: LoRA targets of two-stream transformers, as Flow-GRPO trains them (FLUX's single-stream blocks get
#: their attention only, SD3.5's second attention none; a list of names reaches those)
MMDIT_TARGETS: Mapping[str, tuple[str, ...]] = {
    "attention": _ATTENTION,
    "attention+ff": (*_ATTENTION, *_FEED_FORWARD),
}
logger = logging.getLogger(__name__)


def tokens(tokenizer: Any, prompts: Sequence[str], length: int, *, warn: bool = False) -> Tensor:
    """Token ids [B, length], padded and cut; with `warn` the number of cut prompts is logged."""
    texts = list(prompts)
    if warn:
        cut = sum(len(ids) > length for ids in tokenizer(texts, verbose=False).input_ids)
        if cut:
            logger.warning(
                "%d of %d prompts are longer than %d tokens and were cut.", cut, len(texts), length
            )
    ids: Tensor = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


def forget(networks: dict[str, Any]) -> None:
    """Drop networks and give their memory back to the device."""
    networks.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.no_grad()
def decode(vae: nn.Module, x0: Tensor, batch: int) -> Media:
    """Decode latents [B, C, h, w] (scaled as the flow sees them) `batch` at a time.

    Returns:
        Media [B, 1, 3, H, W] float32 on the CPU, clamped to [0, 1]; nan stays nan, so that it can be counted.
    """
    autoencoder: Any = vae
    config = autoencoder.config
    parts = []
    for z in torch.split(x0.to(next(vae.parameters()).device), batch):
        y = autoencoder.decode(
            z.float() / config.scaling_factor + (config.shift_factor or 0.0), return_dict=False
        )[0]
        parts.append((y.float() / 2 + 0.5).clamp(0, 1).cpu())
    return Media(torch.cat(parts).unsqueeze(1))
