"""What the property tests of this folder draw from: bounded, and the same examples on every run."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "flow_grpo.json"

bounded = settings(derandomize=True, deadline=None, database=None, max_examples=30)

unit = st.floats(0.0, 1.0)
inner = st.floats(0.01, 0.99)
shifts = st.floats(0.2, 8.0)
counts = st.integers(1, 60)
seeds = st.integers(0, 2**31)


@st.composite
def steps(draw: st.DrawFn) -> tuple[float, float]:
    """A step from t to s, 0 < s < t < 1, not vanishingly short."""
    t = draw(st.floats(0.05, 0.99))
    return t, t * draw(st.floats(0.02, 0.95))


@cache
def golden() -> dict[str, Any]:
    """Numbers from running the code of Flow-GRPO."""
    return dict(json.loads(GOLDEN.read_text(encoding="utf-8")))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Addressed standard normal numbers."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
