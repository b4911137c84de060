"""Attention with its derivative in the words of the formulas: the oracle, which holds all scores at once.

S = scale Q K^T, tS = scale (tQ K^T + Q tK^T), P = softmax S, H = P * tS, r = rowsum H, O = P V,
tO = P tV + H V - r O (rCM, arXiv:2510.08431).
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spread(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """X [B, H', L, D] in `dtype`, each head repeated for the queries that share it: [B, heads, L, D]."""
    x = x.to(dtype)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def gather(grad: Tensor, like: Tensor) -> Tensor:
    """Undo `spread`: the gradients [B, heads, L, D] of shared heads add up; shape and dtype of `like`."""
    heads = like.shape[1]
    return grad.reshape(grad.shape[0], heads, -1, *grad.shape[2:]).sum(2).to(like.dtype)


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
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Output, its tangent (None without any tangent) and the natural log of the softmax's sum [B, H, L]."""
    heads, dtype = q.shape[1], wide(q.dtype)
    q_, k_, v_ = (spread(x, heads, dtype) for x in (q, k, v))
    P, lse = _softmax(q_, k_, mask, is_causal, scale)
    o = P @ v_
    if tq is None and tk is None and tv is None:
        return o.to(q.dtype), None, lse
    to = torch.zeros_like(o)
    if tv is not None:
        to += P @ spread(tv, heads, dtype)
    if tq is not None or tk is not None:
        tS = torch.zeros_like(P)
        if tq is not None:
            tS += scale * (tq.to(dtype) @ k_.mT)
        if tk is not None:
            tS += scale * (q_ @ spread(tk, heads, dtype).mT)
        H = P * tS
        to += H @ v_ - H.sum(-1, keepdim=True) * o
    return o.to(q.dtype), to.to(q.dtype), lse


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from g, that of the output; plain attention's."""
    heads, dtype = q.shape[1], wide(q.dtype)
    q_, k_, v_, g_ = (spread(x, heads, dtype) for x in (q, k, v, g))
    P, _ = _softmax(q_, k_, mask, is_causal, scale)
    dP = g_ @ v_.mT
    dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * scale
    return (dS @ k_).to(q.dtype), gather(dS.mT @ q_, k), gather(P.mT @ g_, v)


def _softmax(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """P [B, H, L, L'], with zeros in rows that no key is valid for, and the log of its sum, -inf there."""
    S = scale * (q @ k.mT)
    if mask is not None:
        S = S.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else S + mask
    if is_causal:
        S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), -torch.inf)
    lse = S.logsumexp(-1)
    return (S - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp(), lse
