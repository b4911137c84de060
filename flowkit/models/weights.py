"""Trained weights on disk: a LoRA in diffusers' layout, or a whole transformer, with flowkit's own header."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowkit.errors import UsageError, UserError
from flowkit.models import FlowModel, files, injection, sharding

PREFIX = "transformer."
LORA_FILE = "pytorch_lora_weights.safetensors"
FULL_FILE = "diffusion_pytorch_model.safetensors"
_LORA_KEY = re.compile(r"transformer\.(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|alpha)")


def _header(model: FlowModel, kind: str, extra: Mapping[str, Any] | None) -> str:
    """Flowkit's own metadata, formats.md section 4, as JSON."""
    base = {
        "format": 1,
        "kind": kind,
        "family": model.family,
        "base_model": model.name,
        "base_sha": model.bundle.fingerprint("transformer"),
    }
    return json.dumps({**base, **(extra or {})}, sort_keys=True)


def _place(path: str | Path, name: str) -> Path:
    """The file itself when it ends in .safetensors, else the usual name in that folder."""
    path = Path(path).expanduser()
    return path if path.suffix == ".safetensors" else path / name


def save_lora(model: FlowModel, path: str | Path, extra_metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the LoRA as diffusers and peft read it, verified by reading it back.

    Args:
        model: carries a LoRA.
        path: a folder, or a file that ends in .safetensors.
        extra_metadata: more fields of the `flowkit` header (`weights`, `trained`, `sampler` ...).

    Returns:
        The file.
    """
    tensors = {
        PREFIX + name.replace(f".{injection.ADAPTER}.", "."): value
        for name, value in injection.adapter_parameters(model).items()
    }
    config = {PREFIX + k: v for k, v in injection.lora_config(model).items()}
    metadata = {
        "format": "pt",
        "lora_adapter_metadata": json.dumps(config, sort_keys=True),
        "flowkit": _header(model, "lora", extra_metadata),
    }
    file = _place(path, LORA_FILE)
    files.write_safetensors(file, tensors, metadata)
    return file


def load_lora(model: FlowModel, path: str | Path, dropout: float = 0.0) -> None:
    """Put a LoRA file onto the model; onto the LoRA that it has, when names and ranks are the same (resume).

    The scale is alpha / rank from the header, else from `.alpha` tensors, else 1, as diffusers reads it.

    Raises:
        UserError: broken file, nan, another family, keys that match nothing, shapes that do not fit.
    """
    file = _place(path, LORA_FILE)
    tensors, metadata = files.read_safetensors(file)
    _check_family(file, metadata, "lora", model.family, model.name)
    parts = _sorted_parts(file, tensors, model)
    ranks = {module: part["lora_A.weight"].shape[0] for module, part in parts.items()}
    alphas, targets = _alphas(file, metadata, parts, ranks)
    if injection.has_lora(model):
        _check_same(file, model, ranks, alphas)
    else:
        rank, odd_ranks = injection.common(ranks)
        alpha, odd_alphas = injection.common(alphas)
        chosen = _targets(model, list(parts), targets)
        injection.inject(
            model, chosen, rank=rank, alpha=alpha, dropout=dropout, ranks=odd_ranks, alphas=odd_alphas
        )
    own = dict(model.net.named_parameters())
    with torch.no_grad():
        for module, part in parts.items():
            for name in ("lora_A", "lora_B"):
                own[f"{module}.{name}.{injection.ADAPTER}.weight"].copy_(part[f"{name}.weight"])


def file_of(path: str | Path) -> Path:
    """The file itself, or the LoRA or full weights in a folder."""
    folder = Path(path).expanduser()
    return _place(path, LORA_FILE if (folder / LORA_FILE).exists() else FULL_FILE)


def header_of(path: str | Path) -> dict[str, Any]:
    """The `flowkit` header of a file, or of the LoRA or full weights in a folder; empty where there is none.

    Raises:
        UserError: a missing or broken file.
    """
    metadata = files.read_header(file_of(path)).get("__metadata__", {})
    try:
        found = json.loads(metadata.get("flowkit", "{}"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} has a broken `flowkit` header; export it again.")
    return found


def check_lora(path: str | Path, family: str, name: str) -> None:
    """Check what the header alone says of a LoRA: a sound file, made for this family.

    Raises:
        UserError: missing or broken file, or weights of another kind or family.
    """
    file = _place(path, LORA_FILE)
    _check_family(file, files.read_header(file).get("__metadata__", {}), "lora", family, name)


def _check_family(file: Path, metadata: Mapping[str, str], kind: str, family: str, name: str) -> None:
    """A file of flowkit's own says what it is for."""
    if "flowkit" not in metadata:
        return
    try:
        header = json.loads(metadata["flowkit"])
        found = (str(header["kind"]), str(header["family"]))
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file} has a broken `flowkit` header; export it again.") from None
    allowed = {"lora": {"lora", "student"}, "full": {"full", "ema", "student"}}[kind]
    if found[0] not in allowed or found[1] != family:
        raise UserError(
            f"{file} holds {found[0]} weights of family {found[1]} for base "
            f"{header.get('base_model', 'unknown')}; {kind} weights of family "
            f"{family} are expected for {name}."
        )


