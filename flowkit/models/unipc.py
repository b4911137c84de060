"""UniPC (arXiv:2302.04867) on a grid of our own, through diffusers' UniPCMultistepScheduler."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# the scheduler works in log(alpha / sigma), minus infinity at sigma = 1; diffusers steps back by as much
_BELOW_ONE = 1 - 1e-6


def unipc(velocity: Callable[[Tensor, Tensor], Tensor], x: Tensor, grid: Tensor) -> Tensor:
    """Integrate dx/dt = velocity from grid[0] to grid[-1]: second order for one call a step.

    Args:
        velocity: (x [B, ...], t [B]) -> v [B, ...].
        x: state at grid[0], [B, ...].
        grid: falling times [n + 1] in [0, 1].

    Returns:
        The state at grid[-1], in the dtype of x.
    """
    from diffusers import UniPCMultistepScheduler

    steps = len(grid) - 1
    scheduler = UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", solver_order=2, flow_shift=1.0
    )
    scheduler.set_timesteps(sigmas=grid[:-1].double().cpu().numpy().copy())
    scheduler.sigmas = grid.to("cpu", x.dtype).clamp(max=_BELOW_ONE)
    scheduler.set_begin_index(0)  # steps go by index: two of its integer timesteps may be equal
    for i in range(steps):
        t = grid[i].to(x.device, x.dtype).expand(len(x))
        x = scheduler.step(velocity(x, t), scheduler.timesteps[i], x, return_dict=False)[0]
    return x
