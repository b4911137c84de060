"""A transformer in shards over all processes (FSDP2): each holds its part of every weight, gradient and moment.

The weights that are trained are float32; a call gathers one layer at a time, in the model's dtype. What diffusers
keeps in float32 in a bfloat16 network (Wan's norms, modulation tables and embedding of the time) is gathered in
float32, too. Every process must take part in every call, backward pass and gathering.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flowkit.models import FlowModel

CPU = torch.device("cpu")


def shard(model: FlowModel) -> None:
    """Load the transformer in float32 on the CPU, and leave this process its shard on the model's device.

    Call it before the network is used, in all processes of the default group.
    """
    loader: Any = copy.copy(model)
    loader.dtype, loader.device = torch.float32, CPU
    net: nn.Module = loader.net
    _split(net, model.dtype, model.device)
    model.__dict__["net"] = net


def twin(model: FlowModel) -> FlowModel:
    """The same model with a sharded network of its own: a frozen copy of the shards; the autoencoder is shared."""
    own: Any = model.net
    net = empty(own)
    _split(net, model.dtype, model.device)
    net.to_empty(device=model.device)
    with torch.no_grad():
        for mine, theirs in zip(_tensors(net), _tensors(own), strict=True):
            local(mine).copy_(local(theirs))
    net.eval().requires_grad_(False)
    if own.is_gradient_checkpointing:
        net.enable_gradient_checkpointing()
    other = copy.copy(model)
    other.__dict__["net"] = net
    return other


def empty(net: Any) -> Any:
    """A network of the same class and config without weights; FSDP2 gives what it shards a class of its own."""
    cls: Any = next(c for c in type(net).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):
        return cls.from_config(net.config)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is one process's part of a tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part that this process holds, sharing its memory; all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered on this process's device: called in every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Copies on the CPU of whole tensors, one gathered after another: called in every process.

    Args:
        tensors: by name, in the same order everywhere.
        keep: whether this process wants them; else it only takes part, and the result is empty.
    """
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if keep:
            found[name] = full.to("cpu", copy=True)
    return found


def like(value: Tensor, target: Tensor) -> Tensor:
    """A whole tensor as `target` holds its own: this process's part of it, or a copy on its device."""
    value = value.to(target.device)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def refresh(net: nn.Module) -> None:
    """Forget what is still gathered from the last call: needed where shards have changed outside of training."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _split(net: Any, dtype: torch.dtype, device: torch.device) -> None:
    """One group a block, and one of what is left; where dtypes differ, one for each part of one dtype."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    wide = () if dtype == torch.float32 else tuple(getattr(net, "_keep_in_fp32_modules", None) or ())
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    blocks = [m for m in net.modules() if type(m).__name__ in (net._no_split_modules or ())]
    # what holds others comes after them: a group leaves out what has one already
    for module in (*blocks, net):
        mixed = any(_stays(name, wide) for name, _ in module.named_parameters())
        for part in _narrow(module, wide) if mixed else ():
            fully_shard(part, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=plain if mixed else policy)


def _stays(name: str, wide: tuple[str, ...]) -> bool:
    """Whether diffusers keeps a parameter of this name in float32."""
    return any(part in wide for part in name.split("."))


def _narrow(module: nn.Module, wide: tuple[str, ...]) -> Iterator[nn.Module]:
    """The largest parts of a module that hold parameters, none of them kept in float32, and no group yet."""
    for name, child in module.named_children():
        names = [f"{name}.{inner}" for inner, _ in child.named_parameters()]
        if isinstance(child, nn.ModuleList) or any(_stays(n, wide) for n in names):
            if name not in wide:
                yield from _narrow(child, wide)
        elif names and not any(isinstance(p, DTensor) for p in child.parameters()):
            yield child


def _tensors(net: nn.Module) -> Iterator[Tensor]:
    yield from net.parameters()
    yield from net.buffers()
