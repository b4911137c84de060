"""Wan 2.1 text-to-video over diffusers' WanTransformer3DModel: clips, true guidance, static shift."""

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
_ATTENTION = tuple(f"{a}.{n}" for a in ("attn1", "attn2") for n in ("to_q", "to_k", "to_v", "to_out.0"))
_TWO_TWO = "it is a Wan 2.2 model, which flowkit does not run yet; use one of Wan 2.1 such as"
_TWO_TWO += " Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


class Wan:
    """Wan 2.1 (arXiv:2503.20314) behind the FlowModel seam; a latent is [C, T, h, w], T = (F - 1) / 4 + 1.

    Guidance 1 is one call of B rows; any other is one call of 2B rows against the empty prompt.

    The network gets 1000 t in float32. diffusers keeps the layers that embed it, the norms and the modulation
    tables in float32 whatever `dtype` says, so t is rounded to the network's dtype only after its embedding.
    (WanPipeline over UniPC cuts 1000 t to a whole number first; here it is exact.)
    """

    family = "wan"
    guidance_embedded = False
    networks: ClassVar[Mapping[str, tuple[str, str]]] = {
        "transformer": ("diffusers", "WanTransformer3DModel"),
        "vae": ("diffusers", "AutoencoderKLWan"),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
    }
    unsupported: ClassVar[Mapping[str, str]] = {
        "transformer_2": _TWO_TWO,
        "boundary_ratio": _TWO_TWO,
        "expand_timesteps": _TWO_TWO,
    }
    targets: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention": _ATTENTION,
        "attention+ff": (*_ATTENTION, "ffn.net.0.proj", "ffn.net.2"),
    }

    def __init__(self, bundle: Bundle, dtype: torch.dtype, device: torch.device, decode_batch: int) -> None:
        self.bundle, self.name = bundle, bundle.name
        self.dtype, self.device, self.decode_batch = dtype, device, decode_batch
        bundle.check(self.networks)
        configs = {c: bundle.config(c) for c in ("transformer", "vae", "scheduler")}
        self.shape = self.shape_of(bundle.name, configs)
        self.frozen: dict[str, Tensor] | None = None
        self._text: dict[str, Any] = {}

    @staticmethod
    def shape_of(name: str, configs: Mapping[str, Mapping[str, Any]]) -> Shape:
        """Sizes from the json of transformer, vae and scheduler; defaults are those of the classes."""
        transformer, vae = configs["transformer"], configs["vae"]
        return Shape(
            name=name,
            channels=transformer.get("in_channels", 16),
            factor=2 ** (len(vae.get("dim_mult", (1, 2, 4, 4))) - 1),
            patch=transformer.get("patch_size", (1, 2, 2))[-1],
            max_tokens_side=transformer.get("rope_max_seq_len", 1024),
            scheduler=configs["scheduler"],
            temporal=2 ** sum(vae.get("temperal_downsample", (False, True, True))),
        )

    @staticmethod
    def text_tokens(lengths: Mapping[str, int]) -> int:
        """Length of the text sequence."""
        return min(_TEXT_LENGTH, lengths.get("tokenizer", _TEXT_LENGTH))

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
        """[16, (F - 1) / 4 + 1, H / 8, W / 8]."""
        return self.shape.latent_shape(size)

    def check_size(self, size: Size) -> None:
        """Sides in multiples of 16, 4k + 1 frames."""
        self.shape.check_size(size)

    def schedule(self, n: int, size: Size) -> Tensor:
        """Static shift by the scheduler's `flow_shift`.

        WanPipeline's own grid goes, before the shift, from 1 towards 1/1000 and then jumps to 0; this one goes
        from 1 to 0 in equal steps, so their times differ by less than 1/1000 before the shift.
        """
        return self.shape.schedule(n, size)

    def _tokenizer(self) -> tuple[Any, int]:
        """The tokenizer and the length of the text sequence."""
        if "tokenizer" not in self._text:
            self._text["tokenizer"] = self.bundle.tokenizer("tokenizer")
        tokenizer = self._text["tokenizer"]
        return tokenizer, self.text_tokens({"tokenizer": tokenizer.model_max_length})

    def text_key(self) -> str:
        """Encoder's fingerprint, length, dtype, and whether ftfy mends the texts."""
        from diffusers.utils import is_ftfy_available

        mended = f"ftfy={is_ftfy_available()}"
        prints = self.bundle.fingerprint("text_encoder")
        return "|".join([self.family, prints, str(self._tokenizer()[1]), str(self.dtype), mended])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        """`text` [B, L, D] from UMT5, zero after a prompt's last token; negatives."""
        empty = {k: v.expand(len(prompts), *v.shape[1:]) for k, v in self._rows([""]).items()}
        return Cond(self._rows(prompts), Cond(empty))

    def _rows(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Encodings of the texts, as WanPipeline.encode_prompt makes them.

        The texts are cleaned by its own function: HTML entities and white space, and ftfy where it is installed.
        """
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        tokenizer, length = self._tokenizer()
        if "text_encoder" not in self._text:
            self._text["text_encoder"] = self._load("text_encoder", self.dtype)
        cleaned = [prompt_clean(text) for text in texts]
        ids, mask = (m.to(self.device) for m in parts.masked_tokens(tokenizer, cleaned, length, warn=True))
        states = self._text["text_encoder"](ids, mask)[0]
        return {"text": states.masked_fill(mask[..., None] == 0, 0.0)}

    def free_text(self) -> None:
        """Drop encoder and tokenizer."""
        parts.forget(self._text)

    def velocity(self, x: Tensor, t: Tensor, cond: Cond, guidance: float = 1.0) -> Tensor:
        """V [B, 16, T, h, w] float32 at x [B, 16, T, h, w] float32 and t [B] float32."""
        return guided(self._call, x, t, cond, guidance)

    def _call(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """One call of the network, whatever its number of rows."""
        v: Tensor = self.net(
            hidden_states=x.to(self.dtype),
            timestep=t.float() * 1000,
            encoder_hidden_states=cond.tensors["text"].to(self.dtype),
            return_dict=False,
        )[0]
        return v.float()

    def decode(self, x0: Tensor) -> Media:
        """Clips [B, F, 3, H, W]."""
        return parts.decode(self.vae, x0, self.decode_batch)

    def encode_media(self, pixels: Tensor) -> Tensor:
        """Latents [B, 16, T, h, w] of clips [B, F, 3, H, W]: the posterior's mean."""
        self.check_size(Size(pixels.shape[-1], pixels.shape[-2], pixels.shape[1]))
        return parts.encode(self.vae, pixels, self.decode_batch, clips=True)
