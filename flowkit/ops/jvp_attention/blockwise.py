"""Attention with its derivative in one pass over blocks of queries and keys, in memory linear in the length.

A row keeps its maximum m, the sum l of P~ = exp(S - m), r~ of H~ = P~ * tS, and two accumulators,
O~ = P~ V and C~ = P~ tV + H~ V. All but m are rescaled when m moves; in the end O = O~ / l and
tO = (C~ - r~ O) / l. Formulas: rCM (arXiv:2510.08431), which keeps P~ tV and H~ V apart; they rescale alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flowkit.ops.jvp_attention.naive import gather, spread, wide

QUERIES, KEYS = 256, 512


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
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    q_, k_, v_ = (_flat(x, heads) for x in (q, k, v))
    tq_, tk_, tv_ = (None if x is None else _flat(x, heads) for x in (tq, tk, tv))
    moving, any_tangent = tq is not None or tk is not None, not (tq is None and tk is None and tv is None)
    q_ = q_ * scale
    tq_ = None if tq_ is None else tq_ * scale
    o = q_.new_zeros(batch * heads, queries, v.shape[-1])
    to = torch.zeros_like(o) if any_tangent else None
    lse = q_.new_empty(batch * heads, queries, 1)

    for rows in _blocks(queries, QUERIES):
        O, C = o[:, rows], None if to is None else to[:, rows]  # noqa: E741 (the paper's name)
        m = torch.full_like(lse[:, rows], -torch.inf)
        l, r = torch.zeros_like(m), torch.zeros_like(m)  # noqa: E741
        for cols in _blocks(min(keys, rows.stop) if is_causal else keys, KEYS):
            S = _scores(q_[:, rows], k_[:, cols], rows, cols, mask, is_causal, heads)
            top = torch.maximum(m, S.amax(-1, keepdim=True))
            # a row without a valid key so far has the maximum -inf: P~ = exp(-inf - 0) is 0, not nan
            safe = top.masked_fill(top == -torch.inf, 0)
            P, rescale = S.sub_(safe).exp_(), m.sub_(safe).exp_()
            l.mul_(rescale).add_(P.sum(-1, keepdim=True))
            O.mul_(rescale).baddbmm_(P, v_[:, cols])
            if C is not None:
                C.mul_(rescale)
                if tv_ is not None:
                    C.baddbmm_(P, tv_[:, cols])
                if moving:
                    H = _tangent_scores(q_, k_, tq_, tk_, rows, cols).mul_(P)
                    r.mul_(rescale).add_(H.sum(-1, keepdim=True))
                    C.baddbmm_(H, v_[:, cols])
            m = top
        torch.add(m, l.log(), out=lse[:, rows])
        inverse = l.masked_fill_(l == 0, torch.inf).reciprocal_()
        O.mul_(inverse)
        if C is not None:
            C.addcmul_(r, O, value=-1).mul_(inverse)

    shape = (batch, heads, queries, v.shape[-1])
    to = None if to is None else to.view(shape).to(q.dtype)
    return o.view(shape).to(q.dtype), to, lse.view(shape[:-1])


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
    """Gradients of q, k and v from g, that of the output; P is made again from the kept log of its sum."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    q_, k_, v_, g_, o_ = (_flat(x, heads) for x in (q, k, v, g, o))
    q_ = q_ * scale
    # a row without a valid key: exp(-inf - inf) is 0
    lse_ = lse.masked_fill(lse == -torch.inf, torch.inf).view(batch * heads, queries, 1)
    dot = (g_ * o_).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
    for rows in _blocks(queries, QUERIES):
        for cols in _blocks(min(keys, rows.stop) if is_causal else keys, KEYS):
            P = _scores(q_[:, rows], k_[:, cols], rows, cols, mask, is_causal, heads)
            P.sub_(lse_[:, rows]).exp_()
            dv[:, cols].baddbmm_(P.mT, g_[:, rows])
            dS = torch.bmm(g_[:, rows], v_[:, cols].mT).sub_(dot[:, rows]).mul_(P)
            dq[:, rows].baddbmm_(dS, k_[:, cols], alpha=scale)
            dk[:, cols].baddbmm_(dS.mT, q_[:, rows])
    dq, dk, dv = (x.view(batch, heads, *x.shape[1:]) for x in (dq, dk, dv))
    return dq.to(q.dtype), gather(dk, k), gather(dv, v)


def _flat(x: Tensor, heads: int) -> Tensor:
    """[B, H', L, D] as [B * heads, L, D] of the dtype that sums are taken in."""
    return spread(x, heads, wide(x.dtype)).flatten(0, 1)


def _blocks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _scores(
    q: Tensor, k: Tensor, rows: slice, cols: slice, mask: Tensor | None, is_causal: bool, heads: int
) -> Tensor:
    """One block of S, [B * H, rows, cols], with -inf where the key is not valid; q is scaled already."""
    S = torch.bmm(q, k.mT)
    if mask is not None:
        block = mask[..., rows, cols]
        each = S.view(-1, heads, *S.shape[1:])
        if block.dtype == torch.bool:
            each.masked_fill_(~block, -torch.inf)
        else:
            each.add_(block)
    if is_causal and cols.stop > rows.start + 1:
        below = torch.ones(S.shape[1:], dtype=torch.bool, device=S.device).triu(1 + rows.start - cols.start)
        S.masked_fill_(below, -torch.inf)
    return S


def _tangent_scores(
    q: Tensor, k: Tensor, tq: Tensor | None, tk: Tensor | None, rows: slice, cols: slice
) -> Tensor:
    """One block of tS; q and tq are scaled already, and one of the tangents is there."""
    if tq is None:
        assert tk is not None
        return torch.bmm(q[:, rows], tk[:, cols].mT)
    tS = torch.bmm(tq[:, rows], k[:, cols].mT)
    return tS if tk is None else tS.baddbmm_(q[:, rows], tk[:, cols].mT)
