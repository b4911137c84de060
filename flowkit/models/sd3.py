"""Stable Diffusion 3 and 3.5 over diffusers' SD3Transformer2DModel: true guidance, static shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowkit.models import Cond, parts
from flowkit.models.bundle import Bundle
from flowkit.models.guidance import guided
from flowkit.models.shapes import Shape
from flowkit.types import Media, Size

_TEXT_LENGTH = 256
_CLIPS = (("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2"))


class StableDiffusion3:
    """SD3 and SD3.5 behind the FlowModel seam, with all three text encoders or without T5.

    Guidance 1 is one call of B rows; any other is one call of 2B rows against the empty prompt.
    """

    family = "sd3"
    guidance_embedded = False
    networks: ClassVar[Mapping[str, tuple[str, str]]] = {
        "transformer": ("diffusers", "SD3Transformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
        "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
        "text_encoder_3": ("transformers", "T5EncoderModel"),
    }
    targets = parts.MMDIT_TARGETS

    def __init__(self, bundle: Bundle, dtype: torch.dtype, device: torch.device, decode_batch: int) -> None:
        self.bundle, self.name = bundle, bundle.name
        self.dtype, self.device, self.decode_batch = dtype, device, decode_batch
        self.has_t5 = bundle.has("text_encoder_3")
        bundle.check(c for c in self.networks if c != "text_encoder_3" or self.has_t5)
        configs = {c: bundle.config(c) for c in ("transformer", "vae", "scheduler")}
        self.shape = self.shape_of(bundle.name, configs)
        self.text_width = int(configs["transformer"].get("joint_attention_dim", 4096))
        self.frozen: dict[str, Tensor] | None = None
        self._text: dict[str, Any] = {}

    @staticmethod
    def shape_of(name: str, configs: Mapping[str, Mapping[str, Any]]) -> Shape:
        """Sizes from the json of transformer, vae and scheduler; defaults are those of the classes."""
        transformer = configs["transformer"]
        return Shape(
            name=name,
            channels=transformer.get("in_channels", 16),
            factor=2 ** (len(configs["vae"].get("block_out_channels", (64,))) - 1),
            patch=transformer.get("patch_size", 2),
            max_tokens_side=transformer.get("pos_embed_max_size", 96),
            scheduler=configs["scheduler"],
        )

    @staticmethod
    def text_tokens(lengths: Mapping[str, int]) -> int:
        """Length of the text sequence: CLIP's, then T5's (as many zeros without a T5)."""
        return lengths.get("tokenizer", 77) + min(_TEXT_LENGTH, lengths.get("tokenizer_3", _TEXT_LENGTH))

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
        """[16, H / 8, W / 8]."""
        return self.shape.latent_shape(size)

    def check_size(self, size: Size) -> None:
        """Multiples of 16, up to the position table."""
        self.shape.check_size(size)

    def schedule(self, n: int, size: Size) -> Tensor:
        """Static shift, applied once (a bare diffusers pipeline applies it twice: that grid is `sd3-rl`)."""
        return self.shape.schedule(n, size)

    def _component(self, name: str) -> Any:
        """A tokenizer or a text encoder, loaded on first use."""
        if name not in self._text:
            is_tokenizer = name.startswith("tokenizer")
            self._text[name] = self.bundle.tokenizer(name) if is_tokenizer else self._load(name, self.dtype)
        return self._text[name]

    def _t5_length(self) -> int:
        """Length of the T5 part of the sequence; without T5 that part is zeros of the full length."""
        return (
            min(_TEXT_LENGTH, self._component("tokenizer_3").model_max_length)
            if self.has_t5
            else _TEXT_LENGTH
        )

    def text_key(self) -> str:
        """Encoders' fingerprints, tokenizers' lengths, dtype."""
        names = [encoder for _, encoder in _CLIPS] + (["text_encoder_3"] if self.has_t5 else [])
        prints = [self.bundle.fingerprint(name) for name in names]
        lengths = [self._component("tokenizer").model_max_length, self._t5_length()]
        return "|".join([self.family, *prints, *map(str, lengths), str(self.dtype)])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        """`text` [B, L, D]: both CLIPs' last but one layers, then T5; `pooled` [B, D']; negatives."""
        empty = {k: v.expand(len(prompts), *v.shape[1:]) for k, v in self._rows([""]).items()}
        return Cond(self._rows(prompts), Cond(empty))

    def _rows(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Encodings of the texts, as StableDiffusion3Pipeline.encode_prompt makes them."""
        length = self._component("tokenizer").model_max_length
        states, pooled = [], []
        for tokenizer, encoder in _CLIPS:
            ids = parts.tokens(self._component(tokenizer), texts, length).to(self.device)
            out = self._component(encoder)(ids, output_hidden_states=True)
            states.append(out.hidden_states[-2])
            pooled.append(out.text_embeds)
        clip = torch.cat(states, -1)
        if self.has_t5:
            ids = parts.tokens(self._component("tokenizer_3"), texts, self._t5_length(), warn=True)
            t5 = self._component("text_encoder_3")(ids.to(self.device))[0]
        else:
            t5 = clip.new_zeros(len(texts), self._t5_length(), self.text_width)
        text = torch.cat([F.pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], 1)
        return {"text": text, "pooled": torch.cat(pooled, -1)}

    def free_text(self) -> None:
        """Drop encoders and tokenizers."""
        parts.forget(self._text)

    def velocity(self, x: Tensor, t: Tensor, cond: Cond, guidance: float = 1.0) -> Tensor:
        """V [B, 16, h, w] float32 at x [B, 16, h, w] float32 and t [B] float32."""
        return guided(self._call, x, t, cond, guidance)

    def _call(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """One call of the network, whatever its number of rows."""
        v: Tensor = self.net(
            hidden_states=x.to(self.dtype),
            timestep=t.float() * 1000,
            encoder_hidden_states=cond.tensors["text"].to(self.dtype),
            pooled_projections=cond.tensors["pooled"].to(self.dtype),
            return_dict=False,
        )[0]
        return v.float()

    def decode(self, x0: Tensor) -> Media:
        """Pictures [B, 1, 3, H, W]."""
        return parts.decode(self.vae, x0, self.decode_batch)

    def encode_media(self, pixels: Tensor) -> Tensor:
        """Latents [B, C, h, w] of pictures [B, 1, 3, H, W]: the posterior's mean."""
        self.check_size(Size(pixels.shape[-1], pixels.shape[-2], pixels.shape[1]))
        return parts.encode(self.vae, pixels, self.decode_batch, clips=False)