def _sorted_parts(
    file: Path, tensors: Mapping[str, Tensor], model: FlowModel
) -> dict[str, dict[str, Tensor]]:
    """Module -> {lora_A.weight, lora_B.weight, alpha?}; keys understood, tensors finite and fitting."""
    layers = dict(model.net.named_modules())
    parts: dict[str, dict[str, Tensor]] = {}
    lost = []
    for key, value in tensors.items():
        match = _LORA_KEY.fullmatch(key)
        if match is None or not hasattr(layers.get(match["module"]), "in_features"):
            lost.append(key)
        else:
            parts.setdefault(match["module"], {})[match["part"]] = value
    if lost:
        raise UserError(
            f"{len(lost)} of the {len(tensors)} keys of {file} match no layer of {model.name}, such as "
            f"{', '.join(sorted(lost)[:3])}; expected are keys like transformer.<module>.lora_A.weight of a "
            f"{model.family} LoRA in diffusers' names."
        )
    for module, part in parts.items():
        layer: Any = layers[module]
        if not {"lora_A.weight", "lora_B.weight"} <= part.keys():
            raise UserError(f"{file} has only one half of the LoRA of {module}; export it again.")
        a, b = part["lora_A.weight"], part["lora_B.weight"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise UserError(
                f"{file} holds {module} as {tuple(a.shape)} and {tuple(b.shape)}, which is no LoRA pair."
            )
        if (a.shape[1], b.shape[0]) != (layer.in_features, layer.out_features):
            raise UserError(
                f"{file} is made for another model: its {module} goes from {a.shape[1]} to {b.shape[0]} "
                f"channels, and that of {model.name} from {layer.in_features} to {layer.out_features}."
            )
        for name, value in part.items():
            if not value.isfinite().all():
                raise UserError(
                    f"{file} holds nan or infinity in {module}.{name}; take an earlier checkpoint."
                )
    return parts


def _alphas(
    file: Path,
    metadata: Mapping[str, str],
    parts: Mapping[str, Mapping[str, Tensor]],
    ranks: Mapping[str, int],
) -> tuple[dict[str, float], Sequence[str] | str | None]:
    """Alpha of every module, and the target_modules that the header names, if it does."""
    raw = metadata.get("lora_adapter_metadata")
    has_alpha = any("alpha" in part for part in parts.values())
    if raw is None:
        return {m: float(p["alpha"]) if "alpha" in p else float(ranks[m]) for m, p in parts.items()}, None
    if has_alpha:
        raise UserError(
            f"{file} gives its scale twice, as metadata and as .alpha tensors; remove one of them."
        )
    try:
        config = {k.removeprefix(PREFIX): v for k, v in json.loads(raw).items()}
        pattern = dict(config.get("alpha_pattern") or {})
        alphas = {m: float(_lookup(pattern, m, config["lora_alpha"])) for m in parts}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} has broken lora_adapter_metadata; export it again.") from None
    for switch in ("use_dora", "use_rslora", "lora_bias"):
        if config.get(switch):
            raise UserError(
                f"{file} is a LoRA with {switch}, which flowkit does not apply; convert it to a plain one."
            )
    return alphas, config.get("target_modules")


