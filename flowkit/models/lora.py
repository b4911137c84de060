"""What is trained and what it is compared with: LoRA or all weights, and the reference policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowkit.errors import UsageError
from flowkit.models import FlowModel
from flowkit.models.injection import (
    ADAPTER,
    adapter_parameters,
    has_lora,
    inject,
    lora_size,
    resolve_targets,
)
from flowkit.models.weights import load_full, load_lora, save_full, save_lora

__all__ = [
    "add_lora",
    "has_lora",
    "keep_reference",
    "load_full",
    "load_lora",
    "lora_size",
    "reference",
    "resolve_targets",
    "save_full",
    "save_lora",
    "train_all",
    "trainable",
]


def add_lora(
    model: FlowModel,
    rank: int,
    alpha: float,
    targets: str | Sequence[str],
    dropout: float = 0.0,
    seed: int = 0,
    adapter: str = ADAPTER,
) -> None:
    """Put LoRA layers into the transformer: A Kaiming-uniform from `seed`, B zero, float32 always.

    arXiv:2106.09685. The base weights are frozen; the effect is scaled by alpha / rank.

    Raises:
        UsageError: targets that match nothing.
    """
    names = resolve_targets(model.net, model.targets, targets)
    inject(model, names, rank=rank, alpha=alpha, dropout=dropout, adapter=adapter)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(model, adapter).items():
        if ".lora_A." in name:
            # bound of nn.init.kaiming_uniform_(a=sqrt(5)), which peft uses: 1 / sqrt(fan in)
            values = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter.data.copy_(values / math.sqrt(parameter.shape[1]))


def train_all(model: FlowModel) -> None:
    """Make every weight of the transformer trainable.

    Raises:
        UsageError: bfloat16 weights: their 8 bits swallow updates below 1/256 of a weight.
    """
    if any(p.dtype != torch.float32 for p in model.net.parameters()):
        raise UsageError(
            "train: full needs dtype: float32, since bfloat16 weights lose small updates; or train: lora; or, in "
            "distillation, shard: true, which keeps float32 weights and computes in bfloat16."
        )
    model.net.requires_grad_(True)


def trainable(model: FlowModel) -> dict[str, nn.Parameter]:
    """Parameters that a trainer moves, by name, in the network's order."""
    return {n: p for n, p in model.net.named_parameters() if p.requires_grad}


def keep_reference(model: FlowModel) -> None:
    """Keep a copy of the trainable weights as they are now, once; a new LoRA needs none, its base is the reference.

    Call it after all weights are loaded and before a checkpoint or an update changes them.
    """
    if model.frozen is None:
        model.frozen = {n: p.detach().clone() for n, p in trainable(model).items()}


@contextmanager
def reference(model: FlowModel) -> Iterator[None]:
    """Inside, the model is the reference policy, without gradient: the kept copy swapped in, or adapters off.

    On leaving, also by an exception, the trained weights are back, the same tensors bit for bit.
    """
    if model.frozen is not None:
        with _swapped(trainable(model), model.frozen), torch.no_grad():
            yield
        return
    assert has_lora(model), "keep_reference(model) before the first update"
    net: Any = model.net
    net.disable_adapters()
    try:
        with torch.no_grad():
            yield
    finally:
        net.enable_adapters()


@contextmanager
def _swapped(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """The parameters hold `values` inside; no copy is made, only storage is exchanged."""
    kept = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = values[name]
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = kept[name]
