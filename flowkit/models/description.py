"""What a model is, from json alone: for dry runs, size checks and memory estimates."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowkit.errors import UserError
from flowkit.models import adapter, files
from flowkit.models.bundle import Bundle, resolve
from flowkit.models.injection import lora_size, resolve_targets
from flowkit.models.known import KNOWN
from flowkit.models.shapes import Shape


@dataclass(frozen=True)
class Description:
    """One model without its weights.

    Attributes:
        name: as the user gave it.
        family: short name.
        folder: where its files are, or None when only the table of known models knows it.
        configs: json of every network and of the scheduler.
        networks: component -> (library, class).
        shape: sizes, tokens, default times: `shape.check_size`, `.latent_shape`, `.schedule`.
        targets: LoRA target presets.
        guidance_embedded: guidance costs nothing (else: twice the calls).
        text_tokens: length of the text sequence that the transformer sees.
    """

    name: str
    family: str
    folder: Path | None
    configs: Mapping[str, Mapping[str, Any]]
    networks: Mapping[str, tuple[str, str]]
    shape: Shape
    targets: Mapping[str, tuple[str, ...]]
    guidance_embedded: bool
    text_tokens: int

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Number of parameters of every network, counted on the meta device."""
        return {c: sum(p.numel() for p in self.empty(c).parameters()) for c in self.networks}

    def empty(self, component: str) -> nn.Module:
        """A network of the right shape on the meta device: it has no weights and takes no memory.

        Raises:
            UserError: a config that its class does not take.
        """
        library, kind = self.networks[component]
        cls = getattr(importlib.import_module(library), kind)
        config = dict(self.configs[component])
        try:
            with torch.device("meta"):
                if library == "diffusers":
                    net: nn.Module = cls.from_config(config)
                else:
                    net = cls(cls.config_class.from_dict(config))
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise UserError(
                f"The {component} config of {self.name} does not make a {kind}: {error}."
            ) from error
        return net

    def lora_parameters(self, rank: int, targets: str | Sequence[str]) -> int:
        """Parameters of a LoRA of this rank on these targets.

        Raises:
            UsageError: targets that match nothing.
        """
        net = self.empty("transformer")
        return lora_size(net, rank, resolve_targets(net, self.targets, targets))


def describe(name: str) -> Description:
    """Describe a model from its files, from the hub's cache, from the table of known models, or from the hub.

    Raises:
        UserError: a model that none of them knows, or json that is broken.
    """
    if name in KNOWN and not Path(name).exists():
        folder = _cached(name)
        if folder is None:
            known = KNOWN[name]
            return _description(
                Bundle(name, Path(name), {"_class_name": known.pipeline}), known.configs, known.lengths
            )
        return _of(Bundle(name, folder, files.read_json(folder / "model_index.json")))
    return _of(resolve(name, weights=False))


def _cached(name: str) -> Path | None:
    """The hub cache's folder of a model, when all its json is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    needed = [f"{c}/config.json" for c in KNOWN[name].configs if c != "scheduler"]
    needed += ["model_index.json", "scheduler/scheduler_config.json"]
    return folder if all((folder / n).exists() for n in needed) else None


def _of(bundle: Bundle) -> Description:
    """A description from a bundle's own json."""
    networks = adapter(bundle).networks
    configs = {c: bundle.config(c) for c in (*networks, "scheduler") if bundle.has(c)}
    lengths = {}
    for component in bundle.index:
        if component.startswith("tokenizer") and bundle.has(component):
            file = bundle.folder / component / "tokenizer_config.json"
            length = files.read_json(file).get("model_max_length") if file.exists() else None
            if length is not None:
                lengths[component] = int(length)
    return _description(bundle, configs, lengths, bundle.folder)


def _description(
    bundle: Bundle,
    configs: Mapping[str, Mapping[str, Any]],
    lengths: Mapping[str, int],
    folder: Path | None = None,
) -> Description:
    """Family facts by the family's own adapter class."""
    cls = adapter(bundle)
    return Description(
        name=bundle.name,
        family=cls.family,
        folder=folder,
        configs=configs,
        networks={c: kind for c, kind in cls.networks.items() if c in configs},
        shape=cls.shape_of(bundle.name, configs),
        targets=cls.targets,
        guidance_embedded=bool(configs["transformer"].get("guidance_embeds", False)),
        text_tokens=cls.text_tokens(lengths),
    )