def _lookup(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value that peft's patterns (regular expressions for the end of a name) give a module."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _targets(model: FlowModel, modules: list[str], named: Sequence[str] | str | None) -> Sequence[str] | str:
    """The shortest target_modules that means exactly these modules."""
    wanted = set(modules)
    if isinstance(named, str):
        return named if set(_linear(model, named)) == wanted else _exact(modules)
    for choice in (list(named or ()), modules):
        if choice and set(injection.matched(model.net, choice)) == wanted:
            return choice
    return _exact(modules)


def _linear(model: FlowModel, pattern: str) -> list[str]:
    """Linear layers whose whole name matches a regular expression."""
    return [n for n, m in model.net.named_modules() if isinstance(m, nn.Linear) and re.fullmatch(pattern, n)]


def _exact(modules: list[str]) -> str:
    """A regular expression for exactly these names: a bare `proj_out` would also mean every block's."""
    return "|".join(re.escape(m) for m in modules)


def _check_same(file: Path, model: FlowModel, ranks: Mapping[str, int], alphas: Mapping[str, float]) -> None:
    """The LoRA that the model carries has these modules, ranks and alphas."""
    own = {
        name: (module.r[injection.ADAPTER], float(module.lora_alpha[injection.ADAPTER]))
        for name, module in _lora_layers(model)
    }
    theirs = {name: (rank, alphas[name]) for name, rank in ranks.items()}
    if own != theirs:
        odd = sorted(k for k in own.keys() | theirs.keys() if own.get(k) != theirs.get(k))
        raise UserError(
            f"{file} does not fit the LoRA of this run: {len(odd)} layers differ in rank, alpha or presence, "
            f"such as {odd[0]}; give lora.rank, lora.alpha and lora.targets of that file."
        )


def _lora_layers(model: FlowModel) -> list[tuple[str, Any]]:
    """Layers that carry the adapter."""
    return [(n, m) for n, m in model.net.named_modules() if injection.ADAPTER in getattr(m, "lora_A", {})]


def save_full(
    model: FlowModel,
    path: str | Path,
    extra_metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write all weights of the transformer; in a folder, with a config.json, so that diffusers loads it.

    Args:
        model: whose weights they are.
        path: a folder, or a file that ends in .safetensors.
        extra_metadata: more fields of the `flowkit` header.
        tensors: the weights by name, gathered before, where the transformer is in shards.

    Raises:
        UsageError: the model carries a LoRA, whose weights belong into a LoRA file.
    """
    if injection.has_lora(model):
        raise UsageError("The transformer carries a LoRA; save it with save_lora.")
    file = _place(path, FULL_FILE)
    metadata = {"format": "pt", "flowkit": _header(model, "full", extra_metadata)}
    files.write_safetensors(file, model.net.state_dict() if tensors is None else tensors, metadata)
    if file.name == FULL_FILE:
        net: Any = model.net if tensors is None else sharding.empty(model.net)
        net.save_config(file.parent)
    return file


def load_full(model: FlowModel, path: str | Path) -> None:
    """Copy all weights from a file into the transformer, in place.

    Raises:
        UserError: broken file, nan, another family, or not exactly the transformer's names and shapes.
    """
    file = _place(path, FULL_FILE)
    tensors, metadata = files.read_safetensors(file)
    _check_family(file, metadata, "full", model.family, model.name)
    own = model.net.state_dict()
    odd = sorted(own.keys() ^ tensors.keys())
    if odd:
        raise UserError(
            f"{file} does not hold exactly the weights of {model.name}: {len(odd)} names differ, "
            f"such as {odd[0]}."
        )
    for name, value in tensors.items():
        if value.shape != own[name].shape:
            raise UserError(
                f"{file} is made for another model: its {name} is {tuple(value.shape)}, that of {model.name} "
                f"{tuple(own[name].shape)}."
            )
        if not value.isfinite().all():
            raise UserError(f"{file} holds nan or infinity in {name}; take an earlier checkpoint.")
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(sharding.like(value, own[name]))
