from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowkit.models import Cond, FlowModel, checkpoint_activations, load, lora
from flowkit.models.injection import ADAPTER
from flowkit.models.roles import FAKE, Role, Roles
from tests import tiny

ROLES: tuple[Role, ...] = ("student", "teacher", "fake")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_flux(tmp_path_factory.mktemp("flux"))


def add(model: FlowModel, adapter: str = ADAPTER) -> None:
    """A LoRA whose B is not zero, the same for a name wherever it is added."""
    lora.add_lora(model, 2, 4.0, "attention", seed=0, adapter=adapter)
    g = torch.Generator().manual_seed(1 if adapter == ADAPTER else 2)
    for name, p in model.net.named_parameters():
        if f".lora_B.{adapter}" in name:
            p.data = torch.randn(p.shape, generator=g) * 0.1


def given(model: FlowModel) -> tuple[Tensor, Tensor, Cond]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, *model.latent_shape(tiny_size()), generator=g)
    return x, torch.tensor([0.3, 0.9]), model.encode(["a", "b"])


def tiny_size() -> object:
    from flowkit.types import Size

    return Size(32, 32)


def one(folder: Path) -> Roles:
    return Roles.one(load(str(folder)), add)


def three(folder: Path) -> Roles:
    """The same three networks, each with weights of its own."""
    roles = Roles.three(load(str(folder)), lambda model: None)
    add(roles.models["student"])
    # the fake score's LoRA under the student's name, with the values that `add` gives the second adapter
    fake = roles.models["fake"]
    lora.add_lora(fake, 2, 4.0, "attention", seed=0)
    g = torch.Generator().manual_seed(2)
    for name, p in fake.net.named_parameters():
        if ".lora_B." in name:
            p.data = torch.randn(p.shape, generator=g) * 0.1
    return roles


def test_one_base_with_two_adapters_is_three_networks(folder: Path) -> None:
    a, b = one(folder), three(folder)
    x, t, cond = given(a.model)
    outs = {}
    for role in ROLES:
        with a.wear(role) as m, b.wear(role) as n:
            outs[role] = m.velocity(x, t, cond)
            assert torch.equal(outs[role], n.velocity(x, t, cond))
    base = load(str(folder)).velocity(x, t, cond)
    assert torch.equal(outs["teacher"], base)
    assert not torch.allclose(outs["student"], outs["teacher"], atol=1e-3)
    assert not torch.allclose(outs["fake"], outs["student"], atol=1e-3)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backward_pass_reaches_the_worn_network_alone(folder: Path, checkpointed: bool) -> None:
    gradients = {}
    for roles in (one(folder), three(folder)):
        if checkpointed:
            checkpoint_activations(roles.model)
        x, t, cond = given(roles.model)
        for role in ("student", "fake"):
            with roles.wear(role) as model:  # type: ignore[arg-type]
                model.velocity(x, t, cond).square().sum().backward()
            mine, other = (roles.trainable(r) for r in ((role, "fake" if role == "student" else "student")))  # type: ignore[arg-type]
            assert all(p.grad is not None for p in mine.values())
            assert all(p.grad is None for p in other.values())
            found = {n.replace(f".{FAKE}.", f".{ADAPTER}."): p.grad for n, p in mine.items()}
            for name, value in gradients.setdefault(role, found).items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
            for p in mine.values():
                p.grad = None


def test_what_is_worn_inside_gives_way_to_what_was_worn_outside(folder: Path) -> None:
    roles = one(folder)
    x, t, cond = given(roles.model)
    with roles.wear("fake") as model:
        outside = model.velocity(x, t, cond)
        with pytest.raises(ZeroDivisionError), roles.wear("teacher"):
            raise ZeroDivisionError
        assert torch.equal(model.velocity(x, t, cond), outside)
    student = roles.model.velocity(x, t, cond)
    with roles.wear("student") as model:
        assert torch.equal(model.velocity(x, t, cond), student)


def test_one_base_holds_its_weights_once(folder: Path) -> None:
    def bytes_of(roles: Roles) -> int:
        tensors = {p.data_ptr(): p.nbytes for m in roles.models.values() for p in m.net.parameters()}
        return sum(tensors.values())

    weights = sum(p.nbytes for p in load(str(folder)).net.parameters())
    assert bytes_of(three(folder)) >= 3 * weights
    assert bytes_of(one(folder)) < 1.5 * weights


def test_the_students_file_holds_its_own_adapter_alone(folder: Path, tmp_path: Path) -> None:
    roles = one(folder)
    x, t, cond = given(roles.model)
    with roles.wear("student") as model:
        expected = model.velocity(x, t, cond)
    for worn in ROLES:
        with roles.wear(worn):
            lora.save_lora(roles.model, tmp_path / worn, {"kind": "student"})
        other = load(str(folder))
        lora.load_lora(other, tmp_path / worn)
        # float32 sums through one more reading of the file: the same numbers
        torch.testing.assert_close(other.velocity(x, t, cond), expected, rtol=0, atol=1e-6)
