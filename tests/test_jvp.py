"""The derivative of a call: exact, or refused with the reason; never a silent zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from flowkit import jvp
from flowkit.errors import UserError
from flowkit.jvp import derivative


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_it_is_the_derivative_of_a_known_function() -> None:
    x, y, tx, ty = (some(3, seed=i) for i in range(4))
    value, dy = derivative(lambda x, y: x.sin() * y, (x, y), (tx, ty))
    close(value, x.sin() * y)
    close(dy, x.cos() * y * tx + x.sin() * ty)


def test_a_tangent_of_none_holds_its_primal() -> None:
    x, y, ty = (some(3, seed=i) for i in range(3))
    close(derivative(lambda x, y: x.sin() * y, (x, y), (None, ty))[1], x.sin() * ty)
    assert not derivative(lambda x, y: x.sin() * y, (x, y), (None, None))[1].any()


def test_what_does_not_depend_on_the_inputs_has_the_derivative_zero() -> None:
    constant = some(2, 5)
    y, dy = derivative(lambda x: constant, (some(3),), (some(3),))
    assert torch.equal(y, constant)
    assert torch.equal(dy, torch.zeros_like(constant))


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (3, 5, 4), (5, 4)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(1)},
        {"attn_mask": torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)},
    ],
    ids=["plain", "causal", "scale", "bool mask", "mask that adds"],
)
def test_attention_of_any_rank_and_option_has_one(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    primals, tangents = ([some(*shape, seed=i + j) for i in range(3)] for j in (0, 3))
    y, dy = derivative(lambda q, k, v: attend(q, k, v, **options), primals, tangents)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        right, d_right = torch.func.jvp(
            lambda q, k, v: attend(q, k, v, **options), tuple(primals), tuple(tangents)
        )
    close(y, right)
    close(dy, d_right)


def test_attention_with_shared_heads_has_one() -> None:
    q, tq, k, tk = (some(1, heads, 5, 4, seed=i) for i, heads in enumerate((4, 4, 2, 2)))
    _, dy = derivative(lambda q, k: attend(q, k, k, enable_gqa=True), (q, k), (tq, tk))
    k, tk = k.repeat_interleave(2, 1), tk.repeat_interleave(2, 1)
    close(dy, derivative(lambda q, k: attend(q, k, k), (q, k), (tq, tk))[1])


def test_attention_that_does_not_depend_on_the_inputs_is_held() -> None:
    q, k, x, tx = (some(1, 1, 5, 4, seed=i) for i in range(4))
    _, dy = derivative(lambda x: attend(q, k, k) * x, (x,), (tx,))
    close(dy, attend(q, k, k) * tx)


WRONG: dict[str, tuple[tuple[Tensor, ...], tuple[Tensor | None, ...], str]] = {
    "number": ((some(3), some(2)), (None,), "2 primals need as many tangents, not 1"),
    "shape": (
        (some(3), some(3)),
        (None, some(2)),
        r"tangent 1 is \[2\] torch.float64 on cpu, but its primal \[3\] torch.float64 on cpu",
    ),
    "dtype": (
        (some(3),),
        (some(3).float(),),
        r"tangent 0 is \[3\] torch.float32 on cpu, but its primal \[3\] torch.float64 on cpu",
    ),
    "device": ((some(3),), (some(3).to("meta"),), "on meta, but its primal .* on cpu"),
}


@pytest.mark.parametrize(("primals", "tangents", "message"), WRONG.values(), ids=WRONG)
def test_tangents_that_do_not_fit_are_said(primals: Any, tangents: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        derivative(lambda *x: x[0], primals, tangents)


class Doubled(torch.autograd.Function):
    """As a fused kernel comes: a backward and no forward-mode rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


