"""Rewards in worker processes: scoring runs beside the next rollout, and its faults stay its own."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from flowkit.errors import UsageError, UserError
from flowkit.rewards import check, load
from flowkit.rewards.worker import Died, Result, Worker, score
from flowkit.types import Media, Prompt, Scores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)
UNFIT = "the picture is black or holds nan: not scored"


@dataclass
class Failures:
    """Counts since the pool began.

    Attributes:
        pictures: pictures handed in.
        failed: pictures that a reward could not score.
        unfit: black or nan pictures, which no reward saw.
        restarts: workers that died and were started again.
        reasons: how often each reward said what.
    """

    pictures: int = 0
    failed: int = 0
    unfit: int = 0
    restarts: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class RewardPool:
    """Scores batches in `workers` spawned processes (0: in this one, at once), each with one thread.

    Pictures go over as bytes, rounded as a PNG rounds them, so that a picture scores the same in the run as
    from its file. Use it as a context manager, or call `close`.

    Args:
        weights: the rewards by name; the weights are those of `total`.
        workers: processes. A script that makes a pool with any needs the `if __name__ == "__main__"` guard.
        batch: pictures, or frames of clips, in one call of a reward.
    """

    def __init__(self, weights: Mapping[str, float], workers: int = 1, batch: int = 32) -> None:
        if not weights:
            raise UsageError("no reward is named: give at least one, such as ocr")
        bad = [name for name, weight in weights.items() if not math.isfinite(weight)]
        if bad:
            raise UsageError(f"reward {bad[0]!r} has the weight {weights[bad[0]]}: give a finite number")
        self.weights = dict(weights)
        self.workers, self.batch = workers, batch
        self.failures = Failures()
        self._lock = threading.Lock()
        self._closed = False
        self._rewards = {name: load(name) for name in weights}
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._serving = [Worker(list(weights)) for _ in range(workers)]
        self._threads = [threading.Thread(target=self._drive, args=(w,), daemon=True) for w in self._serving]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """UsageError if a reward can't score one of the prompts, whatever the picture."""
        check(self._rewards.values(), prompts)

    def submit(self, media: Media, prompts: Sequence[Prompt]) -> Future[dict[str, Scores]]:
        """Start scoring media [B, F, 3, H, W] against B prompts: a future of Scores [B] by reward.

        A batch may be of any size: it is cut into calls of `batch` frames (at least one clip), shared among
        the workers.
        """
        if self._closed:
            raise RuntimeError("submit on a closed RewardPool")
        if len(media) != len(prompts):
            raise ValueError(f"{len(media)} pictures but {len(prompts)} prompts")
        pixels = (media.pixels.nan_to_num(0.0) * 255).round().clamp(0, 255).byte().cpu()
        fit = (media.ok.cpu() & (pixels.flatten(1).amax(1) > 0)).nonzero()[:, 0].tolist()
        size = max(1, self.batch // pixels.shape[1])
        chunks = [fit[i : i + size] for i in range(0, len(fit), size)]
        gathering = _Gathering(len(media), len(chunks), self._finish)
        for chunk in chunks:
            job = _Job(chunk, pixels[chunk].contiguous().numpy(), [prompts[i] for i in chunk], gathering)
            if self._serving:
                self._jobs.put(job)
            else:
                job.run(partial(score, self._rewards))
        return gathering.future

    def close(self) -> None:
        """End the workers now; what has not been scored is cancelled. Calling it again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            while job := self._jobs.get_nowait():
                job.gathering.fail(CancelledError())
        except Empty:
            pass
        for _ in self._threads:
            self._jobs.put(None)
        for worker in self._serving:
            worker.end()
        for thread in self._threads:
            thread.join()

    def _drive(self, worker: Worker) -> None:
        """The thread of one worker: hands it jobs in order, and starts it again when it dies."""
        while job := self._jobs.get():
            if not job.gathering.future.done():
                job.run(partial(self._ask, worker))

    def _ask(self, worker: Worker, pixels: NDArray[np.uint8], prompts: Sequence[Prompt]) -> dict[str, Result]:
        """The worker's answer; if it dies over the job, the answer of a new one."""
        try:
            return worker.ask(pixels, prompts)
        except Died as death:
            with self._lock:  # so that close either sees the new process, or is seen here
                if self._closed:
                    raise CancelledError from death
                log.warning("%s; it is started again", death)
                self.failures.restarts += 1
                worker.start()
        try:
            return worker.ask(pixels, prompts)
        except Died as death:
            if self._closed:
                raise CancelledError from death
            raise UserError(
                f"{death}, and so did the one started in its place: the machine may be out of memory, "
                "or a reward crashes on these pictures (reward_workers=0 shows where)"
            ) from death

    def _finish(self, parts: Sequence[tuple[list[int], dict[str, Result]]], count: int) -> dict[str, Scores]:
        """Put the chunks in order, and count what failed."""
        import torch

        scores = {
            name: Scores(torch.full((count,), math.nan), [{"error": UNFIT} for _ in range(count)])
            for name in self.weights
        }
        failed: set[int] = set()
        reasons: Counter[str] = Counter()
        for indices, results in parts:
            for name, result in results.items():
                scores[name].values[indices] = torch.tensor(result.values)
                for i, value, detail in zip(indices, result.values, result.details, strict=True):
                    scores[name].details[i] = detail
                    if math.isnan(value):
                        failed.add(i)
                        reasons[f"{name}: {detail['error']}"] += 1
        with self._lock:
            for reason in reasons:
                if reason not in self.failures.reasons:
                    log.warning("a picture could not be scored (%s)", reason)
            unfit = count - sum(len(indices) for indices, _ in parts)
            if unfit and not self.failures.unfit:
                log.warning("%d pictures are black or hold nan: they get no score", unfit)
            self.failures.pictures += count
            self.failures.failed += len(failed)
            self.failures.unfit += unfit
            self.failures.reasons.update(reasons)
        return scores


def reasons_of(scores: Mapping[str, Scores]) -> Counter[str]:
    """Why pictures of a batch have no score: one reason each, and how often."""
    bad: dict[int, str] = {}
    for name, one in scores.items():
        for i in one.values.isnan().nonzero()[:, 0].tolist():
            reason = str(one.details[i].get("error", "nan"))
            bad.setdefault(i, reason if reason == UNFIT else f"{name}: {reason}")
    return Counter(bad.values())


def refuse_failed(where: str, lost: int, count: int, max_failed: float, reasons: Mapping[str, int]) -> None:
    """Stop where more than a share of the pictures has no score.

    Raises:
        UserError: with the place, the figures and the most frequent reasons.
    """
    if lost > max_failed * count:
        why = "; ".join(f"{n} x {reason}" for reason, n in Counter(reasons).most_common(3))
        raise UserError(
            f"{where}: {lost} of {count} pictures could not be scored, more than the share of {max_failed:g} "
            f"that max_failed allows ({why})"
        )


class _Gathering:
    """The chunks of one submitted batch, on their way to one future."""

    def __init__(self, count: int, chunks: int, finish: Callable[[Any, int], dict[str, Scores]]) -> None:
        self.count, self.missing, self.finish = count, chunks, finish
        self.future: Future[dict[str, Scores]] = Future()
        self.parts: list[tuple[list[int], dict[str, Result]]] = []
        self.lock = threading.Lock()
        if not chunks:
            self.settle()

    def add(self, indices: list[int], results: dict[str, Result]) -> None:
        with self.lock:
            self.parts.append((indices, results))
            self.missing -= 1
            if self.missing:
                return
        self.settle()

    def settle(self) -> None:
        try:
            scores = self.finish(self.parts, self.count)
        except Exception as error:  # above all UserError; none may be lost in a worker's thread
            self.fail(error)
        else:
            with self.lock:
                if not self.future.done():
                    self.future.set_result(scores)

    def fail(self, error: Exception) -> None:
        with self.lock:
            if not self.future.done():
                self.future.set_exception(error)


@dataclass
class _Job:
    """Pictures for one call of the rewards: `indices` say which of the batch they are."""

    indices: list[int]
    pixels: NDArray[np.uint8]
    prompts: list[Prompt]
    gathering: _Gathering

    def run(self, scorer: Callable[[NDArray[np.uint8], Sequence[Prompt]], dict[str, Result]]) -> None:
        try:
            results = scorer(self.pixels, self.prompts)
        except Exception as error:  # whatever it is, the one who waits for the future has to see it
            self.gathering.fail(error)
        else:
            self.gathering.add(self.indices, results)
