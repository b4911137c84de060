"""LoRA layers in a transformer through peft: which layers, which rank, how a file describes them."""

from __future__ import annotations

import difflib
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flowkit.errors import UsageError
from flowkit.models import FlowModel

ADAPTER = "default"


def matched(net: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers whose name is one of the targets or ends in `.` and one of them.

    A layer that carries a LoRA already counts under its own name.
    """
    names = [
        name.removesuffix(".base_layer")
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    ]
    return [name for name in names if any(name == t or name.endswith(f".{t}") for t in targets)]


def resolve_targets(
    net: nn.Module, presets: Mapping[str, Sequence[str]], targets: str | Sequence[str]
) -> list[str]:
    """Suffixes of module names that a preset or a list of names stands for.

    Raises:
        UsageError: an unknown preset, an empty list, or a name that matches no linear layer; names near ones.
    """
    if isinstance(targets, str):
        if targets not in presets:
            raise UsageError(
                f"lora.targets is {targets}: give {' or '.join(presets)}, or a list of module names such as "
                f"[{', '.join(next(iter(presets.values()))[:2])}]."
            )
        # a network without blocks of one kind leaves some of a preset's names idle
        return [t for t in presets[targets] if matched(net, [t])]
    if not targets:
        raise UsageError("lora.targets is an empty list: name at least one module, or give `attention`.")
    for target in targets:
        if not matched(net, [target]):
            tails = {n for n, m in net.named_modules() if isinstance(m, nn.Linear)}
            tails |= {".".join(n.split(".")[-k:]) for n in tails for k in (1, 2, 3)}
            near = difflib.get_close_matches(target, sorted(tails), 3, 0.5)
            hint = (
                f"near names are {', '.join(near)}"
                if near
                else f"there are for example {', '.join(sorted(tails)[:3])}"
            )
            raise UsageError(
                f"lora.targets names {target}, which no linear layer of the transformer is called; {hint}."
            )
    return list(targets)


def lora_size(net: nn.Module, rank: int, targets: Sequence[str]) -> int:
    """Parameters that `add_lora` would add; works on the meta device."""
    layers = dict(net.named_modules())
    return sum(rank * (layers[n].in_features + layers[n].out_features) for n in matched(net, targets))


def inject(
    model: FlowModel,
    targets: Sequence[str] | str,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    adapter: str = ADAPTER,
) -> None:
    """Add peft layers with B zero, float32; A is left to the caller.

    Args:
        model: has no LoRA of that name yet.
        targets: suffixes of module names, or one regular expression for whole names.
        rank: default rank.
        alpha: default alpha.
        dropout: on the LoRA branch, in train mode only.
        ranks: module name -> rank where it differs.
        alphas: module name -> alpha where it differs.
        adapter: its name; files hold the usual one.
    """
    from peft import LoraConfig

    if adapter in (getattr(model.net, "peft_config", None) or {}):
        raise UsageError(f"{model.name} already has a LoRA; load the model again to start another.")
    net: Any = model.net
    net.requires_grad_(False)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        # peft reads these keys as regular expressions for the end of a name
        rank_pattern={f"^{re.escape(k)}": v for k, v in (ranks or {}).items()},
        alpha_pattern={f"^{re.escape(k)}": v for k, v in (alphas or {}).items()},
    )
    # peft draws its own A from the global state, and warns of a second adapter, which is meant
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
        net.add_adapter(config, adapter_name=adapter)
    net.train(net.training)  # the new layers start in train mode, with their dropout on
    for parameter in adapter_parameters(model, adapter).values():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)


def adapter_parameters(model: FlowModel, adapter: str = ADAPTER) -> dict[str, nn.Parameter]:
    """The LoRA weights of one adapter, by name, in the network's order."""
    return {n: p for n, p in model.net.named_parameters() if ".lora_" in n and f".{adapter}." in n}


def has_lora(model: FlowModel) -> bool:
    """Whether the transformer carries LoRA layers."""
    return bool(getattr(model.net, "peft_config", None))


def lora_config(model: FlowModel) -> dict[str, Any]:
    """The minimal set of LoRA fields that every peft knows, as they are in this model."""
    net: Any = model.net
    config = net.peft_config[ADAPTER]
    targets = config.target_modules
    return {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "use_dora": False,
        "use_rslora": False,
        "lora_bias": False,
    }


def common(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The most common value and the entries that differ from it."""
    most = Counter(values.values()).most_common(1)[0][0]
    return most, {k: v for k, v in values.items() if v != most}
