"""The networks of tiny-wan, of the classes that Wan 2.1 is made of, and how its transformer is called."""

from __future__ import annotations

from typing import Any

from torch import Tensor

TEXT_WIDTH = 64
TEXT_LENGTH = 40  # bytes of the longest prompt, with some room


def make_text() -> Any:
    """A byte-level UMT5 encoder, two layers of 64 channels."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=384,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
    )


def make_vae() -> Any:
    """AutoencoderKLWan: f8 in space, f4 in time, 16 channels, .67 M parameters, most where the picture is small."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )


def make_transformer() -> Any:
    """WanTransformer3DModel of 2.9 M parameters, patches of 1 x 2 x 2 latents."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=6,
        attention_head_dim=32,
        in_channels=16,
        out_channels=16,
        text_dim=TEXT_WIDTH,
        freq_dim=128,
        ffn_dim=576,
        num_layers=5,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )


def call(net: Any, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
    """Velocity [B, 16, 3, 4, 4] at x and t [B], given text [B, L, 64]."""
    v: Tensor = net(
        hidden_states=x, timestep=t.float() * 1000, encoder_hidden_states=text, return_dict=False
    )[0]
    return v
