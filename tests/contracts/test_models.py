"""What every family keeps, checked on tiny configs of the real diffusers classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from flowkit.errors import UsageError
from flowkit.flow.solvers import euler
from flowkit.models import FAMILIES, Cond, FlowModel, adapter, checkpoint_activations, load
from flowkit.models.bundle import resolve
from flowkit.types import Size
from tests import tiny

SIZE, CLIP = Size(64, 32), Size(64, 32, 5)
PROMPTS = ['the word "CAT"', "a red dog", 'the word "HORSE" in blue', "x"]
NAMES = list(tiny.BUNDLES)
# what the network multiplies t by, and how many rows one velocity costs at guidance 4: facts of the families
CLOCK = {"flux": 1.0, "sd3": 1000.0, "wan": 1000.0}
ROWS = {"flux": 1, "flux-unguided": 2, "sd3": 2, "sd3-no-t5": 2, "wan": 2}
# float32 sums of at most 512 terms taken in another order differ by at most 512 * 2^-24 of their size
ORDER = 512 * 2.0**-24


@cache
def model_of(name: str, dtype: str = "float32") -> FlowModel:
    """One model a process; tests that change it load their own."""
    return load(str(tiny.bundle(name)), dtype=dtype)


def size_of(model: FlowModel) -> Size:
    """A small size that the family makes: of a clip, if it makes clips."""
    return CLIP if model.family == "wan" else SIZE


def some(model: FlowModel, batch: int = 4) -> tuple[Tensor, Tensor, Cond]:
    """Seeded state, times and conditions."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(batch, *model.latent_shape(size_of(model)), generator=generator)
    t = torch.tensor([0.9004, 0.7003, 0.5, 0.0503])[:batch]
    return x, t, model.encode(PROMPTS[:batch])


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Callable[[FlowModel], list[dict[str, Any]]]:
    """Record the keyword arguments of every call of the network."""

    def watch(model: FlowModel) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        forward = model.net.forward

        def recorded(**arguments: Any) -> Any:
            calls.append(arguments)
            return forward(**arguments)

        monkeypatch.setattr(model.net, "forward", recorded)
        return calls

    return watch


def test_every_family_has_a_tiny_bundle_and_so_is_tested_here() -> None:
    tested = {adapter(resolve(str(tiny.bundle(name)))).__name__ for name in NAMES}
    assert tested == {entry.split(":")[1] for entry in FAMILIES.values()}


