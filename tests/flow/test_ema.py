from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowkit.flow.ema import Ema, power_beta, power_gamma
from tests.flow.given import bounded, golden, normal

RCM = json.loads((Path(__file__).parents[1] / "golden" / "rcm.json").read_text(encoding="utf-8"))


def followed(**params: Tensor) -> tuple[Ema, dict[str, Tensor]]:
    return Ema(params, decay=0.5, interval=1), params


def bits(p: Tensor) -> Tensor:
    return p.detach().view(torch.int32)


def test_the_average_is_the_references() -> None:
    case = golden()["ema_interval8"]
    p = torch.nn.Parameter(torch.zeros(1))
    ema = Ema({"p": p}, case["decay"], case["interval"])
    for i, expected in enumerate(case["shadow"]):
        with torch.no_grad():
            p.fill_(i + 1.0)
        ema.update(i)
        # Twelve float32 updates of numbers up to 100.
        assert float(ema.state()["p"]) == pytest.approx(expected, rel=1e-6)


@bounded
@given(st.floats(-10, 10), st.floats(0, 0.999), st.integers(1, 4))
def test_the_average_of_a_constant_is_the_constant(value: float, decay: float, interval: int) -> None:
    p = torch.full((3,), value, dtype=torch.float64)
    ema = Ema({"p": p}, decay, interval)
    for step in range(9):
        ema.update(step)
    assert torch.equal(ema.state()["p"], p)


def test_it_warms_up_to_its_decay() -> None:
    ema, params = followed(p=torch.zeros(1))
    params["p"].fill_(1.0)
    ema.update(0)
    assert float(ema.state()["p"]) == pytest.approx(1 - 1 / 10)
    ema, params = followed(p=torch.zeros(1))
    params["p"].fill_(1.0)
    ema.update(1000)
    assert float(ema.state()["p"]) == pytest.approx(0.5)


def test_it_moves_at_every_intervalth_step_only() -> None:
    params = {"p": torch.zeros(1)}
    ema = Ema(params, 0.9, 3)
    moved = []
    for step in range(9):
        params["p"].fill_(step + 1.0)
        before = float(ema.state()["p"])
        ema.update(step)
        moved.append(float(ema.state()["p"]) != before)
    assert moved == [False, False, True] * 3


def test_a_step_is_taken_in_once() -> None:
    ema, _ = followed(p=torch.zeros(1))
    ema.update(4)
    for step in (4, 3):
        with pytest.raises(ValueError, match="already"):
            ema.update(step)


def test_swapping_puts_the_average_in_and_the_same_bits_back() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, -0.0, math.nan, 1e-42]))
    ema = Ema({"p": p}, 0.5)
    with torch.no_grad():
        p[0] = 3.0
    before = bits(p).clone()
    with ema.swap():
        assert p[0] == 1.0
    assert torch.equal(bits(p), before)


def test_swapping_puts_the_same_bits_back_when_the_body_raises_or_writes() -> None:
    ema, params = followed(p=normal(4).float(), q=normal(2, 2, seed=1).float())
    for value in params.values():
        value += 0.1
    before = {name: bits(value).clone() for name, value in params.items()}
    average = ema.state()

    def evaluate() -> None:
        with ema.swap():
            params["p"].zero_()
            raise RuntimeError("evaluation failed")

    with pytest.raises(RuntimeError, match="evaluation failed"):
        evaluate()
    assert all(torch.equal(bits(params[name]), before[name]) for name in params)
    assert all(torch.equal(ema.state()[name], average[name]) for name in params)


def test_half_precision_is_averaged_in_float32() -> None:
    p = torch.ones(1, dtype=torch.bfloat16)
    ema = Ema({"p": p}, 0.999)
    p.fill_(1.0078125)  # the next bfloat16
    ema.update(100_000)
    shadow = ema.state()["p"]
    assert shadow.dtype == torch.float32
    assert float(shadow) == pytest.approx(1 + 0.001 * 0.0078125, abs=1e-7)
    with ema.swap():
        assert p.dtype == torch.bfloat16
        assert float(p) == 1.0
    assert float(p) == 1.0078125


