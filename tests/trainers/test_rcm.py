from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowkit.errors import UserError
from flowkit.flow.consistency import DERIVATIVES, scm_loss, tangent
from flowkit.flow.matching import renoise
from flowkit.jvp import derivative
from flowkit.runtime.dist import Dist
from flowkit.trainers import rcm
from flowkit.trainers.meters import Meter
from flowkit.trainers.state import DistillState, LearningRate, TrainState, Weights
from tests.trainers import toy_distil as toy

STAGES = ("dcm", "scm", "scm+dmd", "dmd")


def difference(a: object, b: object, role: str = "student") -> float:
    return (toy.weights(a, role) - toy.weights(b, role)).abs().max().item()


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_never_change_the_gradient(stage: str) -> None:
    whole = toy.run(toy.config(stages={stage: 6}))
    for micro in (1, 3):
        parts = toy.run(toy.config(stages={stage: 6}, optim__micro=micro))
        for role in ("student", "fake"):
            # float32 sums in another order, three steps of Adam with eps 1e-6
            assert difference(whole, parts, role) < 1e-5


def test_the_teacher_never_moves_and_each_of_the_others_in_its_own_turns_alone() -> None:
    cfg = toy.config(steps=4)
    w = toy.world(cfg)
    carried = toy.state(w.roles, cfg)
    before = {role: [p.clone() for p in m.net.parameters()] for role, m in w.roles.models.items()}
    moved = []
    for _ in rcm.train(w, cfg, carried, Dist()):
        now = {role: [p.clone() for p in m.net.parameters()] for role, m in w.roles.models.items()}
        moved.append(
            {r for r in now if any(not torch.equal(a, b) for a, b in zip(now[r], before[r], strict=True))}
        )
        before = now
    assert moved == [{"student"}, {"fake"}, {"student"}, {"fake"}]


def test_the_gradient_of_a_consistency_step_is_the_papers() -> None:
    cfg = toy.config(stages={"scm": 1}, steps=1, optim__micro=3)
    w = toy.world(cfg)
    carried = toy.state(w.roles, cfg)
    seen: list[Tensor] = []
    student = carried.student
    student.update = lambda: seen.extend(p.grad for p in student.params.values()) or torch.tensor(0.0)  # type: ignore[method-assign, func-returns-value]
    list(rcm.train(w, cfg, carried, Dist()))
    (batch,) = rcm.batches(w, toy.config(), 0, Dist())
    theta = rcm.angles(w.p_G, cfg, batch, "student")
    x = renoise(w.latents(batch.rows), rcm.drawn(w, cfg, batch, "eps"), theta)
    F, T = (rcm.network(w, role, w.conds(batch.rows)) for role in ("student", "teacher"))  # type: ignore[arg-type]
    F_T = T(x, theta).detach()
    F_minus, J = DERIVATIVES[0](F, x, theta, F_T, 0.0, derivative)
    g = tangent(F_minus, F_T, x, theta, J, 0.0).g  # the warm-up begins at 0
    loss = scm_loss(F(x, theta), F_minus, g).mean()
    for a, b in zip(seen, torch.autograd.grad(loss, list(student.params.values())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)  # 8 terms in another order


def test_the_warm_up_counts_updates_of_the_student() -> None:
    asked: list[float] = []
    real = rcm.tangent

    def spy(F: Tensor, F_T: Tensor, x: Tensor, theta: Tensor, J: Tensor, r: float, **settings: str) -> object:
        asked.append(r)
        return real(F, F_T, x, theta, J, r, **settings)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rcm, "tangent", spy)
        toy.run(toy.config(steps=11))
    assert asked == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_kinds_of_derivative_agree_on_a_smooth_network() -> None:
    # one step of SGD-like Adam would hide a scale; the gradient norm does not
    norms = [
        toy.run(toy.config(steps=1, stages={"scm": 1}, scm__fd_type=k, scm__warmup=0)).rows[0]["grad_norm"]
        for k in (0, 1, 2)
    ]
    # a forward difference with h = 1e-3 of a network whose second derivative is of order 1
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)
    assert norms[2] == pytest.approx(norms[0], rel=1e-2)


