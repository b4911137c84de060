"""The networks of tiny-flux, of the classes that FLUX.1 is made of, and how its transformer is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TEXT_LENGTH = 42
WIDTH_TEXT = 64


def make_t5() -> Any:
    """A byte-level T5 encoder, two layers of 64 channels."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=384,
            d_model=WIDTH_TEXT,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
    )


def make_clip() -> Any:
    """A tiny CLIP text encoder over single characters, two layers of 64 channels."""
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=98,
            hidden_size=WIDTH_TEXT,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=TEXT_LENGTH + 2,
            bos_token_id=96,
            eos_token_id=97,
            pad_token_id=97,
            projection_dim=WIDTH_TEXT,
        )
    )


def make_vae() -> Any:
    """AutoencoderKL, f8, 16 channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 48, 64),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=96,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def make_transformer() -> Any:
    """FluxTransformer2DModel of about 2.4 M parameters, with the guidance embedding."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH_TEXT,
        pooled_projection_dim=WIDTH_TEXT,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def make_tokenizers(folder: Path) -> tuple[Any, Any]:
    """ByT5 for the T5 encoder; a CLIP tokenizer whose vocabulary is the printable characters."""
    from transformers import ByT5Tokenizer, CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    # CLIP lower-cases, so capitals would be lost: its part is the attributes, T5's is the spelling.
    characters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    pieces = [*characters, *(c + "</w>" for c in characters)]
    keep = [p for p in pieces if p[0].isalnum() or p[0] in '",.-']
    vocabulary = {p: i for i, p in enumerate(keep[:96])}
    vocabulary |= {"<|startoftext|>": 96, "<|endoftext|>": 97}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    clip = CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=TEXT_LENGTH + 2
    )
    return clip, ByT5Tokenizer(model_max_length=TEXT_LENGTH)


class Encoder(nn.Module):
    """The two text encoders and their tokenizers, called as FluxPipeline calls them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.clip_tokenizer, self.t5_tokenizer = make_tokenizers(folder)
        self.t5, self.clip = make_t5(), make_clip()

    def forward(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Sequence [B, 42, 64] and pooled [B, 64]."""
        t5 = self.t5_tokenizer(
            prompts, padding="max_length", max_length=TEXT_LENGTH, truncation=True, return_tensors="pt"
        )
        clip = self.clip_tokenizer(
            prompts, padding="max_length", max_length=TEXT_LENGTH + 2, truncation=True, return_tensors="pt"
        )
        return self.t5(t5.input_ids)[0], self.clip(clip.input_ids).pooler_output


def pack(z: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H W / 4, 4 C], FLUX's order."""
    b, c, h, w = z.shape
    return z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)


def image_ids(h: int, w: int) -> Tensor:
    """FLUX's position ids of the packed tokens, [H W / 4, 3]."""
    ids = torch.zeros(h // 2, w // 2, 3)
    ids[..., 1] += torch.arange(h // 2)[:, None]
    ids[..., 2] += torch.arange(w // 2)[None, :]
    return ids.reshape(-1, 3)


def call(net: Any, x: Tensor, t: Tensor, cond: tuple[Tensor, Tensor], guidance: Tensor) -> Tensor:
    """Velocity of packed latents at time t in [0, 1]."""
    out: Tensor = net(
        hidden_states=x,
        timestep=t,
        encoder_hidden_states=cond[0],
        pooled_projections=cond[1],
        guidance=guidance,
        img_ids=image_ids(4, 12),
        txt_ids=torch.zeros(TEXT_LENGTH, 3),
        return_dict=False,
    )[0]
    return out
