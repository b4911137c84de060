"""Rewards: one call from pictures and prompts to scores, found by name, loaded only when named.

Adding one is one file and one line of `REWARDS`; a reward outside this package is named `my_pkg.mod:fn`
and needs neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flowkit.config.suggest import suggestion
from flowkit.errors import UsageError, UserError
from flowkit.types import Media, Prompt, Scores

if TYPE_CHECKING:
    from torch import Tensor


class Reward(Protocol):
    """Judges a whole batch at once; higher is better, nan means 'could not score this one'.

    Raise `UserError` when nothing can be scored until the user mends something (it stops the run).
    Any other exception is taken as the fault of one picture: the pool tries the pictures one by one.
    """

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Scores:
        """Scores of media [B, F, 3, H, W] in [0, 1]: values [B] float32, details JSON-able."""
        ...


@runtime_checkable
class Checked(Protocol):
    """A reward that can say before the run that a prompt is of no use to it."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise `UsageError` naming the lines that can't be scored."""
        ...


REWARDS: dict[str, str] = {  # name: 'module:factory'
    "ocr": "flowkit.rewards.ocr:Ocr",
    "jpeg": "flowkit.rewards.jpeg:compressibility",
    "jpeg-compressibility": "flowkit.rewards.jpeg:compressibility",
    "jpeg-incompressibility": "flowkit.rewards.jpeg:incompressibility",
    "shapes": "flowkit.rewards.shapes:Shapes",
    "motion": "flowkit.rewards.shapes:Motion",
}


def load(name: str) -> Reward:
    """The reward called `name`: one of `REWARDS`, or `my_pkg.mod:fn` looked up from the current folder too.

    Out of tree, `fn` is called with (media, prompts) and may return a tensor, a list of numbers or
    `Scores`; a class is built once, with no arguments, and its instance is called.

    Errors: UsageError for a name that leads nowhere; UserError when a package that it needs is missing.
    """
    if ":" in name:
        return _Wrapped(name, _out_of_tree(name))
    if name not in REWARDS:
        raise UsageError(
            f"reward {name!r} is unknown: {suggestion(name, REWARDS)} (your own is written my_pkg.mod:fn)"
        )
    module, _, factory = REWARDS[name].partition(":")
    reward: Reward = getattr(import_module(module), factory)()
    return reward


def check(rewards: Iterable[Reward], prompts: Sequence[Prompt]) -> None:
    """Let every reward that can refuse prompts do so now, before anything is drawn."""
    for reward in rewards:
        if isinstance(reward, Checked):
            reward.check(prompts)


def total(scores: Mapping[str, Scores], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum of the rewards: [B] float32, nan where any of them is nan."""
    first, *others = [weights[name] * one.values for name, one in scores.items()]
    return sum(others, start=first)


def require(reward: str, extra: str, packages: Sequence[str]) -> None:
    """UserError that names the pip extra when one of the packages of a reward is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UserError(f"reward {reward!r} needs {' and '.join(missing)}: pip install 'flowkit[{extra}]'")


class _Wrapped:
    """Somebody's function as a Reward: its result is turned into Scores, and its length is checked."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name, self.call = name, call

    def check(self, prompts: Sequence[Prompt]) -> None:
        call: object = self.call
        if isinstance(call, Checked):
            call.check(prompts)

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Scores:
        return as_scores(self.name, self.call(media, prompts), len(media))


def as_scores(name: str, result: Any, count: int) -> Scores:
    """What a reward returned (tensor, numbers or Scores) as Scores of `count` pictures, else UserError."""
    import torch

    given = result if isinstance(result, Scores) else Scores(result, [])
    try:
        values = torch.as_tensor(given.values, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"reward {name!r} returned {type(given.values).__name__}, not one number a picture: {error}"
        ) from error
    if values.shape != (count,):
        raise UserError(
            f"reward {name!r} returned values of shape {list(values.shape)} for {count} pictures: "
            "return one number a picture, nan where it can't be scored"
        )
    details = given.details or [{} for _ in range(count)]
    if len(details) != count:
        raise UserError(
            f"reward {name!r} returned {len(details)} details for {count} pictures: return one a picture"
        )
    return Scores(values, details)


def _out_of_tree(name: str) -> Callable[..., Any]:
    path, _, attribute = name.partition(":")
    if (
        os.getcwd() not in sys.path
    ):  # a console script, unlike `python -m`, does not look in the current folder
        sys.path.insert(0, os.getcwd())
    if not path or path.startswith("."):
        raise UsageError(f"reward {name!r} names no function: write it as my_pkg.mod:fn")
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(error.name + ".")):
            raise UsageError(
                f"reward {name!r}: no module {path!r} in the current folder or among the installed packages"
            ) from error
        raise UserError(f"reward {name!r} needs another package: {error}") from error
    except (
        Exception
    ) as error:  # whatever somebody else's module does at import, it is said, not shown as ours
        raise UserError(
            f"reward {name!r}: importing {path} failed with {type(error).__name__}: {error}"
        ) from error
    call = getattr(module, attribute, None)
    if not callable(call):
        names = [n for n, value in vars(module).items() if callable(value)]
        raise UsageError(
            f"reward {name!r}: {path} has no function {attribute!r}; {suggestion(attribute, names)}"
        )
    made: Callable[..., Any] = call() if isinstance(call, type) else call
    if not callable(made):
        raise UsageError(f"reward {name!r}: the class has no __call__(media, prompts)")
    return made
