"""UniPC on our grid, on data whose flow has a closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from flowkit.flow.schedule import unshifted
from flowkit.flow.solvers import euler
from flowkit.models.unipc import unipc

SPREAD = 0.3  # standard deviation of the data
MEAN = 1.5


def velocity(x: Tensor, t: Tensor) -> Tensor:
    """v of data N(MEAN, SPREAD^2): E[eps - x0 | x_t = x]."""
    t = t.view(-1, *[1] * (x.ndim - 1))
    variance = (1 - t) ** 2 * SPREAD**2 + t**2
    centred = x - (1 - t) * MEAN
    return (t - (1 - t) * SPREAD**2) / variance * centred - MEAN


def error(solver: object, steps: int) -> float:
    """Largest distance to the exact end point, MEAN + SPREAD * noise."""
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64).view(3, 3)
    end = solver(velocity, noise, unshifted(steps))  # type: ignore[operator]
    return float((end - (MEAN + SPREAD * noise)).abs().max())


def test_unipc_is_at_least_twice_as_accurate_as_euler() -> None:
    for steps in (8, 16, 32, 64):
        assert error(unipc, steps) < 0.5 * error(euler, steps)


def test_unipc_converges_faster_than_first_order() -> None:
    # four times the steps: first order gains 4, second order 16; UniPC's last step is of first order
    assert error(euler, 128) > error(euler, 32) / 4.1
    assert error(unipc, 128) < error(unipc, 32) / 8


def test_unipc_asks_at_our_times_once_a_step() -> None:
    asked: list[Tensor] = []

    def watch(x: Tensor, t: Tensor) -> Tensor:
        asked.append(t)
        return velocity(x, t)

    # times that round to the same integers out of 1000
    grid = torch.tensor([1.0, 0.9995, 0.5001, 0.5, 0.0003, 0.0], dtype=torch.float64)
    end = unipc(watch, torch.zeros(2, 3, dtype=torch.float64), grid)
    assert torch.stack(asked).tolist() == [[t, t] for t in grid[:-1].tolist()]
    assert end.dtype == torch.float64
    assert end.isfinite().all()


def test_one_step_is_euler() -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grid = unshifted(1)
    # it starts 1e-6 below 1, where the state is read as if it were at 1
    assert (unipc(velocity, x, grid) - euler(velocity, x, grid)).abs().max() < 1e-5


def test_unipc_stops_where_the_grid_stops() -> None:
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64).view(3, 3)
    grid = unshifted(128)[:-32]
    last = grid[-1]
    exact = (1 - last) * MEAN + ((1 - last) ** 2 * SPREAD**2 + last**2).sqrt() * noise
    assert (unipc(velocity, noise, grid) - exact).abs().max() < 0.5 * (
        euler(velocity, noise, grid) - exact
    ).abs().max()


def test_on_its_own_grid_it_is_the_loop_of_diffusers_bit_for_bit() -> None:
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
    )
    scheduler.set_timesteps(7)
    noise = torch.linspace(-2, 2, 9).view(3, 3)
    x, grid = noise, scheduler.sigmas.clone()
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, grid[i].expand(3)), t, x, return_dict=False)[0]
    assert torch.equal(unipc(velocity, noise, grid), x)
    # it starts 1e-6 below 1, and so do we when a grid starts at 1
    one = torch.cat([torch.ones(1), grid[1:]])
    assert grid[0] < 1
    below = unipc(lambda x, t: velocity(x, t.clamp(max=float(grid[0]))), noise, one)
    assert torch.equal(below, x)
