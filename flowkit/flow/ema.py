"""A moving average of the parameters, for evaluation and release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """Exponential moving average of named parameters, with a warm-up and an interval.

    shadow += (1 - d) (p - shadow) with d = min((1 + i) / (10 + i), decay), after every `interval`-th
    optimizer step; i counts optimizer steps from 0 (as in the Flow-GRPO code, arXiv:2505.05470). The shadow
    starts as a copy of the parameters, on their device, in float32 or better.
    """

    def __init__(self, params: Mapping[str, Tensor], decay: float, interval: int = 1) -> None:
        """Follow `params` (name -> tensor, changed in place by an optimizer).

        Raises:
            ValueError: for a decay outside [0, 1) or an interval below 1.
        """
        if not 0 <= decay < 1:
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
        decay = min((1 + step) / (10 + step), self.decay)
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

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self._params.items():
            p.copy_(values[name])


def _wide(p: Tensor) -> Tensor:
    """Half precision would lose updates below 1/256 of a weight: average in float32 at least."""
    return p.detach().to(torch.promote_types(p.dtype, torch.float32))
