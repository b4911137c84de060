"""True classifier-free guidance: two velocities, one batched call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowkit.models import Cond

Call = Callable[[Tensor, Tensor, Cond], Tensor]


def guided(call: Call, x: Tensor, t: Tensor, cond: Cond, guidance: float) -> Tensor:
    """v_u + g (v_c - v_u), arXiv:2207.12598 in diffusers' scale (1 = no guidance).

    Guidance 1 is one call of B rows and needs no negative; any other is one call of 2B rows.

    Args:
        call: (x [N, ...], t [N], cond of N rows) -> v [N, ...] float32.
        x: [B, ...] float32.
        t: [B] float32.
        cond: B rows, with their negative.
        guidance: the scale g.
    """
    if guidance == 1.0:
        return call(x, t, cond)
    assert cond.negative is not None, "encode() of this family gives a negative"
    both = Cond.cat([Cond(cond.negative.tensors), Cond(cond.tensors)])
    v_u, v_c = call(torch.cat([x, x]), torch.cat([t, t]), both).chunk(2)
    return v_u + guidance * (v_c - v_u)
