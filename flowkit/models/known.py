"""Architecture facts of well-known models, so that a dry run needs no file of theirs.

Where the numbers come from: the sizes are those of the config.json files that the models were published with,
as diffusers' conversion scripts and the model cards state them (FLUX.1-dev: 19 double and 38 single blocks of
width 3072; SD3.5 medium: 24 blocks of width 1536, 13 with a second attention; SD3.5 large: 38 blocks of width
2432; Wan 2.1 1.3B: 30 blocks of width 1536; 14B: 40 of width 5120). Only what sets parameter counts, sizes and
times stands here; parameter counts are not written down but counted on the meta device from the real classes,
and a test compares them with the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_VAE: dict[str, Any] = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
_T5_XXL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
_CLIP_L: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
_CLIP_G: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
_SD3: dict[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "qk_norm": "rms_norm",
}
_UMT5_XXL: dict[str, Any] = {**_T5_XXL, "vocab_size": 256384}


@dataclass(frozen=True)
class Known:
    """One model: its pipeline class, the json of its components, its tokenizers' lengths."""

    pipeline: str
    configs: Mapping[str, Mapping[str, Any]]
    lengths: Mapping[str, int] = field(default_factory=dict)


def _sd3(transformer: dict[str, Any]) -> Known:
    return Known(
        "StableDiffusion3Pipeline",
        {
            "transformer": {**_SD3, **transformer},
            "vae": _VAE,
            "text_encoder": _CLIP_L,
            "text_encoder_2": _CLIP_G,
            "text_encoder_3": _T5_XXL,
            "scheduler": {"shift": 3.0},
        },
        {"tokenizer": 77, "tokenizer_3": 512},
    )


def _wan(transformer: dict[str, Any]) -> Known:
    return Known(
        "WanPipeline",
        {
            "transformer": {"attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256, **transformer},
            "vae": {
                "base_dim": 96,
                "dim_mult": [1, 2, 4, 4],
                "num_res_blocks": 2,
                "temperal_downsample": [False, True, True],
                "z_dim": 16,
            },
            "text_encoder": _UMT5_XXL,
            "scheduler": {"use_flow_sigmas": True, "flow_shift": 3.0},
        },
        {"tokenizer": 512},
    )


KNOWN: dict[str, Known] = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _wan({"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _wan({"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}),
    "black-forest-labs/FLUX.1-dev": Known(
        "FluxPipeline",
        {
            "transformer": {
                "in_channels": 64,
                "num_layers": 19,
                "num_single_layers": 38,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 768,
                "guidance_embeds": True,
            },
            "vae": _VAE,
            "text_encoder": _CLIP_L,
            "text_encoder_2": _T5_XXL,
            "scheduler": {
                "use_dynamic_shifting": True,
                "shift": 3.0,
                "base_shift": 0.5,
                "max_shift": 1.15,
                "base_image_seq_len": 256,
                "max_image_seq_len": 4096,
            },
        },
        {"tokenizer": 77, "tokenizer_2": 512},
    ),
    "stabilityai/stable-diffusion-3.5-medium": _sd3(
        {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": list(range(13)),
        }
    ),
    "stabilityai/stable-diffusion-3.5-large": _sd3(
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "dual_attention_layers": [],
        }
    ),
}
