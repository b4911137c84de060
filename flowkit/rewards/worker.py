"""Scoring of one batch with its faults kept apart, and the process that does nothing else.

Nothing heavy is imported at the top: the process limits its threads before numpy and torch come in.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.errors import UsageError, UserError
from flowkit.rewards import Reward, as_scores, load
from flowkit.types import Media, Prompt

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    import numpy as np
    from numpy.typing import NDArray

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Result:
    """Scores of one reward as plain numbers, cheap to send; a failed one is nan, its detail has `error`."""

    values: list[float]
    details: list[dict[str, Any]]


def score(
    rewards: Mapping[str, Reward], pixels: NDArray[np.uint8], prompts: Sequence[Prompt]
) -> dict[str, Result]:
    """All rewards of a batch of bytes [B, F, 3, H, W]; what can't be scored gives nan and a reason.

    UserError (the user has to mend something) goes through; anything else is the fault of single pictures.
    """
    import torch

    media = Media(torch.from_numpy(pixels).float() / 255)
    return {name: _score_one(name, reward, media, prompts) for name, reward in rewards.items()}


def _score_one(name: str, reward: Reward, media: Media, prompts: Sequence[Prompt]) -> Result:
    try:
        return _called(name, reward, media, prompts)
    except UserError:
        raise
    except Exception as error:  # somebody else's code: its fault must not take the batch, or the run, with it
        reason = f"{type(error).__name__}: {error}"
    if len(prompts) == 1:
        return Result([math.nan], [{"error": reason}])
    parts = [_score_one(name, reward, media[i : i + 1], prompts[i : i + 1]) for i in range(len(prompts))]
    return Result([part.values[0] for part in parts], [part.details[0] for part in parts])


def _called(name: str, reward: Reward, media: Media, prompts: Sequence[Prompt]) -> Result:
    with redirect_stdout(sys.stderr):  # stdout is for results; what a reward prints is a log
        found = reward(media, prompts)
    scores = as_scores(name, found, len(media))
    # they go to scores.jsonl: what JSON can't hold (nan too) is a fault of the reward
    json.dumps(scores.details, allow_nan=False)
    result = Result(scores.values.tolist(), scores.details)
    for i, value in enumerate(result.values):
        if not math.isfinite(value):
            result.values[i] = math.nan
            result.details[i] = {"error": f"the reward gave {value}"} | result.details[i]
    return result


def serve(connection: Connection, names: Sequence[str]) -> None:
    """Main loop of a worker process: loads its rewards once, then answers jobs until the pipe closes.

    A job is its shape and prompts, then the bytes; an answer is a dict of Result, or the UserError to raise.
    """
    for variable in THREAD_VARIABLES:
        os.environ[variable] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes us
    threading.Thread(target=_die_with_parent, daemon=True).start()
    import numpy as np
    import torch

    torch.set_num_threads(1)
    rewards: dict[str, Reward] = {}
    while True:
        try:
            shape, prompts = connection.recv()
            data = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        answer: dict[str, Result] | UserError
        try:
            rewards = rewards or {name: load(name) for name in names}
            # a copy, because torch wants bytes that it may write to
            answer = score(rewards, np.frombuffer(data, np.uint8).reshape(shape).copy(), prompts)
        except UserError as error:
            answer = UsageError(str(error)) if isinstance(error, UsageError) else UserError(str(error))
        try:
            connection.send(answer)
        except BrokenPipeError:
            return


def _die_with_parent() -> None:
    """A parent that is killed can't close its workers, and one may be busy for long."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Died(Exception):
    """The worker process ended by itself."""


class Worker:
    """The parent's side: one spawned process that serves the rewards called `names`, and the pipe to it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.start()

    def start(self) -> None:
        """Begin a process, at first or in the place of one that died."""
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=serve, args=(theirs, self.names), daemon=True)
        self.process.start()
        theirs.close()  # or the pipe would stay open when the process dies

    def ask(self, pixels: NDArray[np.uint8], prompts: Sequence[Prompt]) -> dict[str, Result]:
        """Score bytes [B, F, 3, H, W], as `score` does; Died when there is no answer to be had."""
        try:
            self.connection.send((pixels.shape, prompts))
            self.connection.send_bytes(pixels.data.cast("B"))
            answer: dict[str, Result] | UserError = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            code = self.process.exitcode or 0
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise Died(f"a reward worker died {how}") from error
        if isinstance(answer, UserError):
            raise answer
        return answer

    def end(self) -> None:
        """Kill the process, whatever it does, and wait until it is gone."""
        self.process.kill()
        self.process.join()