def test_the_probe_sees_a_wrong_derivative() -> None:
    right = toy.run(toy.config(steps=1)).rows[0]["probe/J_error"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rcm, "derivative", lambda fn, x, t: (lambda y: (y[0], 2 * y[1]))(derivative(fn, x, t)))
        wrong = toy.run(toy.config(steps=1)).rows[0]["probe/J_error"]
    assert right < 0.02
    assert wrong == pytest.approx(1.0, abs=0.05)


def test_a_run_that_goes_on_from_a_checkpoint_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    whole = toy.run(toy.config(steps=9))
    for stop in (1, 4, 5):
        half = toy.run(toy.config(steps=stop))
        folder = tmp_path / str(stop)
        folder.mkdir()
        half.state.save(folder)
        cfg = toy.config(steps=9)
        w = toy.world(cfg, seed=3)  # other weights, all of which the checkpoint replaces but the teacher's
        w.roles.models["teacher"].net.load_state_dict(half.world.roles.models["teacher"].net.state_dict())
        carried = toy.state(w.roles, cfg)
        carried.load(folder)
        rows = list(rcm.train(w, cfg, carried, Dist()))
        assert len(rows) == 9 - stop
        for role in ("student", "fake"):
            mine = torch.cat([p.detach().flatten() for p in w.roles.models[role].net.parameters()])
            assert torch.equal(mine, toy.weights(whole, role))
        assert carried.student.ema is not None
        with carried.student.averaged(), whole.state.student.averaged():
            averages = [toy.weights(whole), torch.cat([p.flatten() for p in w.roles.model.net.parameters()])]
        assert torch.equal(*averages)


def planted(rows: Sequence[int]) -> Tensor:
    x = toy.latents(rows)
    x[[k for k, row in enumerate(rows) if row == 3]] = float("nan")
    return x


def test_a_nan_sample_is_dropped_counted_and_moves_nothing() -> None:
    cfg = toy.config(stages={"scm": 3}, steps=3)
    found = toy.run(cfg, planted)
    # 24 of the deals of 12 rows: row 3 came twice among three batches of 8
    assert sum(row["frac_dropped"] for row in found.rows) == pytest.approx(2 / 8)
    assert toy.weights(found).isfinite().all()
    # the same as if its loss had been multiplied by 0: the others count as before, none is drawn in its place
    real = rcm.scm_loss
    with pytest.MonkeyPatch.context() as patch:

        def without(F: Tensor, F_minus: Tensor, g: Tensor) -> Tensor:
            return real(F, F_minus, g) * keep.pop(0)

        keep = []
        for i in range(3):
            (batch,) = rcm.batches(toy.world(cfg), cfg, i, Dist())
            keep.append(torch.tensor([float(row != 3) for row in batch.rows]))
        patch.setattr(rcm, "scm_loss", without)
        other = toy.run(cfg)
    assert difference(found, other) < 1e-6


def test_a_network_that_blows_up_is_dropped_from_dmd_and_the_critic_too() -> None:
    cfg = toy.config(steps=2)
    real = rcm.simulate

    def broken(*args: object) -> object:
        found = real(*args)  # type: ignore[arg-type]
        first = torch.arange(len(found.G)).view(-1, 1, 1, 1) == 0
        return found._replace(G=torch.where(first, float("inf"), found.G))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rcm, "simulate", broken)
        found = toy.run(cfg)
    assert [row["frac_dropped"] for row in found.rows] == [pytest.approx(1 / 16), pytest.approx(1 / 8)]
    assert toy.weights(found).isfinite().all()
    assert toy.weights(found, "fake").isfinite().all()


def test_more_dropped_samples_than_allowed_stop_the_run_before_its_row() -> None:
    def nothing(rows: Sequence[int]) -> Tensor:
        return toy.latents(rows) * float("nan")

    with pytest.raises(UserError, match=r"iteration 1: 100% of the samples .*max_dropped=50%"):
        toy.run(toy.config(stages={"scm": 9}), nothing)


