"""Attention with its derivative: one law, two ways to compute it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowkit.ops import jvp_attention
from flowkit.ops.jvp_attention import BACKENDS, attention, attention_with_tangent, blockwise

B, H, L, KEYS, D, E = 2, 4, 13, 17, 6, 3
ALL = list(BACKENDS)
Case = dict[str, Any]
CASES: dict[str, Case] = {
    "as many keys as queries": {"keys": L, "width": D},
    "other length and width": {},
    "shared heads": {"shared": 2},
    "one head of keys": {"shared": 1},
    "bool mask": {"mask": "bool"},
    "bool mask for each head": {"mask": "bool", "mask_shape": (1, H, L, KEYS)},
    "bool mask of the keys": {"mask": "bool", "mask_shape": (B, 1, 1, KEYS)},
    "mask without a batch": {"mask": "bool", "mask_shape": (L, KEYS)},
    "mask that adds": {"mask": "add"},
    "mask that adds and forbids": {"mask": "forbid"},
    "causal": {"causal": True},
    "causal, more queries": {"causal": True, "keys": 9},
    "causal, shared heads": {"causal": True, "shared": 2, "keys": L},
    "scale": {"scale": 0.9},
    "negative scale": {"scale": -0.3},
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of queries and of keys, the last ones of another size."""
    monkeypatch.setattr(blockwise, "QUERIES", 5)
    monkeypatch.setattr(blockwise, "KEYS", 7)


def given(
    case: Case, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """(q, k, v), their tangents and the options of one case."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    keys, heads = case.get("keys", KEYS), case.get("shared", H)
    shapes = [(B, H, L, D), (B, heads, keys, D), (B, heads, keys, case.get("width", E))]
    primals, tangents = ([normal(*shape) for shape in shapes] for _ in range(2))
    kind, shape = case.get("mask"), case.get("mask_shape", (B, 1, L, keys))
    mask = None
    if kind is not None:
        mask = normal(*shape)
        valid = mask > -0.5
        valid[..., 3] = True  # a row has a key; rows without any have a test of their own
        if kind == "bool":
            mask = valid
        elif kind == "forbid":
            mask = mask.masked_fill(~valid, -torch.inf)
    options = {"mask": mask, "is_causal": case.get("causal", False), "scale": case.get("scale")}
    return primals, tangents, options


def plain(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, scale: Any) -> Tensor:
    """The formula that everybody knows, for torch.func.jvp to differentiate."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    S = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        S = S.masked_fill(~torch.ones(S.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        S = S.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else S + mask
    return S.softmax(-1) @ v


def relative(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm())


# sums of at most 17 terms of size 1 in float64; in float32 also those of the exponentials' arguments
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_output_is_torchs_attention(case: Case, backend: str, dtype: torch.dtype) -> None:
    (q, k, v), _, options = given(case, dtype)
    o = attention(q, k, v, **options, backend=backend)
    with sdpa_kernel(SDPBackend.MATH):
        mask, causal, scale = options.values()
        right = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
        )
    assert o.dtype == dtype
    assert o.shape == right.shape
    assert relative(o, right) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_tangent_is_that_of_the_formula(case: Case, backend: str, dtype: torch.dtype) -> None:
    primals, tangents, options = given(case, dtype)
    o, to = attention_with_tangent(*primals, *tangents, **options, backend=backend)
    wide = {
        key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in options.items()
    }
    right, t_right = torch.func.jvp(
        lambda q, k, v: plain(q, k, v, **wide),
        tuple(x.double() for x in primals),
        tuple(x.double() for x in tangents),
    )
    assert (o.dtype, to.dtype) == (dtype, dtype)
    assert relative(o, right) <= TOLERANCE[dtype]
    assert relative(to, t_right) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("moving", list(itertools.product([False, True], repeat=3)), ids=str)