@pytest.fixture(scope="module")
def library() -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator as extensions compile them: forward mode takes its result for a constant."""
    with torch.library._scoped_library("flowkit_tests", "DEF") as lib:
        lib.define("tripled(Tensor x) -> Tensor")
        lib.impl("tripled", lambda x: torch.from_numpy(3 * x.detach().numpy()), "CPU")
        yield lambda x: torch.ops.flowkit_tests.tripled(x)


@pytest.fixture(scope="module")
def custom() -> Callable[[Tensor], Tensor]:
    """The same by the decorator, with a backward."""

    @torch.library.custom_op("flowkit_tests::quadrupled", mutates_args=())
    def quadrupled(x: Tensor) -> Tensor:
        return 4 * x

    quadrupled.register_autograd(lambda ctx, g: 4 * g)
    return quadrupled


def refused(fn: Callable[[Tensor], Tensor], name: str) -> None:
    with pytest.raises(UserError, match=f"calls \\S*{name}\\S*, which has no forward-mode derivative"):
        derivative(lambda x: fn(x.sin()).cos(), (some(3),), (some(3),))


def test_a_function_without_a_rule_is_named() -> None:
    refused(Doubled.apply, "Doubled")


def test_an_operator_of_torch_without_a_rule_is_named() -> None:
    q = some(1, 1, 16, 16).float()

    def flash(x: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]

    with pytest.raises(
        UserError, match="flash_attention_for_cpu, which has no forward-mode derivative: use its native"
    ):
        derivative(flash, (q,), (q,))


def test_an_extensions_operator_without_a_rule_is_named(library: Callable[[Tensor], Tensor]) -> None:
    refused(library, "tripled")


def test_an_extensions_operator_by_its_overload_is_named(library: Callable[[Tensor], Tensor]) -> None:
    refused(lambda x: torch.ops.flowkit_tests.tripled.default(x), "tripled")


def test_a_custom_operator_without_a_rule_is_named(custom: Callable[[Tensor], Tensor]) -> None:
    refused(custom, "quadrupled")


def test_an_extensions_operator_on_what_is_held_is_fine(
    library: Callable[[Tensor], Tensor], custom: Callable[[Tensor], Tensor]
) -> None:
    x, y, tx = (some(3, seed=i) for i in range(3))
    close(derivative(lambda x, y: x * library(y), (x, y), (tx, None))[1], 3 * y * tx)
    close(derivative(lambda x, y: x * custom(y), (x, y), (tx, None))[1], 4 * y * tx)


def test_another_gap_of_torch_is_told_as_it_is() -> None:
    def fn(x: Tensor) -> Tensor:
        raise NotImplementedError("not on Sundays")

    with pytest.raises(NotImplementedError, match=r"^not on Sundays$"):
        derivative(fn, (some(3),), (some(3),))


def test_dropout_in_attention_is_refused() -> None:
    q = some(1, 1, 5, 4)
    with pytest.raises(UserError, match=r"with dropout 0.1 is not defined: call net.eval\(\)"):
        derivative(lambda q: attend(q, q, q, dropout_p=0.1), (q,), (q,))


def test_a_mask_that_depends_on_the_inputs_is_refused() -> None:
    q = some(1, 1, 5, 4)
    with pytest.raises(UserError, match="attention mask depends on its inputs"):
        derivative(lambda x: attend(q, q, q, attn_mask=x), (some(5, 5),), (some(5, 5),))


def test_no_graph_is_kept() -> None:
    net = nn.Linear(4, 4).double()
    x = some(1, 1, 5, 4).requires_grad_()
    y, dy = derivative(lambda x: attend(net(x), x, x), (x,), (some(1, 1, 5, 4, seed=1),))
    for z in (y, dy):
        assert not z.requires_grad
        assert z.grad_fn is None
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("within", [True, False], ids=["checkpoints inside", "inside a checkpoint"])
def test_it_goes_together_with_activation_checkpoints(within: bool) -> None:
    net = nn.Linear(4, 4).double()
    x, tx = some(1, 1, 5, 4), some(1, 1, 5, 4, seed=1)

    def block(x: Tensor) -> Tensor:
        x = net(x)
        return attend(x, x, x)

    _, right = derivative(block, (x,), (tx,))
    if within:
        _, got = derivative(lambda x: checkpoint(block, x, use_reentrant=False), (x,), (tx,))
    else:
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        got = checkpoint(lambda w: w * derivative(block, (x,), (tx,))[1], weight, use_reentrant=False)
        got.sum().backward()  # the derivative is taken again in here
        assert weight.grad is not None
        close(weight.grad, right.sum().view(1))
    close(got, right)


@pytest.mark.parametrize("fails", [False, True], ids=["after a value", "after an error"])
def test_nothing_of_it_stays_behind(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = jvp.attention_with_tangent

    def spy(*args: Any, **kw: Any) -> Any:
        calls.append(args)
        return real(*args, **kw)

    monkeypatch.setattr(jvp, "attention_with_tangent", spy)
    q = some(1, 1, 5, 4)

    def fn(x: Tensor) -> Tensor:
        y = attend(x, x, x)
        return Doubled.apply(y) if fails else y  # type: ignore[no-any-return]

    if fails:
        with pytest.raises(UserError):
            derivative(fn, (q,), (q,))
    else:
        derivative(fn, (q,), (q,))
    assert len(calls) == 1
    assert not _get_current_function_mode_stack()
    assert F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).isfinite().all()  # torch's own
    assert len(calls) == 1
    with fwAD.dual_level():  # no level was left open, or this would be a second one
        pass


def test_the_primals_stay_as_they_were() -> None:
    x, tx = some(3), some(3, seed=1)
    kept = x.clone(), tx.clone()
    derivative(lambda x: x.mul(2).add_(1), (x,), (tx,))
    assert torch.equal(x, kept[0])
    assert torch.equal(tx, kept[1])


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_costs_two_products_and_no_more(bias: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    net = nn.Linear(4, 3, bias=bias).double()
    x, tx = some(2, 5, 4), some(2, 5, 4, seed=1)
    with FlopCounterMode(display=False) as once, torch.no_grad():
        right = net(x)
    with FlopCounterMode(display=False) as both:
        y, dy = derivative(net, (x,), (tx,))
    assert both.get_total_flops() == 2 * once.get_total_flops()
    close(y, right)
    close(dy, tx @ net.weight.detach().T)


def test_a_layer_whose_weights_move_has_a_derivative() -> None:
    x, w, b, tx, tw, tb = (some(*shape, seed=i) for i, shape in enumerate([(5, 4), (3, 4), (3,)] * 2))
    close(derivative(F.linear, (x, w, b), (tx, tw, tb))[1], tx @ w.T + x @ tw.T + tb)
    close(derivative(F.linear, (x, w, b), (tx, None, tb))[1], tx @ w.T + tb)
    close(derivative(F.linear, (x, w, b), (None, tw, None))[1], x @ tw.T)
