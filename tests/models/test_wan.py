"""What only Wan does: its solver's times, its text, its second generation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flowkit.errors import UserError
from flowkit.models import describe, load, lora
from flowkit.models.unipc import unipc
from flowkit.types import Size
from tests import tiny

CLIP = Size(64, 32, 5)


@pytest.fixture
def pipeline() -> Any:
    """The diffusers pipeline over the tiny bundle, with the scheduler that is saved there."""
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(str(tiny.bundle("wan")))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_a_clip_of_the_pipelines_own_solver_is_that_of_ours_on_its_times(
    pipeline: Any, guidance: float
) -> None:
    model = load(str(tiny.bundle("wan")))
    noise = torch.randn(2, *model.latent_shape(CLIP), generator=torch.Generator().manual_seed(0))
    theirs = pipeline(
        ["a cat", "a dog"],
        width=CLIP.width,
        height=CLIP.height,
        num_frames=CLIP.frames,
        num_inference_steps=6,
        guidance_scale=guidance,
        latents=noise,
        output_type="pt",
        max_sequence_length=tiny.T5_LENGTH,
    ).frames
    cond = model.encode(["a cat", "a dog"])
    grid = pipeline.scheduler.sigmas.clone()
    # before the shift: theirs go towards 1/1000 and then to 0, ours straight to 0
    apart = [t / (3 - 2 * t) for t in (grid.double(), model.schedule(6, CLIP))]
    assert (apart[0] - apart[1]).abs().max() < 1e-3

    def whole(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        # its network sees whole thousandths
        return model.velocity(x, (t * 1000).floor() / 1000, cond, guidance)

    with torch.no_grad():
        ours = model.decode(unipc(whole, noise, grid)).pixels
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.05
    # six steps of the same arithmetic in float32, seen in [0, 1] (measured: 6e-7 and, guided, 3e-6)
    assert (ours - theirs).abs().max() < 2e-5


def test_time_is_rounded_to_bfloat16_only_after_its_embedding() -> None:
    model = load(str(tiny.bundle("wan")), dtype="bfloat16")
    seen: dict[str, torch.dtype] = {}
    embedder: Any = model.net.condition_embedder

    def watch(name: str) -> Any:
        return lambda module, inputs, output: seen.update(
            {name: inputs[0].dtype, f"{name}, out": output.dtype}
        )

    embedder.timesteps_proj.register_forward_hook(watch("sinusoid"))
    embedder.time_embedder.register_forward_hook(watch("embedding"))
    x = torch.zeros(2, *model.latent_shape(CLIP))
    with torch.no_grad():
        model.velocity(x, torch.tensor([0.5, 0.50001]), model.encode(["a", "b"]))
    assert set(seen.values()) == {torch.float32}
    assert len(seen) == 4


def test_texts_are_cleaned_as_the_pipeline_cleans_them() -> None:
    model = load(str(tiny.bundle("wan")))
    plain, messy = (model.encode([t]).tensors["text"] for t in ("a & b", "  a\n &amp;amp;  b "))
    assert torch.equal(plain, messy)
    # five bytes and the end, then nothing
    assert plain[0, :6].abs().sum(1).min() > 0
    assert not plain[0, 6:].any()


def test_a_prompt_that_is_too_long_is_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = load(str(tiny.bundle("wan")))
    assert model.encode(["x" * 100]).tensors["text"].shape[1] == tiny.T5_LENGTH
    assert "1 of 1 prompts are longer than 24 tokens" in caplog.text


def test_the_targets_are_both_attentions_of_every_block_and_the_feed_forward() -> None:
    model = load(str(tiny.bundle("wan")))
    assert len(lora.resolve_targets(model.net, model.targets, "attention")) == 8
    # two blocks: eight square layers of width 32, and 32 -> 48 -> 32
    said = describe(str(tiny.bundle("wan")))
    assert said.lora_parameters(2, "attention") == 2 * 8 * 2 * (32 + 32)
    assert said.lora_parameters(2, "attention+ff") == 2 * 8 * 2 * (32 + 32) + 2 * 2 * 2 * (32 + 48)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875}, "transformer_2"),
        ({"boundary_ratio": 0.9}, "boundary_ratio"),
        ({"expand_timesteps": True}, "expand_timesteps"),
        ({"transformer_2": [None, None], "boundary_ratio": None, "expand_timesteps": False}, None),
    ],
)
def test_a_model_of_two_experts_is_refused_in_a_sentence(
    change: dict[str, object], named: str | None, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny.bundle("wan"), tmp_path / "model"))
    file = folder / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    if named is None:
        assert load(str(folder)).family == "wan"
        return
    for look in (load, describe):
        with pytest.raises(UserError, match=f"sets {named}: it is a Wan 2.2 model"):
            look(str(folder))
