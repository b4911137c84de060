"""Scaled dot-product attention with a forward-mode derivative, which torch's fast kernels lack.

q is [B, H, L, D], k [B, H', L', D] and v [B, H', L', E]; H' divides H, and consecutive queries' heads share
one head of k and v. A mask broadcasts to [B, H, L, L']: bool (True: the key takes part) or numbers that are
added to the scores. Causal means that query i sees keys 0 to i. A row without a valid key is zero. Sums are
taken in float32, in float64 for float64.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowkit.ops.jvp_attention import blockwise, naive

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One way to compute it.

    Attributes:
        forward: (q, k, v, tq, tk, tv, mask, is_causal, scale) -> output, tangent or None, and the natural
            log of the softmax's sum [B, H, L], -inf in rows without a valid key.
        backward: (g, q, k, v, o, lse, mask, is_causal, scale) -> gradients of q, k, v. A mask is given
            as a [B, H, L, L'] view.
    """

    forward: Callable[..., tuple[Tensor, Tensor | None, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


#: name -> backend; 'naive' is what the others are tested against
BACKENDS: dict[str, Backend] = {
    "naive": Backend(naive.forward, naive.backward),
    "blockwise": Backend(blockwise.forward, blockwise.backward),
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Output [B, H, L, E] of attention; differentiable in q, k and v, once, in both modes.

    Forward mode takes a second pass, for the tangent: `attention_with_tangent` needs one for both.

    Raises:
        ValueError: for shapes or dtypes that do not fit, both a mask and `is_causal`, a mask that needs a
            gradient, or an unknown backend.
    """
    o: Tensor = _apply(q, k, v, None, None, None, mask, is_causal, scale, backend)[0]
    return o


def attention_with_tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Output of attention and its derivative along (tq, tk, tv), both [B, H, L, E] (rCM, arXiv:2510.08431).

    A tangent of None is zero and costs nothing. The output is differentiable in q, k and v; the derivative
    is not (where it is used, consistency distillation, it is a target without gradient).

    Raises:
        ValueError: as `attention`, and for a tangent that does not look like its primal.
    """
    o, to = _apply(q, k, v, tq, tk, tv, mask, is_causal, scale, backend)
    return o, torch.zeros_like(o) if to is None else to


def _apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    backend: str | None,
) -> Any:
    """Check, fill the defaults in, and call the function below."""
    if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]):
        raise ValueError(
            f"attention needs q [B, H, L, D], k [B, H', L', D] and v [B, H', L', E], not {list(q.shape)}, "
            f"{list(k.shape)} and {list(v.shape)}"
        )
    if q.shape[3] != k.shape[3] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} differ in width, or k's heads do not divide q's"
        )
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ValueError(f"q, k and v must be of one float dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    for name, x, t in (("tq", q, tq), ("tk", k, tk), ("tv", v, tv)):
        if t is not None and (t.shape != x.shape or t.dtype != x.dtype):
            raise ValueError(f"{name} is {list(t.shape)} {t.dtype}, but its primal {list(x.shape)} {x.dtype}")
    if mask is not None:
        if is_causal:
            raise ValueError("attention takes a mask or is_causal, not both: put the triangle into the mask")
        if mask.requires_grad and torch.is_grad_enabled():
            raise ValueError("attention has no gradient in its mask: detach it")
        mask = mask.expand(*q.shape[:3], k.shape[2])
    if backend is None:
        backend = _default(q, k)
    elif backend not in BACKENDS:
        raise ValueError(f"unknown backend of attention {backend!r}: use one of {', '.join(BACKENDS)}")
    _log_once(backend)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    apply: Any = _Attention.apply  # torch leaves it without types
    return apply(q, k, v, tq, tk, tv, mask, is_causal, scale, backend)[:2]


def _default(q: Tensor, k: Tensor) -> str:
    return "blockwise" if q.shape[2] * k.shape[2] > 512 * 512 else "naive"


@cache
def _log_once(backend: str) -> None:
    logger.debug("attention with its derivative: backend %s", backend)


class _Attention(torch.autograd.Function):
    """The rules: output with backward and jvp; the tangent passed in explicitly has neither."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tq: Tensor | None,
        tk: Tensor | None,
        tv: Tensor | None,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
        backend: str,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        return BACKENDS[backend].forward(q, k, v, tq, tk, tv, mask, is_causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        q, k, v, _, _, _, mask, *ctx.settings = inputs
        o, to, lse = output
        ctx.mark_non_differentiable(lse, *(() if to is None else (to,)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse, mask)
        ctx.save_for_forward(q, k, v, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 10
        is_causal, scale, backend = ctx.settings
        *saved, mask = ctx.saved_tensors
        grads = BACKENDS[backend].backward(g, *saved, mask, is_causal, scale)
        return (*grads, *[None] * 7)

    @staticmethod
    def jvp(
        ctx: Any, tq: Tensor | None, tk: Tensor | None, tv: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, None, None]:
        is_causal, scale, backend = ctx.settings
        q, k, v, mask = ctx.saved_tensors
        return BACKENDS[backend].forward(q, k, v, tq, tk, tv, mask, is_causal, scale)[1], None, None
