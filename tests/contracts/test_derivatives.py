"""The derivative goes through the real classes of diffusers, unmodified and however they are kept."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from flowkit.jvp import derivative
from flowkit.runtime.dist import launch
from tests.networks import NETWORKS, build, call, some

REPO = Path(__file__).resolve().parents[2]
Function = Callable[[Tensor, Tensor], Tensor]


@cache
def network(name: str) -> Any:
    """One a process; tests that change it make a copy."""
    return build(name)


def relative(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm())


class _Float64(TorchFunctionMode):
    """Undoes the casts to float32 that the networks put around norms and rotations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        down = func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:])
        if down and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def sinusoids(
    timesteps: Tensor,
    embedding_dim: int,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 1,
    scale: float = 1,
    max_period: int = 10000,
) -> Tensor:
    """Give the embedding of time of diffusers, in float64."""
    half = embedding_dim // 2
    exponent = torch.arange(half, dtype=torch.float64) / (half - downscale_freq_shift)
    angles = scale * timesteps[:, None].double() * max_period**-exponent
    parts = [angles.cos(), angles.sin()] if flip_sin_to_cos else [angles.sin(), angles.cos()]
    return torch.cat(parts, -1)


@pytest.fixture
def embed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Choose the embedding of time: in float64, or diffusers' own, whatever the network's dtype."""
    from diffusers.models import embeddings

    own = embeddings.get_timestep_embedding

    def outside(*args: Any, **kw: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            return own(*args, **kw)

    def choose(wide: bool) -> None:
        monkeypatch.setattr(embeddings, "get_timestep_embedding", sinusoids if wide else outside)

    return choose


def difference(name: str, dx: Tensor | None, dt: Tensor | None, h: float) -> Tensor:
    """Central difference of a float64 copy of the network along (dx, dt)."""
    fn = call(name, copy.deepcopy(network(name)).double())
    x, t = (z.double() for z in some(name)[:2])
    with torch.no_grad(), _Float64():
        ends = [
            fn(x if dx is None else x + s * dx.double(), t if dt is None else t + s * dt.double())
            for s in (h, -h)
        ]
    return (ends[0] - ends[1]) / (2 * h)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_torchs_own_through_the_plain_attention(name: str) -> None:
    x, t, dx, dt = some(name)
    fn = call(name, network(name))
    y, dy = derivative(fn, (x, t), (dx, dt))
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        right, d_right = torch.func.jvp(fn, (x, t), (dx, dt))
    assert (y.dtype, dy.dtype) == (torch.float32, torch.float32)
    assert relative(y, right) <= 1e-5
    assert relative(dy, d_right) <= 1e-5


@pytest.mark.parametrize("name", NETWORKS)
def test_along_x_it_is_the_limit_of_differences(name: str) -> None:
    x, t, dx, _ = some(name)
    _, dy = derivative(call(name, network(name)), (x, t), (dx, None))
    # float64: rounding 2^-53 / h and truncation h^2 / 6 times the third derivative, here of size 1 to 100:
    # h = 1e-5 leaves 1e-11 + 1e-9, so what is seen is the float32 of the derivative
    assert relative(dy, difference(name, dx, None, 1e-5)) <= 1e-5


@pytest.mark.parametrize("name", NETWORKS)
def test_along_time_it_is_the_limit_of_differences(name: str, embed: Callable[[bool], None]) -> None:
    embed(True)
    x, t, _, dt = some(name)
    _, dy = derivative(call(name, network(name)), (x, t), (None, dt))
    # sines of frequencies up to 1000: truncation (1000 h)^2 / 6 and rounding 2^-53 / h * size of the angle
    # over 1000, so h = 1e-8 leaves 2e-11 + 1e-8
    assert relative(dy, difference(name, None, dt, 1e-8)) <= 1e-5


@pytest.mark.parametrize("name", NETWORKS)
def test_along_time_the_float32_sinusoids_of_diffusers_are_all_that_is_lost(
    name: str, embed: Callable[[bool], None]
) -> None:
    embed(False)
    x, t, _, dt = some(name)
    _, dy = derivative(call(name, network(name)), (x, t), (None, dt))
    # An angle of size 1000 t is rounded in float32, by up to 1000 * 2^-24 each end; over a step of 1000 h in
    # the angle that is an error of 2^-24 / h, against a truncation of (1000 h)^2 / 6: the sum is
    # least at h = (3 * 2^-24 / 1000^2)^(1/3), for a direction of size 1
    h = (3 * 2.0**-24 / 1000**2) ** (1 / 3)
    bound = 2.0**-24 / h + (1000 * h) ** 2 / 6
    assert bound < 2e-3
    assert relative(dy, difference(name, None, dt, h)) <= bound


def adapted(name: str) -> Any:
    """A copy with a LoRA whose B is not zero."""
    from peft import LoraConfig

    net = copy.deepcopy(network(name))
    net.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=list(NETWORKS[name].lora)))
    generator = torch.Generator().manual_seed(5)
    for key, parameter in net.named_parameters():
        if "lora_B" in key:
            parameter.data.normal_(0, 0.1, generator=generator)
    return net


@pytest.mark.parametrize("name", NETWORKS)
def test_adapters_are_part_of_it(name: str) -> None:
    x, t, dx, dt = some(name)
    fn = call(name, adapted(name))
    _, dy = derivative(fn, (x, t), (dx, dt))
    _, base = derivative(call(name, network(name)), (x, t), (dx, dt))
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        _, right = torch.func.jvp(fn, (x, t), (dx, dt))
    assert relative(dy, right) <= 1e-5
    assert relative(dy, base) > 1e-3


@pytest.mark.parametrize("name", NETWORKS)
def test_with_checkpoints_switched_on_it_is_the_same(name: str) -> None:
    net = copy.deepcopy(network(name)).train()
    x, t, dx, dt = some(name)
    _, right = derivative(call(name, net), (x, t), (dx, dt))
    net.enable_gradient_checkpointing()
    assert torch.equal(derivative(call(name, net), (x, t), (dx, dt))[1], right)


@pytest.mark.parametrize("name", NETWORKS)
def test_bfloat16_with_float32_times_is_close_to_float32(name: str) -> None:
    net = adapted(name).to(torch.bfloat16)
    x, t, dx, dt = some(name)
    x, dx = x.bfloat16(), dx.bfloat16()
    y, dy = derivative(call(name, net), (x, t), (dx, dt))
    assert (y.dtype, dy.dtype) == (torch.bfloat16, torch.bfloat16)
    assert y.isfinite().all()
    assert dy.isfinite().all()
    # the same weights and inputs, computed in float32
    fine = call(name, copy.deepcopy(net).float())
    y32, dy32 = derivative(fine, (x.float(), t), (dx.float(), dt))
    # Each result is rounded by up to 2^-8, 2^-9.3 in the mean square, and some 50 one after another add up
    # like a random walk to 50^(1/2) * 2^-9.3 = .011; of a product's derivative both factors count
    assert relative(y, y32) <= 0.011
    assert relative(dy, dy32) <= 0.022


WORKER = """
import json, sys
from pathlib import Path
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from flowkit.jvp import derivative
from flowkit.runtime import dist
from tests.networks import NETWORKS, blocks, build, call, some

