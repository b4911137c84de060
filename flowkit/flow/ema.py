"""A moving average of the parameters, for evaluation and release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """Exponential moving average of named parameters, with a warm-up and an interval.

    shadow += (1 - d) (p - shadow) with d = min((1 + i) / (10 + i), decay), after every `interval`-th
    optimizer step; i counts optimizer steps from 0 (as in the Flow-GRPO code, arXiv:2505.05470). A decay
    that is a function is d of i itself, such as `partial(power_beta, gamma=power_gamma(0.1))`. The shadow
    starts as a copy of the parameters, on their device, in float32 or better.
    """

    def __init__(
        self, params: Mapping[str, Tensor], decay: float | Callable[[int], float], interval: int = 1
    ) -> None:
        """Follow `params` (name -> tensor, changed in place by an optimizer).

        Raises:
            ValueError: for a decay outside [0, 1) or an interval below 1.
        """
        if not callable(decay) and not 0 <= decay < 1:
            raise ValueError(f"the decay must be in [0, 1), not {decay}")
        if interval < 1:
            raise ValueError(f"the interval must be at least 1, not {interval}")
        self.decay = decay
        self.interval = interval
        self._params = dict(params)
        self._shadow = {name: _wide(p).clone() for name, p in self._params.items()}
        self._last = -1

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after optimizer step `step` (from 0); call once per optimizer step.

        Raises:
            ValueError: when `step` is not above the last one: an average that moves once per micro-batch
                would decay faster than it says.
        """
        if step <= self._last:
            raise ValueError(f"the average has taken in step {self._last} already and cannot take in {step}")
        self._last = step
        if (step + 1) % self.interval:
            return
        decay = self._decay_at(step)
        for name, p in self._params.items():
            shadow = self._shadow[name]
            shadow += (1 - decay) * (_wide(p) - shadow)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Put the average into the parameters for the length of a `with` block, then the parameters back.

        They come back bit for bit, also when the body raises.
        """
        kept = {name: p.detach().clone() for name, p in self._params.items()}
        try:
            self._fill(self._shadow)
            yield
        finally:
            self._fill(kept)

    def state(self) -> dict[str, Tensor]:
        """A copy of the average, name -> tensor."""
        return {name: shadow.clone() for name, shadow in self._shadow.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state()`.

        Raises:
            ValueError: when names or shapes differ from those of the parameters.
        """
        if state.keys() != self._shadow.keys():
            odd = sorted(state.keys() ^ self._shadow.keys())
            raise ValueError(f"the average is of other parameters: {len(odd)} names differ, such as {odd[0]}")
        for name, value in state.items():
            if value.shape != self._shadow[name].shape:
                expected = list(self._shadow[name].shape)
                raise ValueError(f"{name} is {list(value.shape)} in the average, {expected} in the model")
        for name, value in state.items():
            self._shadow[name].copy_(value)

    def _decay_at(self, step: int) -> float:
        if callable(self.decay):
            return self.decay(step)
        return min((1 + step) / (10 + step), self.decay)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self._params.items():
            p.copy_(values[name])


def power_gamma(s: float) -> float:
    """The gamma of a power average whose width is s times the training so far (EDM2, arXiv:2312.02696).

    The largest real root of x^3 + 7 x^2 + (16 - s^-2) x + (12 - s^-2).

    >>> round(power_gamma(0.1), 4)
    6.9372

    Raises:
        ValueError: for a width outside (0, 12^-1/2), where gamma would not be positive.
    """
    if not 0 < s < 12**-0.5:
        raise ValueError(f"the width of a power average must be above 0 and below {12**-0.5:.3f}, not {s}")
    q = s**-2
    # The polynomial is convex above its largest root and positive at 1/s, so Newton comes down to the root.
    x = 1 / s
    while True:
        after = x - (((x + 7) * x + 16 - q) * x + 12 - q) / ((3 * x + 14) * x + 16 - q)
        if not after < x:
            return x
        x = after


def power_beta(i: int, gamma: float) -> float:
    """The decay (1 - 1/(i + 1))^(gamma + 1) of a power average after optimizer step i, 0 below step 1.

    The average is then of the parameters after steps 0 ... i, with weights about proportional to step^gamma.
    """
    return 0.0 if i < 1 else float((1 - 1 / (i + 1)) ** (gamma + 1))


def _wide(p: Tensor) -> Tensor:
    """Half precision would lose updates below 1/256 of a weight: average in float32 at least."""
    return p.detach().to(torch.promote_types(p.dtype, torch.float32))