def test_dmd_alone_never_asks_for_latents() -> None:
    def none(rows: Sequence[int]) -> Tensor:
        raise AssertionError

    rows = toy.run(toy.config(stages={"dmd": 6}), none).rows
    assert ["loss/dmd" in row for row in rows] == [True, False] * 3


def test_the_student_simulates_one_to_n_steps_in_turn_of_its_own_updates() -> None:
    lengths: list[int] = []
    real = rcm.simulate

    def spy(F: object, noise: object, thetas: Tensor) -> object:
        lengths.append(len(thetas))
        return real(F, noise, thetas)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rcm, "simulate", spy)
        toy.run(toy.config(steps=12, student={"thetas": [1.4, 1.0], "steps": 3}, eval={"steps": [1]}))
    one = lengths[0]
    # student and critic by turns; both walk through 1, 2, 3 steps, each at its own pace
    assert lengths == [one, one, one + 1, one + 1, one + 2, one + 2] * 2


def test_the_tables_by_angle_add_up_to_the_means() -> None:
    meter = Meter()
    theta = torch.tensor([0.1, 0.2, 0.9, 1.5], dtype=torch.float64)
    norm = torch.tensor([1.0, 3.0, 5.0, float("nan")])
    kept = norm.isfinite()
    F, T = torch.zeros(4, 2), torch.ones(4, 2)
    rcm.watch(meter, theta, kept, norm, F, T, T)
    row = meter.means(Dist())
    assert row["frac_dropped"] == 0.25
    assert row["g_norm"] == pytest.approx(3.0)
    assert row["g_norm/theta_1_of_4"] == pytest.approx(2.0)
    assert row["g_norm/theta_3_of_4"] == pytest.approx(5.0)
    assert "g_norm/theta_4_of_4" not in row
    assert row["cos_g"] == pytest.approx(1.0)


def test_offload_parks_the_moments_of_the_one_that_waits_and_brings_back_those_of_the_one_at_work() -> None:
    def side(device: str) -> TrainState:
        p = torch.nn.Parameter(torch.zeros(2, device=device))
        p.grad = torch.ones_like(p)
        rate = LearningRate(1e-3)
        weights = Weights({"w": p}, lambda *_: None, lambda _: None)
        made = TrainState.new(
            weights, rate=rate, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, grad_clip=1.0, ema_decay=None
        )
        made.optimizer.state[p] = {
            name: torch.zeros(() if name == "step" else 2) for name in ("step", "exp_avg", "exp_avg_sq")
        }
        return made

    def where(one: TrainState) -> set[str]:
        (moments,) = one.optimizer.state.values()
        assert moments["step"].device.type == "cpu"  # AdamW keeps it there
        return {value.device.type for name, value in moments.items() if name != "step"}

    # weights on the meta device stand for weights on a GPU: what belongs to them must go there, or stay behind
    carried = DistillState(side("meta"), side("meta"), offload=True)
    carried.begin(carried.student)
    assert (where(carried.student), where(carried.fake)) == ({"meta"}, {"cpu"})
    held = DistillState(side("meta"), side("meta"), offload=False)
    held.begin(held.student)
    assert (where(held.student), where(held.fake)) == ({"cpu"}, {"cpu"})


def test_each_iteration_begins_with_the_side_that_it_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = toy.config(steps=4, optim__offload=True)
    w = toy.world(cfg)
    carried = toy.state(w.roles, cfg)
    calls: list[tuple[str, str]] = []
    names = {id(carried.student): "student", id(carried.fake): "fake"}

    def park(self: TrainState, device: torch.device | str) -> None:
        calls.append((names[id(self)], "park"))

    def update(self: TrainState) -> Tensor:
        calls.append((names[id(self)], "update"))
        return plain(self)

    plain = TrainState.update
    monkeypatch.setattr(TrainState, "park", park)
    monkeypatch.setattr(TrainState, "update", update)
    list(rcm.train(w, cfg, carried, Dist()))
    turn = [("fake", "park"), ("student", "park"), ("student", "update")]
    other = [("student", "park"), ("fake", "park"), ("fake", "update")]
    assert calls == [*turn, *other, *turn, *other]
