from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from flowkit.rewards import load
from flowkit.types import Media, Prompt

GENERATOR = torch.Generator().manual_seed(0)
NOISE = torch.rand(1, 3, 64, 64, generator=GENERATOR)
FLAT = torch.full((1, 3, 64, 64), 0.5)
PROMPTS = [Prompt("a"), Prompt("b")]


def kilobytes(picture: torch.Tensor) -> float:
    """The definition, by hand: bytes of the quality-95 JPEG of the rounded picture, over 1000."""
    buffer = io.BytesIO()
    array = np.rint(picture.numpy().transpose(1, 2, 0) * 255).astype(np.uint8)
    Image.fromarray(array).save(buffer, "JPEG", quality=95)
    return len(buffer.getvalue()) / 1000


def test_the_score_is_the_kilobytes_at_quality_95_over_500_with_a_sign() -> None:
    media = Media(torch.stack([NOISE, FLAT]))
    expected = torch.tensor([kilobytes(NOISE[0]), kilobytes(FLAT[0])]) / 500
    worse, better = load("jpeg-incompressibility"), load("jpeg-compressibility")
    torch.testing.assert_close(worse(media, PROMPTS).values, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(better(media, PROMPTS).values, -expected, rtol=1e-6, atol=0)
    assert better(media, PROMPTS).details[0] == {"kilobytes": round(kilobytes(NOISE[0]), 3), "quality": 95}


def test_noise_is_worth_less_than_a_flat_picture_to_compressibility() -> None:
    noisy, flat = load("jpeg")(Media(torch.stack([NOISE, FLAT])), PROMPTS).values
    assert noisy < flat < 0


def test_a_clip_scores_the_mean_of_its_frames() -> None:
    clip = Media(torch.cat([NOISE, FLAT])[None])
    frames = load("jpeg")(Media(torch.stack([NOISE, FLAT])), PROMPTS).values
    torch.testing.assert_close(load("jpeg")(clip, PROMPTS[:1]).values, frames.mean()[None], rtol=1e-6, atol=0)
