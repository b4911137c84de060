"""Tiny bundles of the real classes, written as complete diffusers folders in about a second each."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

CLIP_LENGTH = 20
T5_LENGTH = 24
WIDTH = 32


def clip_tokenizer(folder: Path) -> Any:
    """A CLIP tokenizer over single characters."""
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    characters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    pieces = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(pieces)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=CLIP_LENGTH)


def clip(projection: bool, vocabulary: int) -> Any:
    """A CLIP text encoder of three layers."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
        projection_dim=WIDTH,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def t5(width: int) -> Any:
    """A byte-level T5 encoder."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=384,
            d_model=width,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
    )


def vae(quant: bool = False) -> Any:
    """AutoencoderKL, f8, 16 channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=64,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        scaling_factor=0.75,
        shift_factor=0.125,
    )


def flux_transformer(guidance_embeds: bool = True) -> Any:
    """FluxTransformer2DModel with one block of each kind."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )


def sd3_transformer() -> Any:
    """SD3Transformer2DModel of two blocks, the first with SD3.5's second attention."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH + 16,
        caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def umt5(width: int) -> Any:
    """A byte-level UMT5 encoder."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=384,
            d_model=width,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
        )
    )


def wan_vae() -> Any:
    """AutoencoderKLWan, f8 in space and f4 in time, 16 channels."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)


def wan_transformer() -> Any:
    """WanTransformer3DModel of two blocks."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        text_dim=WIDTH,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=32,
    )


def _write(folder: Path, pipeline: str, parts: dict[str, tuple[str, Any]], dtype: torch.dtype) -> Path:
    """Save every part in its folder, and the index."""
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": "0.35.0"}
    for name, (library, part) in parts.items():
        index[name] = [library, type(part).__name__] if part is not None else [None, None]
        if part is not None:
            (part.to(dtype) if isinstance(part, torch.nn.Module) else part).save_pretrained(folder / name)
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _shake(parts: dict[str, tuple[str, Any]]) -> None:
    """Weights that let every input matter: a fresh network ignores its time and its gates."""
    for _, part in parts.values():
        if isinstance(part, torch.nn.Module):
            for parameter in part.parameters():
                parameter.data.add_(0.05 * torch.randn_like(parameter))


def write_flux(
    folder: Path, *, guidance_embeds: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """A complete FluxPipeline folder."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers import ByT5Tokenizer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer(folder / "tokenizer")
        scheduler = FlowMatchEulerDiscreteScheduler(
            shift=3.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
        )
        parts: dict[str, tuple[str, Any]] = {
            "scheduler": ("diffusers", scheduler),
            "text_encoder": ("transformers", clip(False, len(tokenizer))),
            "text_encoder_2": ("transformers", t5(WIDTH)),
            "tokenizer": ("transformers", tokenizer),
            "tokenizer_2": ("transformers", ByT5Tokenizer(model_max_length=T5_LENGTH)),
            "transformer": ("diffusers", flux_transformer(guidance_embeds)),
            "vae": ("diffusers", vae()),
        }
        _shake(parts)
        return _write(folder, "FluxPipeline", parts, dtype)


def write_sd3(
    folder: Path, *, with_t5: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """A complete StableDiffusion3Pipeline folder, with or without its T5."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers import ByT5Tokenizer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer(folder / "tokenizer")
        parts: dict[str, tuple[str, Any]] = {
            "scheduler": ("diffusers", FlowMatchEulerDiscreteScheduler(shift=3.0)),
            "text_encoder": ("transformers", clip(True, len(tokenizer))),
            "text_encoder_2": ("transformers", clip(True, len(tokenizer))),
            "text_encoder_3": ("transformers", t5(2 * WIDTH + 16) if with_t5 else None),
            "tokenizer": ("transformers", tokenizer),
            "tokenizer_2": ("transformers", tokenizer),
            "tokenizer_3": ("transformers", ByT5Tokenizer(model_max_length=T5_LENGTH) if with_t5 else None),
            "transformer": ("diffusers", sd3_transformer()),
            "vae": ("diffusers", vae()),
        }
        _shake(parts)
        return _write(folder, "StableDiffusion3Pipeline", parts, dtype)


def write_wan(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A complete WanPipeline folder, with the scheduler of the published ones."""
    from diffusers import UniPCMultistepScheduler
    from transformers import ByT5Tokenizer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
        parts: dict[str, tuple[str, Any]] = {
            "scheduler": ("diffusers", scheduler),
            "text_encoder": ("transformers", umt5(WIDTH)),
            "tokenizer": ("transformers", ByT5Tokenizer(model_max_length=T5_LENGTH)),
            "transformer": ("diffusers", wan_transformer()),
            "vae": ("diffusers", wan_vae()),
        }
        _shake(parts)
        return _write(folder, "WanPipeline", parts, dtype)


BUNDLES: dict[str, Callable[[Path], Path]] = {
    "flux": write_flux,
    "flux-unguided": lambda folder: write_flux(folder, guidance_embeds=False),
    "sd3": write_sd3,
    "sd3-no-t5": lambda folder: write_sd3(folder, with_t5=False),
    "wan": write_wan,
}


@cache
def bundle(name: str) -> Path:
    """A folder of BUNDLES, written once a process and removed at its end. Copy it before changing it."""
    folder = Path(tempfile.mkdtemp(prefix="flowkit-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return BUNDLES[name](folder / name)