seen = {}
with dist.init("cpu") as d:
    mesh = init_device_mesh("cpu", (2,))
    for name in NETWORKS:
        x, t, dx, dt = some(name)
        whole, net = build(name), build(name)
        for block in blocks(net):
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        for module in (whole, net):
            module.requires_grad_(True)
        local = sum(p.to_local().numel() for p in net.parameters())
        errors = {"sharded": local / sum(p.numel() for p in whole.parameters())}
        right = derivative(call(name, whole), (x, t), (dx, dt))
        got = derivative(call(name, net), (x, t), (dx, dt))
        for key, a, b in zip(("y", "dy"), got, right, strict=True):
            errors[key] = float((a - b).norm() / b.norm())
        for module in (whole, net):
            call(name, module)(x, t).square().mean().backward()
        full = {k: p.grad.full_tensor() for k, p in net.named_parameters() if p.grad is not None}
        grads = {k: p.grad for k, p in whole.named_parameters() if p.grad is not None}
        assert full.keys() == grads.keys() and full
        apart = sum((full[k] - g).square().sum() for k, g in grads.items()).sqrt()
        errors["grad"] = float(apart / sum(g.square().sum() for g in grads.values()).sqrt())
        again = derivative(call(name, net), (x, t), (dx, dt))
        errors["again"] = float((again[1] - right[1]).norm() / right[1].norm())
        seen[name] = errors
    Path(sys.argv[1], f"{d.rank}.json").write_text(json.dumps(seen))
"""


@pytest.mark.slow
def test_in_two_shards_it_is_the_same_and_so_is_the_backward_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]))
    assert launch(2, [sys.executable, "-c", WORKER, str(tmp_path)]) == 0
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(seen) == list(NETWORKS)
        for errors in seen.values():
            assert 0.4 < errors.pop("sharded") < 0.6
            assert max(errors.values()) <= 1e-6
