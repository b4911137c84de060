"""Flow models behind one seam: t in [0, 1] with 1 = noise, velocity v = eps - x0, float32 in and out.

`load(name)` gives a `FlowModel` over unmodified diffusers networks; nothing above this package knows a
family's clock, sign, packing, guidance or precision.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from flowkit.errors import UserError
from flowkit.models.bundle import Bundle, resolve
from flowkit.models.shapes import Shape
from flowkit.types import Media, Size

if TYPE_CHECKING:
    from flowkit.models.description import Description

#: class name of the diffusers pipeline in model_index.json -> 'module:Class' of the adapter
FAMILIES: dict[str, str] = {
    "FluxPipeline": "flowkit.models.flux:Flux",
    "StableDiffusion3Pipeline": "flowkit.models.sd3:StableDiffusion3",
    "WanPipeline": "flowkit.models.wan:Wan",
}
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Cond:
    """What the text says, one row a picture.

    Attributes:
        tensors: by name, each [B, ...].
        negative: the same for the empty prompt, where the family needs it for true guidance.
    """

    tensors: dict[str, Tensor]
    negative: Cond | None = None

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: slice | Tensor | list[int]) -> Cond:
        negative = None if self.negative is None else self.negative[index]
        return Cond({k: v[index] for k, v in self.tensors.items()}, negative)

    def to(self, device: torch.device | str) -> Cond:
        """The same on another device; dtypes stay."""
        negative = None if self.negative is None else self.negative.to(device)
        return Cond({k: v.to(device) for k, v in self.tensors.items()}, negative)

    @staticmethod
    def cat(parts: Sequence[Cond]) -> Cond:
        """Rows of all parts, in order; the negatives too where every part has one."""
        tensors = {k: torch.cat([p.tensors[k] for p in parts]) for k in parts[0].tensors}
        negatives = [p.negative for p in parts if p.negative is not None]
        return Cond(tensors, Cond.cat(negatives) if len(negatives) == len(parts) else None)


class FlowModel(Protocol):
    """A text-to-image or text-to-video flow, whatever its family.

    Attributes:
        family: short name, as it stands in file headers.
        name: as the user gave it.
        bundle: where its files are.
        shape: sizes, tokens and default times.
        targets: LoRA target presets: name -> suffixes of module names.
        dtype: of the transformer's own parameters.
        device: where the networks live.
        guidance_embedded: guidance is an input of the network (one call), not two velocities.
        frozen: the kept copy of the trained weights that `lora.reference` swaps in, if one was kept.
    """

    family: str
    name: str
    bundle: Bundle
    shape: Shape
    targets: Mapping[str, tuple[str, ...]]
    dtype: torch.dtype
    device: torch.device
    guidance_embedded: bool
    frozen: dict[str, Tensor] | None

    @property
    def net(self) -> nn.Module:
        """The transformer, loaded on first use."""
        ...

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Shape of one latent, without the batch."""
        ...

    def check_size(self, size: Size) -> None:
        """Raise UsageError with the nearest legal size where the family cannot make this one."""
        ...

    def schedule(self, n: int, size: Size) -> Tensor:
        """The family's own grid of times, float64 [n + 1], falling from at most 1 to 0."""
        ...

    def text_key(self) -> str:
        """What the encodings depend on besides the text: equal keys, equal encodings."""
        ...

    def encode(self, prompts: Sequence[str]) -> Cond:
        """Encodings of the prompts, [B, ...] on the model's device; loads the text encoders on first use."""
        ...

    def free_text(self) -> None:
        """Drop the text encoders; the next `encode` loads them again."""
        ...

    def velocity(self, x: Tensor, t: Tensor, cond: Cond, guidance: float = 1.0) -> Tensor:
        """V = eps - x0 at x [B, ...] float32 and t [B] float32 in [0, 1]; float32, shape of x."""
        ...

    def decode(self, x0: Tensor) -> Media:
        """Pictures or clips of latents [B, ...], decoded in slices, on the CPU."""
        ...

    def encode_media(self, pixels: Tensor) -> Tensor:
        """Latents [B, ...] float32 of pixels [B, F, 3, H, W] in [0, 1]: the posterior's mean, on the model's device.

        Raises UsageError for a size that the family cannot make.
        """
        ...


def adapter(bundle: Bundle) -> Any:
    """The adapter class of a bundle's family.

    Raises:
        UserError: a pipeline of no known family, or an index that asks for what its family does not do here.
    """
    if bundle.pipeline not in FAMILIES:
        raise UserError(
            f"{bundle.name} is a {bundle.pipeline or 'model of unknown kind'}; "
            f"flowkit knows {', '.join(FAMILIES)}."
        )
    module, name = FAMILIES[bundle.pipeline].split(":")
    cls = getattr(importlib.import_module(module), name)
    for key, reason in getattr(cls, "unsupported", {}).items():
        if bundle.index.get(key) not in (None, False, [None, None]):
            raise UserError(f"The model_index.json of {bundle.name} sets {key}: {reason}.")
    return cls


def load(
    name_or_path: str,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    decode_batch: int = 8,
) -> FlowModel:
    """A model by name: `builtin:NAME`, a folder, or a hub id. Files are checked now, networks load on use.

    Args:
        name_or_path: see `bundle.resolve`.
        dtype: `float32` or `bfloat16`, of the transformer and the text encoders (the VAE is always float32).
        device: where the networks run.
        decode_batch: pictures that the VAE decodes at a time.

    Raises:
        UserError: files missing, broken or of no known family, in one sentence with the way out.
    """
    bundle = resolve(name_or_path)
    model: FlowModel = adapter(bundle)(bundle, DTYPES[dtype], torch.device(device), decode_batch)
    return model


def describe(name_or_path: str) -> Description:
    """What a model is, from json alone (or from the table of known models): no weight is read.

    Raises:
        UserError: a model that is not at hand and not known.
    """
    module = importlib.import_module("flowkit.models.description")
    description: Description = module.describe(name_or_path)
    return description


def checkpoint_activations(model: FlowModel, on: bool = True) -> None:
    """Gradient checkpointing of the transformer: less memory for one more forward a backward."""
    net: Any = model.net
    if on:
        net.enable_gradient_checkpointing()
    else:
        net.disable_gradient_checkpointing()
