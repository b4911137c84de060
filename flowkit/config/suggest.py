"""'Did you mean': the one place that words a guess."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(name: str, options: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the closest option, or all of them when none is close.

    >>> suggestion("flow-sd", ["ode", "flow-sde"])
    "did you mean 'flow-sde'?"
    >>> suggestion("zebra", ["ode", "flow-sde"])
    'there are: flow-sde, ode'
    """
    known = sorted(options)
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "there are: " + ", ".join(known) if known else "there are none"
