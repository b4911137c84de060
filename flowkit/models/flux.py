"""FLUX.1 over diffusers' FluxTransformer2DModel: packed tokens, guidance embedding, dynamic shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowkit.models import Cond, parts
from flowkit.models.bundle import Bundle
from flowkit.models.guidance import guided
from flowkit.models.shapes import Shape
from flowkit.types import Media, Size

_TEXT_LENGTH = 512


def pack(x: Tensor) -> Tensor:
    """Latents [B, C, h, w] -> tokens [B, h w / 4, 4 C], a 2x2 patch each, in FLUX's order."""
    b, c, h, w = x.shape
    return x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpack(tokens: Tensor, h: int, w: int) -> Tensor:
    """The inverse of `pack`: tokens [B, h w / 4, 4 C] -> latents [B, C, h, w]."""
    b, _, c = tokens.shape
    return tokens.reshape(b, h // 2, w // 2, c // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c // 4, h, w)


def image_ids(h: int, w: int, device: torch.device) -> Tensor:
    """Positions of the tokens of a latent of h x w: [h w / 4, 3] as (0, row, column), float32."""
    rows = torch.arange(h // 2, device=device, dtype=torch.float32)
    columns = torch.arange(w // 2, device=device, dtype=torch.float32)
    grid = torch.cartesian_prod(rows, columns).reshape(-1, 2)
    return torch.cat([torch.zeros_like(grid[:, :1]), grid], 1)


class Flux:
    """FLUX.1-dev, -schnell and their kin behind the FlowModel seam.

    With a guidance embedding every velocity is one call. Without one, guidance other than 1 is true guidance
    against the empty prompt, as FluxPipeline does it with `true_cfg_scale`.

    The network gets t in [0, 1] in float32 and multiplies it by 1000 itself, in the dtype of its own layers.
    """

    family = "flux"
    networks: ClassVar[Mapping[str, tuple[str, str]]] = {
        "transformer": ("diffusers", "FluxTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "CLIPTextModel"),
        "text_encoder_2": ("transformers", "T5EncoderModel"),
    }
    targets = parts.MMDIT_TARGETS

    def __init__(self, bundle: Bundle, dtype: torch.dtype, device: torch.device, decode_batch: int) -> None:
        self.bundle, self.name = bundle, bundle.name
        self.dtype, self.device, self.decode_batch = dtype, device, decode_batch
        bundle.check(self.networks)
        configs = {c: bundle.config(c) for c in ("transformer", "vae", "scheduler")}
        self.shape = self.shape_of(bundle.name, configs)
        self.guidance_embedded = bool(configs["transformer"].get("guidance_embeds", False))
        self.frozen: dict[str, Tensor] | None = None
        self._text: dict[str, Any] = {}

    @staticmethod
    def shape_of(name: str, configs: Mapping[str, Mapping[str, Any]]) -> Shape:
        """Sizes from the json of transformer, vae and scheduler; defaults are those of the classes."""
        return Shape(
            name=name,
            channels=configs["transformer"].get("in_channels", 64) // 4,
            factor=2 ** (len(configs["vae"].get("block_out_channels", (64,))) - 1),
            patch=2,
            max_tokens_side=None,
            scheduler=configs["scheduler"],
        )

    @staticmethod
    def text_tokens(lengths: Mapping[str, int]) -> int:
        """Length of the text sequence: T5's."""
        return min(_TEXT_LENGTH, lengths.get("tokenizer_2", _TEXT_LENGTH))

    @cached_property
    def net(self) -> nn.Module:
        """The transformer, frozen, in `dtype`."""
        net: nn.Module = self._load("transformer", self.dtype)
        return net

    @cached_property
    def vae(self) -> nn.Module:
        """The autoencoder, always float32: its error would be scored as the model's."""
        vae: nn.Module = self._load("vae", torch.float32)
        return vae

    def _load(self, component: str, dtype: torch.dtype) -> Any:
        return self.bundle.load(component, *self.networks[component], dtype, self.device)

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """[C, H / 8, W / 8]."""
        return self.shape.latent_shape(size)

    def check_size(self, size: Size) -> None:
        """Multiples of 16."""
        self.shape.check_size(size)

    def schedule(self, n: int, size: Size) -> Tensor:
        """Dynamic shift by the number of tokens (static where the bundle's scheduler says so)."""
        return self.shape.schedule(n, size)

    def _tokenizers(self) -> tuple[Any, Any, int]:
        """CLIP's and T5's tokenizer, and the length of T5's sequence."""
        if "tokenizer" not in self._text:
            self._text |= {c: self.bundle.tokenizer(c) for c in ("tokenizer", "tokenizer_2")}
        t5 = self._text["tokenizer_2"]
        return self._text["tokenizer"], t5, self.text_tokens({"tokenizer_2": t5.model_max_length})

    def text_key(self) -> str:
        """Encoders' fingerprints, tokenizers' lengths, dtype."""
        clip, _, length = self._tokenizers()
        prints = [self.bundle.fingerprint(c) for c in ("text_encoder", "text_encoder_2")]
        return "|".join([self.family, *prints, str(clip.model_max_length), str(length), str(self.dtype)])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        """`text` [B, L, D] from T5, `pooled` [B, D'] from CLIP; negatives only without guidance embedding."""
        clip_tokenizer, t5_tokenizer, length = self._tokenizers()
        if "text_encoder" not in self._text:
            self._text |= {c: self._load(c, self.dtype) for c in ("text_encoder", "text_encoder_2")}

        def rows(texts: Sequence[str]) -> dict[str, Tensor]:
            t5 = parts.tokens(t5_tokenizer, texts, length, warn=True).to(self.device)
            clip = parts.tokens(clip_tokenizer, texts, clip_tokenizer.model_max_length).to(self.device)
            return {
                "text": self._text["text_encoder_2"](t5)[0],
                "pooled": self._text["text_encoder"](clip).pooler_output,
            }

        negative = None
        if not self.guidance_embedded:
            negative = Cond({k: v.expand(len(prompts), *v.shape[1:]) for k, v in rows([""]).items()})
        return Cond(rows(prompts), negative)

    def free_text(self) -> None:
        """Drop encoders and tokenizers."""
        parts.forget(self._text)

    def velocity(self, x: Tensor, t: Tensor, cond: Cond, guidance: float = 1.0) -> Tensor:
        """V [B, C, h, w] float32 at x [B, C, h, w] float32 and t [B] float32."""
        if self.guidance_embedded:
            scale = torch.full_like(t, guidance, dtype=torch.float32)
            return self._call(x, t, cond, scale)
        return guided(self._call, x, t, cond, guidance)

    def _call(self, x: Tensor, t: Tensor, cond: Cond, guidance: Tensor | None = None) -> Tensor:
        """One call of the network, whatever its number of rows."""
        h, w = x.shape[-2:]
        text = cond.tensors["text"].to(self.dtype)
        v = self.net(
            hidden_states=pack(x).to(self.dtype),
            timestep=t.float(),
            guidance=guidance,
            encoder_hidden_states=text,
            pooled_projections=cond.tensors["pooled"].to(self.dtype),
            img_ids=image_ids(h, w, x.device),
            txt_ids=torch.zeros(text.shape[1], 3, device=x.device),
            return_dict=False,
        )[0]
        return unpack(v.float(), h, w)

    def decode(self, x0: Tensor) -> Media:
        """Pictures [B, 1, 3, H, W]."""
        return parts.decode(self.vae, x0, self.decode_batch)

    def encode_media(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, h, w] of pictures [B, 1, 3, H, W]: the posterior's mean."""
        self.check_size(Size(pixels.shape[-1], pixels.shape[-2], pixels.shape[1]))
        return parts.encode(self.vae, pixels, self.decode_batch, clips=False)
