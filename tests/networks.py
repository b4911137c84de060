"""Tiny configs of the real diffusers transformers, each with its call: a function of x and t alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.tiny import WIDTH, flux_transformer, sd3_transformer, wan_transformer

BATCH, TEXT = 2, 7


def qwen_transformer() -> Any:
    """QwenImageTransformer2DModel of two blocks."""
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=64,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )


@dataclass(frozen=True)
class Network:
    """How one class is built and called.

    Attributes:
        build: makes the network, with the weights of a fresh one.
        shape: of its x, with a batch.
        clock: what it expects t in [0, 1] to be multiplied by.
        extra: (normal, x) -> the other arguments; normal(*shape) draws numbers of x's dtype.
        lora: the layers that get an adapter.
    """

    build: Callable[[], Any]
    shape: tuple[int, ...]
    clock: float
    extra: Callable[[Callable[..., Tensor], Tensor], dict[str, Any]]
    lora: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")


def _flux(normal: Callable[..., Tensor], x: Tensor) -> dict[str, Any]:
    rows, cols = torch.meshgrid(torch.arange(4.0), torch.arange(3.0), indexing="ij")
    return {
        "encoder_hidden_states": normal(BATCH, TEXT, WIDTH),
        "pooled_projections": normal(BATCH, WIDTH),
        "guidance": torch.full((BATCH,), 4.0),
        "txt_ids": torch.zeros(TEXT, 3),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, cols], -1).flatten(0, 1),
    }


def _sd3(normal: Callable[..., Tensor], x: Tensor) -> dict[str, Any]:
    return {
        "encoder_hidden_states": normal(BATCH, TEXT, 2 * WIDTH + 16),
        "pooled_projections": normal(BATCH, 2 * WIDTH),
    }


def _wan(normal: Callable[..., Tensor], x: Tensor) -> dict[str, Any]:
    return {"encoder_hidden_states": normal(BATCH, TEXT, WIDTH)}


def _qwen(normal: Callable[..., Tensor], x: Tensor) -> dict[str, Any]:
    mask = torch.ones(BATCH, TEXT, dtype=torch.bool)
    mask[1, 4:] = False
    return {
        "encoder_hidden_states": normal(BATCH, TEXT, WIDTH),
        "encoder_hidden_states_mask": mask,
        "img_shapes": [[(1, 4, 3)]] * BATCH,
    }


NETWORKS: dict[str, Network] = {
    "flux": Network(flux_transformer, (BATCH, 12, 64), 1.0, _flux),
    "sd3": Network(sd3_transformer, (BATCH, 16, 8, 6), 1000.0, _sd3),
    "wan": Network(wan_transformer, (BATCH, 16, 2, 8, 6), 1000.0, _wan),
    "qwen": Network(qwen_transformer, (BATCH, 12, 64), 1.0, _qwen),
}


def build(name: str) -> Any:
    """The network in float32 with seeded weights that let every input matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = NETWORKS[name].build().eval()
        for parameter in net.parameters():
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    return net


def call(name: str, net: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, t) -> output, with seeded conditions of x's dtype; t in [0, 1] is not rounded on the way in."""
    network = NETWORKS[name]

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(2)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(x.dtype)

        extra = network.extra(normal, x)
        out: Tensor = net(hidden_states=x, timestep=t * network.clock, **extra, return_dict=False)[0]
        return out

    return velocity


def some(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Seeded x and t, and a direction (dx, dt); a thousand times t is exact in bfloat16, too."""
    generator = torch.Generator().manual_seed(1)
    x, dx = (torch.randn(NETWORKS[name].shape, generator=generator) for _ in range(2))
    return x, torch.tensor([0.5, 0.25]), dx, torch.tensor([0.5, -0.25])


def blocks(net: Any) -> list[Any]:
    """The layers that are sharded one by one."""
    names = ("transformer_blocks", "single_transformer_blocks", "blocks")
    return [block for name in names for block in getattr(net, name, [])]
