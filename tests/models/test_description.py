"""A model is described from json alone: sizes, times, parameter counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from flowkit.errors import UsageError, UserError
from flowkit.models import describe, load
from flowkit.models.known import KNOWN
from flowkit.types import Size
from tests import tiny


@pytest.mark.parametrize("name", tiny.BUNDLES)
def test_counts_sizes_and_times_are_those_of_the_loaded_model(name: str) -> None:
    said = describe(str(tiny.bundle(name)))
    model = load(str(tiny.bundle(name)))
    size = Size(64, 32, 5 if name == "wan" else 1)
    assert said.family == model.family
    assert said.parameters["transformer"] == sum(p.numel() for p in model.net.parameters())
    assert said.parameters["vae"] == sum(p.numel() for p in model.vae.parameters())  # type: ignore[attr-defined]
    assert ("text_encoder_3" in said.parameters) == (name == "sd3")
    assert said.shape.latent_shape(size) == model.latent_shape(size)
    assert torch.equal(said.shape.schedule(5, size), model.schedule(5, size))
    assert said.text_tokens == model.encode(["a"]).tensors["text"].shape[1]
    assert said.guidance_embedded == model.guidance_embedded


def test_no_weight_is_read(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.bundle("sd3"), tmp_path / "model"))
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    assert describe(str(folder)).parameters["transformer"] > 0


# the counts that the models' publishers and users state: 11.9 B, 2.2 B, 8.1 B, 1.42 B and 14.3 B, T5-XXL's
# encoder 4.76 B, UMT5-XXL's 5.68 B, Wan's autoencoder 127 M
PUBLISHED = {
    "black-forest-labs/FLUX.1-dev": ("flux", 11_901_408_320, 512, [1.0, 0.8492, 0.6525, 0.3849, 0.0]),
    "stabilityai/stable-diffusion-3.5-medium": ("sd3", 2_243_171_520, 333, [1.0, 0.9, 0.75, 0.5, 0.0]),
    "stabilityai/stable-diffusion-3.5-large": ("sd3", 8_056_627_520, 333, [1.0, 0.9, 0.75, 0.5, 0.0]),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": ("wan", 1_418_996_800, 512, [1.0, 0.9, 0.75, 0.5, 0.0]),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": ("wan", 14_288_491_584, 512, [1.0, 0.9, 0.75, 0.5, 0.0]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_are_described_with_no_file(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    family, count, tokens, times = PUBLISHED[name]
    said = describe(name)
    assert said.folder is None
    assert said.family == family
    assert said.parameters["transformer"] == count
    encoder = {"flux": "text_encoder_2", "sd3": "text_encoder_3", "wan": "text_encoder"}[family]
    assert said.parameters[encoder] == (5_680_910_336 if family == "wan" else 4_762_310_656)
    assert said.parameters["vae"] == (126_892_531 if family == "wan" else 83_819_683)
    assert said.text_tokens == tokens
    assert said.shape.multiple == 16
    if family == "wan":
        assert said.shape.latent_shape(Size(832, 480, 81)) == (16, 21, 60, 104)
        assert said.shape.tokens(Size(832, 480, 81)) == 32_760
    else:
        assert said.shape.latent_shape(Size(512, 512)) == (16, 64, 64)
    assert said.shape.schedule(4, Size(512, 512)).tolist() == pytest.approx(times, abs=5e-5)


def test_a_published_lora_of_flux_has_its_known_size() -> None:
    # rank 64 on attention: 19 double blocks of 8 square layers, 38 single blocks of 3, width 3072, plus the
    # feed-forward pairs 3072 -> 12288 -> 3072 of both streams
    attention = (19 * 8 + 38 * 3) * 64 * (3072 + 3072)
    feed_forward = 19 * 4 * 64 * (3072 + 12288)
    said = describe("black-forest-labs/FLUX.1-dev")
    assert said.lora_parameters(64, "attention") == attention
    assert said.lora_parameters(64, "attention+ff") == attention + feed_forward


def test_a_known_model_in_the_cache_is_described_from_its_own_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    folder = Path(shutil.copytree(tiny.bundle("flux"), tmp_path / "model"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    said = describe("black-forest-labs/FLUX.1-dev")
    assert said.folder == folder
    assert said.parameters["transformer"] < 1_000_000


def test_a_config_that_makes_no_network_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.bundle("flux"), tmp_path / "model"))
    file = folder / "transformer" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "num_layers": "two"}), encoding="utf-8")
    with pytest.raises(UserError, match="transformer config"):
        _ = describe(str(folder)).parameters


@pytest.mark.parametrize(
    ("name", "size", "near"),
    [
        ("flux", Size(100, 32), "96x32"),
        ("flux", Size(64, 40), "64x32"),
        ("flux", Size(8, 0), "16x16"),
        ("flux", Size(64, 32, 5), "64x32"),
        ("flux", Size(-64, 32), "16x32"),
        ("sd3", Size(4096, 32), "256x32"),
        ("sd3", Size(64, 32, 5), "64x32"),
        ("wan", Size(64, 32, 4), "64x32x5"),
        ("wan", Size(70, 32, 11), "64x32x13"),
        ("wan", Size(64, 32, 0), "64x32"),
        ("wan", Size(4096, 32, 999), "512x32x125"),
    ],
)
def test_a_size_off_the_grid_is_refused_with_the_nearest(name: str, size: Size, near: str) -> None:
    for check in (describe(str(tiny.bundle(name))).shape.check_size, load(str(tiny.bundle(name))).check_size):
        with pytest.raises(UsageError, match=f"nearest legal size is {near}\\.") as caught:
            check(size)
        assert caught.value.code == 2


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_legal_sizes_are_accepted_and_the_largest_works(name: str) -> None:
    model = load(str(tiny.bundle(name)))
    for size in (Size(16, 16), Size(256, 16), Size(48, 256)):
        model.check_size(size)
    x = torch.zeros(1, *model.latent_shape(Size(256, 256)))
    with torch.no_grad():
        assert model.velocity(x, torch.tensor([0.5]), model.encode(["a"])).shape == x.shape


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"shift": 3.0}, [1.0, 0.9, 0.75, 0.5, 0.0]),
        ({"flow_shift": 3.0, "use_flow_sigmas": True}, [1.0, 0.9, 0.75, 0.5, 0.0]),
        ({}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"use_dynamic_shifting": True, "base_shift": 0.0, "max_shift": 0.0}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"shift": 3.0, "shift_terminal": 0.02}, [1.0, 0.804, 0.51, 0.02, 0.0]),
    ],
)
def test_the_times_are_those_of_the_scheduler_config(
    scheduler: dict[str, object], expected: list[float], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny.bundle("flux"), tmp_path / "model"))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler), encoding="utf-8")
    grid = describe(str(folder)).shape.schedule(4, Size(64, 32))
    assert grid.dtype == torch.float64
    assert grid.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"use_karras_sigmas": True},
        {"use_dynamic_shifting": True, "time_shift_type": "linear"},
        {"flow_shift": 3.0, "use_flow_sigmas": False},
    ],
)
def test_a_scheduler_that_cannot_be_followed_is_named(scheduler: dict[str, object], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.bundle("flux"), tmp_path / "model"))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler), encoding="utf-8")
    with pytest.raises(UserError, match="--schedule"):
        describe(str(folder)).shape.schedule(4, Size(64, 32))


def test_the_times_are_those_that_diffusers_sets_from_the_same_config() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    for name in ("flux", "sd3"):
        folder = tiny.bundle(name)
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(str(folder / "scheduler"))
        arguments = {"mu": 0.5 + (8 - 256) * (1.15 - 0.5) / (4096 - 256)} if name == "flux" else {}
        scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 7, 7, dtype=torch.float64).tolist(), **arguments)
        ours = describe(str(folder)).shape.schedule(7, Size(64, 32))
        assert (scheduler.sigmas.double() - ours).abs().max() < 2**-23
