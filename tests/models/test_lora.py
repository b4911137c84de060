"""LoRA and full weights: what is trained, what it is compared with, and their files."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowkit.errors import UsageError, UserError
from flowkit.models import FlowModel, files, load, lora
from flowkit.models.injection import lora_config, matched
from flowkit.types import Size
from tests import tiny

SIZE = Size(32, 32)
FAMILIES = ["flux", "sd3"]


def fresh(name: str, dtype: str = "float32") -> FlowModel:
    return load(str(tiny.bundle(name)), dtype=dtype)


def ask(model: FlowModel) -> Tensor:
    """One velocity at a fixed state."""
    x = torch.randn(2, *model.latent_shape(SIZE), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.velocity(x, torch.tensor([0.8, 0.3]), model.encode(["a", "b"]), 2.0)


def shake(model: FlowModel, scale: float = 0.1) -> None:
    """Move what is trained."""
    generator = torch.Generator().manual_seed(2)
    for parameter in lora.trainable(model).values():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)


def with_lora(name: str, rank: int = 4, alpha: float = 8.0, targets: Any = "attention") -> FlowModel:
    model = fresh(name)
    lora.add_lora(model, rank, alpha, targets)
    shake(model)
    return model


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("targets", ["attention", "attention+ff", ["attn.to_q"]])
def test_a_new_lora_changes_nothing_and_trains_only_itself(name: str, targets: Any) -> None:
    model = fresh(name)
    before = ask(model)
    lora.add_lora(model, 4, 8, targets)
    assert torch.equal(ask(model), before)
    trained = lora.trainable(model)
    assert trained
    assert all(".lora_A." in n or ".lora_B." in n for n in trained)


@pytest.mark.parametrize("name", FAMILIES)
def test_presets_mean_the_real_module_names(name: str) -> None:
    model = fresh(name)
    attention = set(matched(model.net, model.targets["attention"]))
    both = set(matched(model.net, model.targets["attention+ff"]))
    assert {n.split(".attn.")[1] for n in attention} == {
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    }  # fmt: skip
    assert attention < both
    assert {n.split(".", 2)[2] for n in both - attention} == {
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    }  # fmt: skip


def test_lora_size_is_the_number_of_parameters_added() -> None:
    model = fresh("flux")
    said = lora.lora_size(model.net, 3, model.targets["attention+ff"])
    lora.add_lora(model, 3, 3, "attention+ff")
    assert sum(p.numel() for p in lora.trainable(model).values()) == said


@pytest.mark.parametrize("targets", ["attn", ["to_qq"], ["transformer_blocks.0.attn.to_kv"], []])
def test_a_target_that_matches_nothing_is_refused_with_near_names(targets: Any) -> None:
    with pytest.raises(UsageError) as caught:
        lora.add_lora(fresh("flux"), 4, 4, targets)
    text = str(caught.value)
    if targets == ["to_qq"]:
        assert "to_q" in text.split("near names")[1]
    if targets == "attn":
        assert "attention or attention+ff" in text


def test_lora_parameters_are_float32_under_a_bfloat16_base() -> None:
    model = fresh("flux", "bfloat16")
    lora.add_lora(model, 4, 8, "attention+ff")
    assert {p.dtype for p in lora.trainable(model).values()} == {torch.float32}
    v = ask(model)
    shake(model)
    assert v.dtype == torch.float32
    assert not torch.equal(ask(model), v)


def test_a_lora_is_the_same_for_a_seed_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    values = []
    for seed in (1, 1, 2):
        model = fresh("flux")
        lora.add_lora(model, 4, 8, "attention", seed=seed)
        values.append(torch.cat([p.detach().flatten() for p in lora.trainable(model).values()]))
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_is_uniform_with_the_bound_of_kaiming_and_b_is_zero() -> None:
    model = fresh("flux")
    lora.add_lora(model, 8, 8, ["attn.to_q"])
    for name, parameter in lora.trainable(model).items():
        if "lora_B" in name:
            assert not parameter.any()
        else:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound
            # a uniform value has variance bound^2 / 3; 256 of them miss it by 4 sqrt(.8 / 256) = 22 %
            assert abs(parameter.var().item() / (bound**2 / 3) - 1) < 0.22


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_of_a_lora_is_the_base_and_the_policy_comes_back(name: str) -> None:
    base = ask(fresh(name))
    model = with_lora(name)
    policy = ask(model)
    trained = list(lora.trainable(model))
    assert not torch.equal(policy, base)
    with lora.reference(model):
        assert torch.equal(ask(model), base)
        assert not torch.is_grad_enabled()
    with suppress(ZeroDivisionError), lora.reference(model):
        _ = 1 / 0
    assert torch.equal(ask(model), policy)
    assert list(lora.trainable(model)) == trained


def test_the_reference_of_full_weights_is_the_kept_copy() -> None:
    model = fresh("flux")
    base = ask(model)
    lora.train_all(model)
    assert model.frozen is None
    lora.keep_reference(model)
    kept = model.frozen
    shake(model)
    lora.keep_reference(model)
    assert model.frozen is kept
    policy = ask(model)
    storage = {n: p.data_ptr() for n, p in lora.trainable(model).items()}
    with lora.reference(model):
        assert torch.equal(ask(model), base)
        assert not torch.is_grad_enabled()
    with suppress(ZeroDivisionError), lora.reference(model):
        _ = 1 / 0
    assert torch.equal(ask(model), policy)
    assert {n: p.data_ptr() for n, p in lora.trainable(model).items()} == storage


def test_the_reference_between_forward_and_backward_leaves_the_gradient_as_it_is() -> None:
    gradients = []
    for look in (False, True):
        model = fresh("flux")
        lora.train_all(model)
        lora.keep_reference(model)
        shake(model, 0.01)
        x = torch.randn(1, *model.latent_shape(SIZE), generator=torch.Generator().manual_seed(1))
        loss = model.velocity(x, torch.tensor([0.5]), model.encode(["a"])).square().mean()
        if look:
            with lora.reference(model):
                ask(model)
        loss.backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in lora.trainable(model).values() if p.grad is not None])
        )
    assert torch.equal(*gradients)


def test_full_training_of_bfloat16_is_refused() -> None:
    with pytest.raises(UsageError, match="needs dtype: float32"):
        lora.train_all(fresh("flux", "bfloat16"))


def test_a_second_lora_is_refused() -> None:
    with pytest.raises(UsageError, match="already has a LoRA"):
        lora.add_lora(with_lora("flux"), 4, 4, "attention")


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("targets", ["attention+ff", ["transformer_blocks.0.attn.to_q"], ["proj_out"]])
def test_a_lora_file_gives_the_same_velocity_back(name: str, targets: Any, tmp_path: Path) -> None:
    model = with_lora(name, targets=targets)
    file = lora.save_lora(model, tmp_path)
    assert file == tmp_path / "pytorch_lora_weights.safetensors"
    again = fresh(name)
    lora.load_lora(again, file)
    assert torch.equal(ask(again), ask(model))
    assert list(lora.trainable(again)) == list(lora.trainable(model))
    # and once more onto a model that carries a LoRA of this form: a resumed run
    resumed = fresh(name)
    lora.add_lora(resumed, 4, 8, targets, seed=9)
    lora.load_lora(resumed, tmp_path)
    assert torch.equal(ask(resumed), ask(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_diffusers_loads_the_file_with_scale_alpha_over_rank(name: str, tmp_path: Path) -> None:
    model = with_lora(name, rank=4, alpha=6.0, targets="attention+ff")
    lora.save_lora(model, tmp_path)
    tensors = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    net: Any = fresh(name).net
    net.load_lora_adapter(str(tmp_path), prefix="transformer", weight_name="pytorch_lora_weights.safetensors")
    layers = dict(net.named_modules())
    keys = [k for k in tensors if k.endswith("lora_A.weight")]
    assert len(keys) == len(matched(fresh(name).net, model.targets["attention+ff"]))
    for key in keys:
        module = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
        layer = layers[module]
        delta = 6.0 / 4 * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
        effect = layer(x) - layer.base_layer(x)
        # float32 sums of at most 128 terms
        assert (effect - x @ delta.T).abs().max() <= 1e-5
        assert delta.abs().max() > 1e-3
    other = fresh(name)
    other.net = net
    assert torch.equal(ask(other), ask(model))


def test_the_flux_pipeline_loads_the_file(tmp_path: Path) -> None:
    from diffusers import FluxPipeline

    model = with_lora("flux", targets="attention+ff")
    lora.save_lora(model, tmp_path)
    pipeline = FluxPipeline.from_pretrained(str(tiny.bundle("flux")))
    pipeline.load_lora_weights(str(tmp_path))
    other = fresh("flux")
    other.net = pipeline.transformer
    assert torch.equal(ask(other), ask(model))


def test_the_header_is_minimal_and_says_what_the_file_is(tmp_path: Path) -> None:
    model = with_lora("flux", rank=4, alpha=6.0)
    file = lora.save_lora(model, tmp_path / "a.safetensors", {"weights": "ema", "trained": {"step": 3}})
    tensors, metadata = files.read_safetensors(file)
    config = json.loads(metadata["lora_adapter_metadata"])
    minimal = "r lora_alpha rank_pattern alpha_pattern target_modules use_dora use_rslora lora_bias"
    assert {k.removeprefix("transformer.") for k in config} == set(minimal.split())
    assert all(k.startswith("transformer.") for k in config)
    assert config["transformer.r"] == 4
    assert config["transformer.lora_alpha"] == 6.0
    header = json.loads(metadata["flowkit"])
    assert header["kind"] == "lora"
    assert header["family"] == "flux"
    assert header["base_model"] == model.name
    assert header["weights"] == "ema"
    assert header["trained"] == {"step": 3}
    assert len(header["base_sha"]) == 64
    assert all(k.endswith((".lora_A.weight", ".lora_B.weight")) for k in tensors)
    assert {v.dtype for v in tensors.values()} == {torch.float32}


def rewritten(tmp_path: Path, change: Any, keep_metadata: bool = False) -> Path:
    """A LoRA file of the tiny FLUX, its tensors passed through `change`."""
    file = lora.save_lora(with_lora("flux"), tmp_path / "a.safetensors")
    tensors, metadata = files.read_safetensors(file)
    save_file(
        change(dict(tensors)), tmp_path / "b.safetensors", metadata if keep_metadata else {"format": "pt"}
    )
    return tmp_path / "b.safetensors"


def test_without_metadata_the_scale_is_one_or_that_of_the_alpha_tensors(tmp_path: Path) -> None:
    plain = fresh("flux")
    lora.load_lora(plain, rewritten(tmp_path, lambda t: t))
    assert {lora_config(plain)["lora_alpha"] / lora_config(plain)["r"]} == {1.0}

    def alphas(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        modules = [k.removesuffix(".lora_A.weight") for k in tensors if k.endswith("lora_A.weight")]
        return tensors | {f"{m}.alpha": torch.tensor(2.0 if i else 12.0) for i, m in enumerate(modules)}

    scaled = fresh("flux")
    lora.load_lora(scaled, rewritten(tmp_path, alphas))
    scales = [m.scaling["default"] for m in scaled.net.modules() if hasattr(m, "scaling")]
    assert sorted(scales) == [0.5] * (len(scales) - 1) + [3.0]
    # and the mixed scales survive a round trip
    lora.save_lora(scaled, tmp_path / "c")
    again = fresh("flux")
    lora.load_lora(again, tmp_path / "c")
    assert torch.equal(ask(again), ask(scaled))


def test_a_lora_on_the_last_layer_alone_stays_there(tmp_path: Path) -> None:
    # `proj_out` is also the end of the name of every single block's last layer
    pair = {
        "transformer.proj_out.lora_A.weight": torch.ones(2, 32),
        "transformer.proj_out.lora_B.weight": torch.ones(64, 2),
    }
    save_file(pair, tmp_path / "a.safetensors")
    model = fresh("flux")
    lora.load_lora(model, tmp_path / "a.safetensors")
    assert list(lora.trainable(model)) == ["proj_out.lora_A.default.weight", "proj_out.lora_B.default.weight"]
    lora.save_lora(model, tmp_path)
    net: Any = fresh("flux").net
    net.load_lora_adapter(str(tmp_path), prefix="transformer", weight_name="pytorch_lora_weights.safetensors")
    assert [n for n, _ in net.named_parameters() if "lora_A" in n] == ["proj_out.lora_A.default_0.weight"]
    again = fresh("flux")
    lora.load_lora(again, tmp_path)
    assert torch.equal(ask(again), ask(model))


def first(change: Any) -> Any:
    """Change the first tensor only."""
    return lambda tensors: {k: change(v) if i == 0 else v for i, (k, v) in enumerate(tensors.items())}


def renamed(change: Any) -> Any:
    return lambda tensors: {change(k): v for k, v in tensors.items()}


REFUSED: dict[str, tuple[Any, str]] = {
    "nan": (first(lambda v: v * torch.nan), "nan or infinity in"),
    "inf": (first(lambda v: v / 0), "nan or infinity in"),
    "no prefix": (renamed(lambda k: k.removeprefix("transformer.")), "match no layer .* such as single_"),
    "peft name": (renamed(lambda k: k.replace(".weight", ".default.weight")), "match no layer"),
    "compiled": (renamed(lambda k: k.replace("transformer.", "transformer._orig_mod.", 1)), "match no layer"),
    "comfy": (renamed(lambda k: k.replace("transformer.", "diffusion_model.", 1)), "match no layer"),
    "text encoder": (renamed(lambda k: k.replace("transformer.", "text_encoder.", 1)), "match no layer"),
    "one lost": (
        lambda t: t | {"transformer.nowhere.lora_A.weight": torch.ones(4, 4)},
        "1 of the .*nowhere",
    ),
    "half": (lambda t: {k: v for k, v in t.items() if "lora_A" in k}, "only one half"),
    "wide": (
        lambda t: {k: torch.cat([v, v], 1 if "lora_A" in k else 0) for k, v in t.items()},
        "made for another",
    ),
    "ranks apart": (
        lambda t: {k: torch.cat([v, v], 0) if "lora_A" in k else v for k, v in t.items()},
        "no LoRA pair",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_lora_that_does_not_fit_is_refused_and_the_model_left_as_it_was(fault: str, tmp_path: Path) -> None:
    change, said = REFUSED[fault]
    file = rewritten(tmp_path, change)
    model = fresh("flux")
    with pytest.raises(UserError, match=said) as caught:
        lora.load_lora(model, file)
    assert str(file) in str(caught.value)
    assert not lora.has_lora(model)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"lora_adapter_metadata": "{"}, "broken lora_adapter_metadata"),
        ({"lora_adapter_metadata": '{"transformer.r": 4}'}, "broken lora_adapter_metadata"),
        (
            {"lora_adapter_metadata": '{"transformer.lora_alpha": 4, "transformer.use_dora": true}'},
            "use_dora",
        ),
        ({"flowkit": "{"}, "broken `flowkit` header"),
        ({"flowkit": '{"kind": "lora", "family": "sd3"}'}, "family sd3 .* family flux"),
        ({"flowkit": '{"kind": "latents", "family": "flux"}'}, "holds latents weights"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(metadata: dict[str, str], said: str, tmp_path: Path) -> None:
    tensors, _ = files.read_safetensors(lora.save_lora(with_lora("flux"), tmp_path))
    save_file(tensors, tmp_path / "b.safetensors", metadata)
    with pytest.raises(UserError, match=said):
        lora.load_lora(fresh("flux"), tmp_path / "b.safetensors")


def test_a_scale_given_twice_is_refused(tmp_path: Path) -> None:
    def twice(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        key = next(k for k in tensors if k.endswith("lora_A.weight"))
        return tensors | {key.replace("lora_A.weight", "alpha"): torch.tensor(1.0)}

    with pytest.raises(UserError, match="scale twice"):
        lora.load_lora(fresh("flux"), rewritten(tmp_path, twice, keep_metadata=True))


def test_a_checkpoint_of_another_rank_or_alpha_is_refused(tmp_path: Path) -> None:
    lora.save_lora(with_lora("flux", rank=4, alpha=8.0), tmp_path)
    for rank, alpha in ((2, 8.0), (4, 4.0)):
        model = fresh("flux")
        lora.add_lora(model, rank, alpha, "attention")
        with pytest.raises(UserError, match=r"does not fit the LoRA of this run"):
            lora.load_lora(model, tmp_path)


def test_a_lora_of_another_family_is_refused(tmp_path: Path) -> None:
    lora.save_lora(with_lora("sd3"), tmp_path)
    with pytest.raises(UserError, match="family sd3"):
        lora.load_lora(fresh("flux"), tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_full_weights_round_trip_here_and_in_diffusers(name: str, tmp_path: Path) -> None:
    model = fresh(name)
    lora.train_all(model)
    shake(model, 0.01)
    lora.save_full(model, tmp_path, {"weights": "raw"})
    again = fresh(name)
    lora.load_full(again, tmp_path)
    assert torch.equal(ask(again), ask(model))
    net = type(model.net).from_pretrained(str(tmp_path))  # type: ignore[attr-defined]
    other = fresh(name)
    other.net = net
    assert torch.equal(ask(other), ask(model))
    header = json.loads(
        files.read_safetensors(tmp_path / "diffusion_pytorch_model.safetensors")[1]["flowkit"]
    )
    assert (header["kind"], header["family"], header["weights"]) == ("full", name, "raw")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (first(lambda v: v * torch.nan), "nan or infinity"),
        (first(lambda v: torch.cat([v, v])), "made for another model"),
        (lambda t: dict(list(t.items())[1:]), "1 names differ"),
        (lambda t: t | {"more": torch.ones(1)}, "1 names differ, such as more"),
    ],
)
def test_full_weights_that_do_not_fit_are_refused_and_the_model_left_as_it_was(
    change: Any, said: str, tmp_path: Path
) -> None:
    tensors = fresh("flux").net.state_dict()
    save_file({k: v.clone() for k, v in change(dict(tensors)).items()}, tmp_path / "a.safetensors")
    model = fresh("flux")
    with pytest.raises(UserError, match=said):
        lora.load_full(model, tmp_path / "a.safetensors")
    assert all(torch.equal(v, tensors[k]) for k, v in model.net.state_dict().items())


def test_a_lora_given_as_full_weights_and_the_other_way_round_is_named(tmp_path: Path) -> None:
    file = lora.save_lora(with_lora("flux"), tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="holds lora weights"):
        lora.load_full(fresh("flux"), file)
    full = lora.save_full(fresh("flux"), tmp_path / "b.safetensors")
    with pytest.raises(UserError, match="holds full weights"):
        lora.load_lora(fresh("flux"), full)
    with pytest.raises(UsageError, match="save it with save_lora"):
        lora.save_full(with_lora("flux"), tmp_path / "c.safetensors")


def test_dropout_acts_in_training_only() -> None:
    model = fresh("flux")
    lora.add_lora(model, 4, 8, "attention", dropout=0.5)
    shake(model)
    assert torch.equal(ask(model), ask(model))
    model.net.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(ask(model), ask(model))