def test_a_tangent_of_none_is_zero(moving: tuple[bool, ...], backend: str) -> None:
    primals, tangents, options = given(CASES["shared heads"])
    some = [t if moves else None for t, moves in zip(tangents, moving, strict=True)]
    zeros = [t if moves else torch.zeros_like(t) for t, moves in zip(tangents, moving, strict=True)]
    o, to = attention_with_tangent(*primals, *some, **options, backend=backend)
    right, t_right = torch.func.jvp(lambda q, k, v: plain(q, k, v, **options), tuple(primals), tuple(zeros))
    torch.testing.assert_close(o, right, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(to, t_right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_differences(case: Case, backend: str) -> None:
    primals, _, options = given(case)
    inputs = [x[:1].requires_grad_() for x in primals]
    if options["mask"] is not None and options["mask"].ndim == 4:
        options["mask"] = options["mask"][:1]
    assert gradcheck(lambda q, k, v: attention(q, k, v, **options, backend=backend), inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("case", ["other length and width", "shared heads", "bool mask", "causal"])
def test_forward_mode_is_that_of_differences(case: str, backend: str) -> None:
    primals, _, options = given(CASES[case])
    assert gradcheck(
        lambda q, k, v: attention(q, k, v, **options, backend=backend),
        [x.requires_grad_() for x in primals],
        check_forward_ad=True,
        check_backward_ad=False,
        check_undefined_grad=False,
        check_batched_grad=False,
        fast_mode=True,
    )


@pytest.mark.parametrize("backend", ALL)
def test_forward_mode_by_dual_numbers_is_the_tangent(backend: str) -> None:
    (q, k, v), (tq, _, tv), options = given(CASES["mask that adds"])
    _, right = attention_with_tangent(q, k, v, tq, None, tv, **options, backend=backend)
    make: Any = fwAD.make_dual
    unpack: Any = fwAD.unpack_dual
    with fwAD.dual_level():
        o = attention(make(q, tq), k, make(v, tv), **options, backend=backend)
        torch.testing.assert_close(unpack(o).tangent, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ALL)
def test_the_gradient_flows_into_the_output_and_never_into_the_tangent(backend: str) -> None:
    primals, tangents, options = given(CASES["shared heads"])
    inputs = [x.requires_grad_() for x in primals]
    o, to = attention_with_tangent(*inputs, *tangents, **options, backend=backend)
    assert not to.requires_grad
    weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
    got = torch.autograd.grad((o * weight).sum(), inputs)
    right = torch.autograd.grad((plain(*inputs, **options) * weight).sum(), inputs)
    for g, r in zip(got, right, strict=True):
        torch.testing.assert_close(g, r, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ALL)
def test_a_second_gradient_is_refused(backend: str) -> None:
    primals, _, options = given(CASES["causal"])
    inputs = [x.requires_grad_() for x in primals]
    o = attention(*inputs, **options, backend=backend)
    (g,) = torch.autograd.grad(o.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("kind", ["bool", "add"])
def test_a_row_without_a_valid_key_is_zero(kind: str, backend: str) -> None:
    primals, tangents, options = given(CASES["bool mask"])
    lonely = options["mask"]
    lonely[0, 0, 2] = False  # no key at all
    lonely[1, 0, 11, :14] = False  # none in the first two blocks
    lonely[1, 0, 11, 14:] = True
    options["mask"] = (
        lonely if kind == "bool" else torch.zeros(lonely.shape).double().masked_fill(~lonely, -torch.inf)
    )
    inputs = [x.requires_grad_() for x in primals]
    o, to = attention_with_tangent(*inputs, *tangents, **options, backend=backend)
    grads = torch.autograd.grad(o.square().sum(), inputs)
    assert all(x.isfinite().all() for x in (o, to, *grads))
    assert not o[0, :, 2].any()
    assert not to[0, :, 2].any()
    assert not grads[0][0, :, 2].any()
    others, t_others = torch.func.jvp(
        lambda q, k, v: plain(q, k, v, **options), tuple(primals), tuple(tangents)
    )
    torch.testing.assert_close(o[1], others[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(to[1], t_others[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ALL)
def test_scores_of_a_thousand_do_not_overflow(backend: str) -> None:
    (q, k, v), tangents, _ = given(CASES["other length and width"], torch.float32)
    o, to = attention_with_tangent(q, k, v, *tangents, scale=1000.0, backend=backend)
    assert o.isfinite().all()
    assert to.isfinite().all()


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("case", ["shared heads", "bool mask", "mask that adds"])
def test_bfloat16_is_rounded_once_and_summed_in_float32(case: str, backend: str) -> None:
    primals, tangents, options = given(CASES[case], torch.bfloat16)
    inputs = [x.requires_grad_() for x in primals]
    o, to = attention_with_tangent(*inputs, *tangents, **options, backend=backend)
    o.sum().backward()
    wide = {
        key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in options.items()
    }
    right = torch.func.jvp(
        lambda q, k, v: plain(q, k, v, **wide),
        tuple(x.detach().double() for x in primals),
        tuple(x.double() for x in tangents),
    )
    for got, exact in zip((o, to), right, strict=True):
        assert got.dtype == torch.bfloat16
        # the last rounding, by at most 2^-8, on top of float32's sums
        assert ((got.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in inputs)


class _Largest(TorchDispatchMode):
    """The numbers of the largest tensor that an operator makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def _most(length: int, backend: str, masked: bool, causal: bool) -> int:
    q, k, v, tq, tk, tv = torch.randn(6, 1, 2, length, 4).unbind()
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool) if masked else None
    for x in (q, k, v):
        x.requires_grad_()
    with _Largest() as largest:
        o, _ = attention_with_tangent(q, k, v, tq, tk, tv, mask=mask, is_causal=causal, backend=backend)
        o.sum().backward()
    return largest.numel


@pytest.mark.parametrize(("masked", "causal"), [(False, False), (True, False), (False, True)])
def test_blocks_take_memory_linear_in_the_length(
    masked: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "QUERIES", 16)
    monkeypatch.setattr(blockwise, "KEYS", 16)
    short, long = (_most(length, "blockwise", masked, causal) for length in (256, 512))
    assert long <= 2 * short
    assert long < 512 * 512
    assert _most(512, "naive", masked, causal) >= 2 * 512 * 512  # the measure measures


def test_small_scores_go_to_the_oracle_and_large_ones_to_the_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jvp_attention._log_once.cache_clear()
    with caplog.at_level(logging.DEBUG, logger=jvp_attention.__name__), torch.no_grad():
        for length in (512, 512, 513):
            attention(*torch.zeros(3, 1, 1, length, 1).unbind())
    said = [r.getMessage() for r in caplog.records]
    assert said == [f"attention with its derivative: backend {name}" for name in ("naive", "blockwise")]


q, k, v = torch.zeros(2, 4, 5, 6), torch.zeros(2, 2, 7, 6), torch.zeros(2, 2, 7, 3)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "three dims": (lambda: attention(q[0], k, v), r"needs q \[B, H, L, D\], .* not \[4, 5, 6\], "),
    "batches": (lambda: attention(q[:1], k, v), r"needs q .* not \[1, 4, 5, 6\]"),
    "k without its v": (lambda: attention(q, k, v[:, :, :3]), r"needs q .*\[2, 2, 3, 3\]"),
    "width": (lambda: attention(q[..., :5], k, v), "differ in width"),
    "heads": (lambda: attention(q[:, :3], k, v), "k's heads do not divide q's"),
    "no heads": (lambda: attention(q, k[:, :0], v[:, :0]), "k's heads do not divide q's"),
    "dtypes": (lambda: attention(q, k.double(), v), "of one float dtype, not .*float32, .*float64 and"),
    "whole numbers": (lambda: attention(q.long(), k.long(), v.long()), "of one float dtype"),
    "tangent's shape": (
        lambda: attention_with_tangent(q, k, v, None, k[:1], None),
        r"tk is \[1, 2, 7, 6\] torch.float32, but its primal \[2, 2, 7, 6\] torch.float32",
    ),
    "tangent's dtype": (
        lambda: attention_with_tangent(q, k, v, None, None, v.double()),
        r"tv is \[2, 2, 7, 3\] torch.float64, but its primal \[2, 2, 7, 3\] torch.float32",
    ),
    "mask and causal": (
        lambda: attention(q, k, v, mask=torch.ones(5, 7).bool(), is_causal=True),
        "takes a mask or is_causal, not both",
    ),
    "mask to train": (
        lambda: attention(q, k, v, mask=torch.zeros(5, 7, requires_grad=True)),
        "has no gradient in its mask: detach it",
    ),
    "backend": (
        lambda: attention(q, k, v, backend="flash"),
        "unknown backend of attention 'flash': use one of naive, blockwise",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_said(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mask_that_could_be_trained_is_fine_without_a_gradient() -> None:
    with torch.no_grad():
        attention(q, k, v, mask=torch.zeros(5, 7, requires_grad=True))