def test_a_loaded_state_goes_on_where_it_was() -> None:
    params = {"p": torch.zeros(2)}
    one = Ema(params, 0.9)
    params["p"].fill_(1.0)
    one.update(0)
    kept = one.state()
    two = Ema(params, 0.9)
    two.load(kept)
    params["p"].fill_(2.0)
    one.update(1)
    assert not torch.equal(one.state()["p"], kept["p"])  # the state is a copy
    two.update(1)
    assert torch.equal(one.state()["p"], two.state()["p"])


def test_a_state_of_other_parameters_is_refused_and_changes_nothing() -> None:
    ema, params = followed(p=torch.zeros(2), q=torch.zeros(2))
    for state in ({"p": torch.ones(2)}, {"p": torch.ones(2), "r": torch.ones(2)}):
        with pytest.raises(ValueError, match="other parameters"):
            ema.load(state)
    with pytest.raises(ValueError, match=r"q is \[3\]"):
        ema.load({"p": torch.ones(2), "q": torch.ones(3)})
    assert all(torch.equal(ema.state()[name], value) for name, value in params.items())


@pytest.mark.parametrize(("decay", "interval"), [(1.0, 1), (-0.1, 1), (0.9, 0)])
def test_an_impossible_setting_is_refused(decay: float, interval: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Ema({}, decay, interval)


# --- power average ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RCM["power_ema"], ids=lambda case: str(case["rate"]))
def test_the_power_average_is_the_references(case: dict[str, Any]) -> None:
    gamma = power_gamma(case["rate"])
    assert gamma == pytest.approx(case["gamma"], rel=1e-12)
    for i, beta in case["beta"].items():
        # The reference's root is off by 1e-13, and the power multiplies that by at most 1e2.
        assert power_beta(int(i), case["gamma"]) == pytest.approx(beta, rel=1e-10)


def test_a_power_average_is_the_parameters_themselves_after_the_first_step() -> None:
    p = torch.ones(1)
    ema = Ema({"p": p}, partial(power_beta, gamma=power_gamma(0.1)))
    p.fill_(3.0)
    ema.update(0)
    assert ema.state()["p"].item() == 3.0


@pytest.mark.parametrize("s", [0.001, 0.05, 0.1, 0.28])
def test_gamma_is_the_largest_root(s: float) -> None:
    gamma, q = power_gamma(s), s**-2
    # Divided by the slope of the polynomial, its value is the distance from the root.
    value = ((gamma + 7) * gamma + 16 - q) * gamma + 12 - q
    slope = (3 * gamma + 14) * gamma + 16 - q
    assert abs(value / slope) < 1e-12 * max(1, gamma)
    # Of a cubic that has one positive root (its constant is negative), that is the largest.
    assert 12 - q < 0
    assert gamma > 0


@pytest.mark.parametrize("s", [0.0, 0.3, -0.1])
def test_a_width_without_a_gamma_is_refused(s: float) -> None:
    with pytest.raises(ValueError, match="width"):
        power_gamma(s)


def test_a_power_average_forgets_what_came_before_training_and_has_its_width() -> None:
    s, n = 0.1, 4000
    p = torch.full((2,), 1e9, dtype=torch.float64)
    ema = Ema({"p": p}, partial(power_beta, gamma=power_gamma(s)))
    for step in range(n):
        p[0], p[1] = step / n, (step / n) ** 2
        ema.update(step)
    mean, square = ema.state()["p"].tolist()
    # EDM2 defines the width as the std of the weights over time; the sum differs from the integral by 1/n.
    assert math.sqrt(square - mean**2) == pytest.approx(s, rel=2e-3)


def test_a_decay_that_is_a_function_is_taken_as_it_is() -> None:
    params = {"p": torch.zeros(1)}
    ema = Ema(params, lambda step: 0.25 * step)
    params["p"].fill_(1.0)
    ema.update(3)
    assert float(ema.state()["p"]) == pytest.approx(0.25)
