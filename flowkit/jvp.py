"""The forward-mode derivative of a network call, whatever the network: nothing in it is changed or copied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flowkit.errors import UserError
from flowkit.ops.jvp_attention import attention_with_tangent

make_dual: Any = fwAD.make_dual  # torch leaves both without types
unpack_dual: Any = fwAD.unpack_dual


def derivative(
    fn: Callable[..., Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Value y of fn at the primals, and its derivative dy along the tangents, in one pass.

    Forward-mode automatic differentiation by dual numbers, without a gradient: no graph is kept, and
    activation checkpoints are inactive. Attention (`torch.nn.functional.scaled_dot_product_attention`)
    goes through `flowkit.ops.jvp_attention`; the network may be sharded by FSDP2.

    Args:
        fn: maps the primals to one tensor.
        primals: float tensors.
        tangents: one for each primal, of its shape, dtype and device; None holds that primal fixed.

    Returns:
        y, and dy like y: zeros where y does not depend on the primals.

    Raises:
        ValueError: for tangents that do not fit the primals.
        UserError: when fn goes through an operation without a forward-mode derivative, which it names,
            or through attention with dropout.
    """
    if len(primals) != len(tangents):
        raise ValueError(f"{len(primals)} primals need as many tangents, not {len(tangents)}")
    for i, (x, t) in enumerate(zip(primals, tangents, strict=True)):
        if t is not None and (t.shape != x.shape or t.dtype != x.dtype or t.device != x.device):
            raise ValueError(
                f"tangent {i} is {list(t.shape)} {t.dtype} on {t.device}, "
                f"but its primal {list(x.shape)} {x.dtype} on {x.device}"
            )
    with torch.no_grad(), fwAD.dual_level():
        duals = [x if t is None else make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
        try:
            with _Routed():
                out = fn(*duals)
        except NotImplementedError as error:
            raise _named(error) from error
        y, dy = unpack_dual(out)
        return y, torch.zeros_like(y) if dy is None else dy


class _Routed(TorchFunctionMode):
    """Sends attention to the operator that has a derivative, and lets no operator drop one in silence."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OWN:
            return _OWN[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        # torch's own operators know their derivative or raise; an extension's may do neither, and then
        # its result would pass for a constant
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            results = [x for x in _floats(out) if _tangent(x) is None]
            if results and any(_tangent(x) is not None for x in _floats((args, kwargs))):
                raise UserError(_no_rule(str(func)))
        return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Take the arguments of torch's function; fewer heads of key and value need no flag here."""
    if dropout_p > 0:
        raise UserError(
            f"the derivative of attention with dropout {dropout_p:g} is not defined: call net.eval() before it"
        )
    if attn_mask is not None and _tangent(attn_mask) is not None:
        raise UserError("the network's attention mask depends on its inputs: it has no derivative here")
    ndim = query.ndim
    (q, tq), (k, tk), (v, tv) = (_batched(x) for x in (query, key, value))
    o, to = attention_with_tangent(q, k, v, tq, tk, tv, mask=attn_mask, is_causal=is_causal, scale=scale)
    if tq is not None or tk is not None or tv is not None:
        o = make_dual(o, to)
    return o.reshape(o.shape[4 - ndim :]) if ndim < 4 else o


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Torch multiplies the input by the zero tangent of a weight that is held: half as much again, for nothing."""
    x, tx = unpack_dual(input)
    moving = [p for p in (weight, bias) if p is not None and _tangent(p) is not None]
    if tx is None or moving:
        return F.linear(input, weight, bias)
    y: Tensor = make_dual(F.linear(x, weight, bias), F.linear(tx, weight))
    return y


#: torch's function -> ours, which knows of tangents
_OWN: dict[Any, Callable[..., Tensor]] = {F.scaled_dot_product_attention: _attention, F.linear: _linear}


def _batched(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Primal and tangent with the leading dims that attention on fewer than four leaves out."""
    primal, tangent = unpack_dual(x)
    lead = (None,) * (4 - x.ndim)
    return primal[lead], None if tangent is None else tangent[lead]


def _tangent(x: Tensor) -> Tensor | None:
    tangent: Tensor | None = unpack_dual(x).tangent
    return tangent


def _floats(tree: Any) -> Iterable[Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point())


def _named(error: NotImplementedError) -> Exception:
    """Torch's complaint about a missing rule as one sentence; any other as it is."""
    text = str(error)
    if found := re.search(r"forward AD with (\S+) that", text):
        return UserError(_no_rule(found[1]))
    if "jvp function" in text:
        trace, name = error.__traceback__, "a custom autograd.Function"
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_code.co_name == "apply" and isinstance(frame.f_locals.get("cls"), type):
                name = frame.f_locals["cls"].__name__
            trace = trace.tb_next
        return UserError(_no_rule(name))
    return error


def _no_rule(name: str) -> str:
    return (
        f"the network calls {name}, which has no forward-mode derivative: "
        "use its native attention backend and no fused kernels"
    )
