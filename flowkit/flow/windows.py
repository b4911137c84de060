"""Which steps of a trajectory are noisy, and which are trained (MixGRPO, arXiv:2507.21802)."""

from __future__ import annotations

import math

import torch


def window_start(generator: torch.Generator, size: int, lo: int, hi: int) -> int:
    """Draw where a window of `size` steps begins, uniformly so that it lies within steps lo ... hi - 1.

    Both lo and hi - size can come. Draw once per group, not per process: members of one group are
    compared with each other and must be noisy at the same steps.

    Raises:
        ValueError: when no window fits.
    """
    if size < 1 or lo < 0 or hi - lo < size:
        raise ValueError(f"no window of {size} steps fits into steps {lo} to {hi}")
    return int(torch.randint(lo, hi - size + 1, (), generator=generator))


def trained_steps(n: int, fraction: float = 0.99) -> range:
    """The first floor(n fraction) of n steps: at .99 and up to 100 steps all but the last, whose t is tiny.

    Raises:
        ValueError: for a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"the trained fraction must be in (0, 1], not {fraction}")
    # 50 * .58 is 28.999..., so a product within rounding of a whole number counts as that number.
    return range(math.floor(n * fraction + 1e-9))