@pytest.mark.parametrize("name", NAMES)
def test_euler_with_the_exact_velocity_goes_from_noise_to_the_data(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import FluxPipeline

    model = model_of(name)
    noise, _, cond = some(model, 2)
    data = torch.randn(noise.shape, generator=torch.Generator().manual_seed(4))
    h, w = data.shape[-2:]
    inside = FluxPipeline._pack_latents(data, 2, 16, h, w) if model.family == "flux" else data

    def exact(*, hidden_states: Tensor, timestep: Tensor, **_: Any) -> tuple[Tensor]:
        t = (timestep / CLOCK[model.family]).view(-1, *[1] * (hidden_states.ndim - 1))
        # data is a point, so v = eps - x0 with eps = (x - (1 - t) x0) / t
        return ((hidden_states - inside) / t,)

    monkeypatch.setattr(model.net, "forward", exact)
    end = euler(lambda x, t: model.velocity(x, t, cond), noise, model.schedule(5, size_of(model)).float())
    # a straight line: each of five steps rounds a few numbers of size < 8 once
    assert (end - data).abs().max() < 5 * 8 * 2.0**-22


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_network_gets_its_own_clock_in_float32(name: str, dtype: str, spy: Any) -> None:
    model = model_of(name, dtype)
    x, t, cond = some(model)
    calls = spy(model)
    with torch.no_grad():
        v = model.velocity(x, t, cond)
    assert v.dtype == torch.float32
    assert calls[0]["timestep"].dtype == torch.float32
    assert torch.equal(calls[0]["timestep"], t * CLOCK[model.family])
    assert calls[0]["hidden_states"].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_a_batch_of_four_equals_four_of_one(name: str, guidance: float) -> None:
    model = model_of(name)
    x, t, cond = some(model)
    with torch.no_grad():
        together = model.velocity(x, t, cond, guidance)
        alone = torch.cat(
            [model.velocity(x[i : i + 1], t[i : i + 1], cond[[i]], guidance) for i in range(len(x))]
        )
    # guidance g multiplies the error of both velocities by up to 2 g - 1
    assert (together - alone).abs().max() <= ORDER * together.abs().max() * (2 * guidance - 1)


@pytest.mark.parametrize("name", NAMES)
def test_guidance_one_is_one_call_of_b_rows(name: str, spy: Any) -> None:
    model = model_of(name)
    x, t, cond = some(model)
    calls = spy(model)
    with torch.no_grad():
        model.velocity(x, t, Cond(cond.tensors), 1.0)
    assert [len(c["hidden_states"]) for c in calls] == [4]


@pytest.mark.parametrize("name", NAMES)
def test_any_other_guidance_is_one_call_too(name: str, spy: Any) -> None:
    model = model_of(name)
    x, t, cond = some(model)
    calls = spy(model)
    with torch.no_grad():
        model.velocity(x, t, cond, 4.0)
    assert [len(c["hidden_states"]) for c in calls] == [4 * ROWS[name]]
    assert model.guidance_embedded == (ROWS[name] == 1)
    if model.guidance_embedded:
        assert torch.equal(calls[0]["guidance"], torch.full((4,), 4.0))


@pytest.mark.parametrize("name", [n for n in NAMES if ROWS[n] == 2])
def test_true_guidance_extrapolates_from_the_empty_prompt(name: str) -> None:
    model = model_of(name)
    x, t, cond = some(model)
    empty = model.encode([""] * 4)
    with torch.no_grad():
        v_c, v_u = model.velocity(x, t, cond), model.velocity(x, t, Cond(empty.tensors))
        guided = model.velocity(x, t, cond, 4.0)
    assert (v_c - v_u).abs().max() > 1e-3
    assert (guided - (v_u + 4 * (v_c - v_u))).abs().max() <= 7 * ORDER * guided.abs().max()


@pytest.fixture
def pipeline(request: pytest.FixtureRequest) -> Any:
    """The diffusers pipeline over the same folder."""
    import diffusers

    name = request.param
    kinds = {
        "flux": diffusers.FluxPipeline,
        "sd3": diffusers.StableDiffusion3Pipeline,
        "wan": diffusers.WanPipeline,
    }
    kind = kinds[name.split("-")[0]]
    dropped = dict.fromkeys(("text_encoder_3", "tokenizer_3")) if name == "sd3-no-t5" else {}
    pipe = kind.from_pretrained(str(tiny.bundle(name)), **dropped)
    pipe.set_progress_bar_config(disable=True)
    pipe.bundle_name = name
    pipe.text_length = 256 if name == "sd3-no-t5" else tiny.T5_LENGTH
    return pipe


@pytest.mark.parametrize("pipeline", NAMES, indirect=True)
def test_encodings_are_those_of_the_diffusers_pipeline(pipeline: Any) -> None:
    model = model_of(pipeline.bundle_name)
    cond = model.encode(PROMPTS)
    pooled = none_pooled = None
    with torch.no_grad():
        if model.family == "flux":
            text, pooled, _ = pipeline.encode_prompt(PROMPTS, max_sequence_length=pipeline.text_length)
            none, none_pooled, _ = pipeline.encode_prompt([""] * 4, max_sequence_length=pipeline.text_length)
        elif model.family == "wan":
            text, none = pipeline.encode_prompt(PROMPTS, max_sequence_length=pipeline.text_length)
        else:
            text, none, pooled, none_pooled = pipeline.encode_prompt(
                PROMPTS, None, None, negative_prompt="", max_sequence_length=pipeline.text_length
            )
    # the same calls on the same rows; only the empty prompt is encoded once instead of four times
    assert torch.equal(cond.tensors["text"], text)
    assert (pooled is None) == ("pooled" not in cond.tensors)
    if pooled is not None:
        assert torch.equal(cond.tensors["pooled"], pooled)
    if cond.negative is not None:
        assert (cond.negative.tensors["text"] - none).abs().max() <= ORDER * none.abs().max()
    if cond.negative is not None and none_pooled is not None:
        assert (cond.negative.tensors["pooled"] - none_pooled).abs().max() <= ORDER * none_pooled.abs().max()


@pytest.mark.parametrize("guidance", [1.0, 3.5])
@pytest.mark.parametrize("pipeline", NAMES, indirect=True)
def test_an_euler_sample_is_that_of_the_diffusers_pipeline(
    pipeline: Any, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    model = model_of(pipeline.bundle_name)
    noise, _, cond = some(model, 2)
    steps = 6
    # before the shift; without it StableDiffusion3Pipeline shifts twice
    sigmas = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
    arguments: dict[str, Any] = {
        "width": SIZE.width,
        "height": SIZE.height,
        "num_inference_steps": steps,
        "sigmas": sigmas,
        "output_type": "latent",
        "max_sequence_length": pipeline.text_length,
        "guidance_scale": guidance,
    }
    h, w = noise.shape[-2:]
    if model.family == "flux":
        arguments["latents"] = pipeline._pack_latents(noise, 2, 16, h, w)
        if not model.guidance_embedded:
            arguments |= {"true_cfg_scale": guidance, "negative_prompt": ["", ""]}
        theirs = pipeline(PROMPTS[:2], **arguments).images
        theirs = pipeline._unpack_latents(theirs, SIZE.height, SIZE.width, 8)
    elif model.family == "wan":
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        set_timesteps = scheduler.set_timesteps
        # WanPipeline has no argument for the times, so they are put into its scheduler
        scheduler.set_timesteps = lambda n, device: set_timesteps(sigmas=sigmas, device=device)
        monkeypatch.setattr(pipeline, "scheduler", scheduler)
        asked = {k: v for k, v in arguments.items() if k != "sigmas"}
        theirs = pipeline(PROMPTS[:2], latents=noise, num_frames=CLIP.frames, **asked).frames
    else:
        theirs = pipeline(PROMPTS[:2], latents=noise, **arguments).images
    with torch.no_grad():
        ours = euler(
            lambda x, t: model.velocity(x, t, cond, guidance),
            noise,
            model.schedule(steps, size_of(model)).float(),
        )
    assert (theirs - noise).abs().max() > 0.1
    # the same calls on the same numbers, but for their times, which pass through * 1000 / 1000 in float32
    # (measured: 5e-7 at the most)
    assert (ours - theirs).abs().max() <= ORDER * theirs.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_decoding_in_slices_equals_decoding_at_once(name: str) -> None:
    model = load(str(tiny.bundle(name)), decode_batch=3)
    whole = load(str(tiny.bundle(name)), decode_batch=8)
    size = size_of(model)
    latents = torch.randn(4, *model.latent_shape(size), generator=torch.Generator().manual_seed(5))
    a, b = model.decode(latents).pixels, whole.decode(latents).pixels
    assert a.shape == (4, size.frames, 3, size.height, size.width)
    assert a.dtype == torch.float32
    assert a.device.type == "cpu"
    assert 0 <= a.min() < a.max() <= 1
    assert (a - b).abs().max() <= ORDER


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_decoding_undoes_the_scale_and_shift_of_encoding(name: str) -> None:
    model: Any = load(str(tiny.bundle(name)))
    raw = torch.randn(2, 16, 4, 8, generator=torch.Generator().manual_seed(6))
    config = model.vae.config
    with torch.no_grad():
        picture = (model.vae.decode(raw).sample / 2 + 0.5).clamp(0, 1)
    decoded = model.decode((raw - config.shift_factor) * config.scaling_factor).pixels[:, 0]
    assert (decoded - picture).abs().max() <= ORDER


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
def test_encoding_is_the_scaled_mean_of_the_autoencoder_and_inverts_the_scale_of_decoding(name: str) -> None:
    model: Any = load(str(tiny.bundle(name)), decode_batch=2)
    size = size_of(model)
    generator = torch.Generator().manual_seed(8)
    pixels = torch.rand(3, size.frames, 3, size.height, size.width, generator=generator)
    y = pixels.transpose(1, 2) * 2 - 1
    config = model.vae.config
    with torch.no_grad():
        if name == "wan":
            mean, std = (
                torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std)
            )
            raw = model.vae.encode(y).latent_dist.mode()
            expected = (raw - mean) / std
        else:
            raw = model.vae.encode(y[:, :, 0]).latent_dist.mode()
            expected = (raw - config.shift_factor) * config.scaling_factor
        picture = (model.vae.decode(raw).sample / 2 + 0.5).clamp(0, 1)
    latents = model.encode_media(pixels)
    assert latents.shape == (3, *model.latent_shape(size))
    assert latents.dtype == torch.float32
    assert (latents - expected).abs().max() <= ORDER * expected.abs().max()
    decoded = model.decode(latents).pixels
    decoded = decoded.transpose(1, 2) if name == "wan" else decoded[:, 0]
    # scaled and scaled back: a rounding or two of the latent, through the decoder
    assert (decoded - picture).abs().max() <= 4 * ORDER
    with pytest.raises(UsageError, match="nearest legal size"):
        model.encode_media(pixels[..., :-1])


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
def test_a_latent_of_nan_is_seen_as_a_picture_of_nan(name: str) -> None:
    model = model_of(name)
    latents = torch.zeros(2, *model.latent_shape(size_of(model)))
    latents[1] = torch.nan
    media = model.decode(latents)
    assert media.pixels[1].isnan().all()
    assert media.ok.tolist() == [True, False]


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
def test_activation_checkpoints_leave_the_gradient_as_it_is(name: str) -> None:
    gradients = []
    for on in (False, True):
        model = load(str(tiny.bundle(name)))
        checkpoint_activations(model, on)
        x, t, cond = some(model)
        weight = next(
            p
            for n, p in model.net.named_parameters()
            if n.endswith(("attn.to_q.weight", "attn1.to_q.weight"))
        )
        weight.requires_grad_(True)
        model.velocity(x, t, cond, 2.0).square().mean().backward()
        gradients.append(weight.grad)
        assert bool(getattr(model.net, "gradient_checkpointing", None)) == on
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
def test_text_encoders_are_dropped_and_come_back(name: str) -> None:
    model: Any = load(str(tiny.bundle(name)))
    first = model.encode(PROMPTS)
    assert model._text
    model.free_text()
    assert not model._text
    again = model.encode(PROMPTS)
    assert torch.equal(first.tensors["text"], again.tensors["text"])


def test_packing_is_that_of_flux_and_unpacking_undoes_it() -> None:
    from diffusers import FluxPipeline

    from flowkit.models.flux import image_ids, pack, unpack

    x = torch.randn(3, 16, 6, 10, generator=torch.Generator().manual_seed(7))
    assert torch.equal(pack(x), FluxPipeline._pack_latents(x, 3, 16, 6, 10))
    assert torch.equal(unpack(pack(x), 6, 10), x)
    ids = FluxPipeline._prepare_latent_image_ids(1, 3, 5, torch.device("cpu"), torch.float32)
    assert torch.equal(image_ids(6, 10, torch.device("cpu")), ids)
