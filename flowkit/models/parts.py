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
    return masked_tokens(tokenizer, prompts, length, warn=warn)[0]


def masked_tokens(
    tokenizer: Any, prompts: Sequence[str], length: int, *, warn: bool = False
) -> tuple[Tensor, Tensor]:
    """`tokens`, and the attention mask [B, length] of them: 1 for a token, 0 for padding."""
    texts = list(prompts)
    if warn:
        cut = sum(len(ids) > length for ids in tokenizer(texts, verbose=False).input_ids)
        if cut:
            logger.warning(
                "%d of %d prompts are longer than %d tokens and were cut.", cut, len(texts), length
            )
    found = tokenizer(
        texts,
        padding="max_length",
        max_length=length,
        truncation=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return found.input_ids, found.attention_mask


def forget(networks: dict[str, Any]) -> None:
    """Drop networks and give their memory back to the device."""
    networks.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _normal(vae: Any) -> tuple[Tensor | float, Tensor | float]:
    """Shift and scale of latents: the flow sees (z - shift) * scale of what the autoencoder makes."""
    config, like = vae.config, next(vae.parameters())
    if getattr(config, "latents_std", None) is None:
        return config.shift_factor or 0.0, config.scaling_factor
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=like.device).view(1, -1, 1, 1, 1)
        for values in (config.latents_mean, config.latents_std)
    )
    return mean, 1 / std


@torch.no_grad()
def decode(vae: nn.Module, x0: Tensor, batch: int) -> Media:
    """Decode latents [B, C, h, w] or [B, C, T, h, w] (scaled as the flow sees them) `batch` at a time.

    Returns:
        Media [B, F, 3, H, W] float32 on the CPU, clamped to [0, 1]; nan stays nan, so that it can be counted.
    """
    autoencoder: Any = vae
    shift, scale = _normal(vae)
    parts = []
    for z in torch.split(x0.to(next(vae.parameters()).device), batch):
        y = autoencoder.decode(z.float() / scale + shift, return_dict=False)[0]
        parts.append((y.float() / 2 + 0.5).clamp(0, 1).cpu())
    pixels = torch.cat(parts)
    return Media(pixels.unsqueeze(1) if pixels.ndim == 4 else pixels.transpose(1, 2))


@torch.no_grad()
def encode(vae: nn.Module, pixels: Tensor, batch: int, *, clips: bool) -> Tensor:
    """The inverse of `decode`, as far as the autoencoder goes: the posterior's mean, scaled as the flow sees it.

    Args:
        vae: the autoencoder.
        pixels: [B, F, 3, H, W] in [0, 1], F = 1 unless `clips`.
        batch: pictures or clips in one call.
        clips: the autoencoder takes [B, 3, F, H, W], not [B, 3, H, W].

    Returns:
        Latents [B, C, h, w], or [B, C, T, h, w], float32 on the autoencoder's device.
    """
    autoencoder: Any = vae
    shift, scale = _normal(vae)
    parts = []
    for y in torch.split(pixels, batch):
        y = y.to(next(vae.parameters()).device, torch.float32) * 2 - 1
        z = autoencoder.encode(y.transpose(1, 2) if clips else y[:, 0], return_dict=False)[0].mode()
        parts.append((z.float() - shift) * scale)
    return torch.cat(parts)
