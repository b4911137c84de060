"""A folder of pictures or clips to scores: every one against its prompt, a summary, scores.jsonl."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkit.data.prompts import read as read_prompts
from flowkit.errors import UsageError
from flowkit.rewards import total
from flowkit.rewards.pool import UNFIT, RewardPool, refuse_failed
from flowkit.runtime.clips import MP4, read_media
from flowkit.runtime.files import disk_errors
from flowkit.runtime.media import FORMATS, MANIFEST, SHEET, Row, read_manifest
from flowkit.types import Media, Scores

if TYPE_CHECKING:
    from torch import Tensor

SCORES = "scores.jsonl"
_ENDINGS = (*FORMATS, MP4)


@dataclass(frozen=True)
class Summary:
    """One reward over a folder: figures of the pictures that were scored, None when there are none.

    Attributes:
        mean: the mean.
        std: the population standard deviation.
        nan: pictures without a score.
        exact: share of the scored pictures whose details say exact, None for a reward that does not say it.
    """

    mean: float | None
    std: float | None
    nan: int
    exact: float | None = None


@dataclass(frozen=True)
class Report:
    """What scoring a folder gave.

    Attributes:
        folder: the pictures.
        scores: the file with one line a picture.
        pictures: how many.
        weights: the rewards and their weights.
        rewards: a summary by reward, and `total` for the weighted sum.
        unfit: black or nan pictures, which no reward saw.
        failed: pictures that some reward could not score.
        reasons: what the rewards said of those, and how often.
    """

    folder: str
    scores: str
    pictures: int
    weights: dict[str, float]
    rewards: dict[str, Summary]
    unfit: int
    failed: int
    reasons: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)

    def refuse(self, max_failed: float) -> None:
        """UserError when more than a share of the pictures has no score."""
        reasons = Counter(self.reasons) + Counter({UNFIT: self.unfit})
        refuse_failed(self.folder, self.unfit + self.failed, self.pictures, max_failed, reasons)


def score_folder(
    folder: Path,
    weights: Mapping[str, float],
    *,
    prompts: str | Path | None = None,
    out: Path | None = None,
    workers: int = 1,
    batch: int = 32,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Report:
    """Score every picture of a folder with a manifest, or of any folder with a prompt file, and write `out`.

    Args:
        folder: pictures, or clips (.mp4); with `manifest.jsonl`, those it lists.
        weights: rewards by name.
        prompts: a prompt file (or builtin:NAME), one prompt a picture in the order of the file names; only
            for a folder without a manifest.
        out: the file to write, scores.jsonl in the folder if None; whole or absent.
        workers: processes that score, 0 for none but this.
        batch: pictures, or frames of clips, in one call of a reward.
        force: overwrite `out`.
        progress: told how many pictures of how many have been scored.

    Errors: UsageError before anything is scored; UserError for a broken picture or a disk that refuses.
    """
    rows = rows_of(folder, prompts)
    out = out or folder / SCORES
    if out.exists() and not force:
        raise UsageError(f"{out} exists; --force overwrites it")
    with RewardPool(weights, workers, batch) as pool:
        asked = [row.as_prompt() for row in rows]
        pool.check(asked)
        partial = out.with_name(f".{out.name}.partial")
        columns: dict[str, list[tuple[float, dict[str, Any]]]] = {name: [] for name in (*weights, "total")}
        try:
            with disk_errors("write", out), partial.open("w", encoding="utf-8") as handle:
                for part, scores in _scored(folder, rows, pool):
                    sums = total(scores, weights)
                    for i, row in enumerate(part):
                        handle.write(json.dumps(_line(row, i, scores, sums), ensure_ascii=False) + "\n")
                        columns["total"].append((float(sums[i]), {}))
                        for name, one in scores.items():
                            columns[name].append((float(one.values[i]), one.details[i]))
                    progress(len(columns["total"]), len(rows))
            with disk_errors("write", out):
                partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
        return Report(
            folder=str(folder),
            scores=str(out),
            pictures=len(rows),
            weights=dict(weights),
            rewards={name: summary(column) for name, column in columns.items()},
            unfit=pool.failures.unfit,
            failed=pool.failures.failed,
            reasons=dict(pool.failures.reasons),
        )


def rows_of(folder: Path, prompts: str | Path | None) -> list[Row]:
    """The pictures of a folder and what they were asked to show; UsageError when the two do not match."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    if (folder / MANIFEST).exists():
        if prompts is not None:
            raise UsageError(f"{folder} has a {MANIFEST}, which says the prompts: leave out --prompts")
        return read_manifest(folder)
    files = sorted(
        (path.name for path in folder.iterdir() if path.suffix.lower() in _ENDINGS and path.name != SHEET),
        key=_numbers_as_numbers,
    )
    if not files:
        raise UsageError(f"{folder}: the folder holds no pictures ({', '.join(_ENDINGS)})")
    if prompts is None:
        raise UsageError(f"{folder}: no {MANIFEST}; give the prompts of its pictures with --prompts FILE")
    asked = read_prompts(prompts)
    if len(asked) != len(files):
        raise UsageError(
            f"{folder} holds {len(files)} pictures, but {prompts} {len(asked)} prompts: "
            "they are matched one to one, in the order of the file names"
        )
    return [
        Row(file, p.text, i, None, p.target, p.meta, p.where)
        for i, (file, p) in enumerate(zip(files, asked, strict=True))
    ]


def summary(column: Sequence[tuple[float, dict[str, Any]]]) -> Summary:
    """Figures of one reward from its (value, details) pairs; nan values count as not scored.

    >>> summary([(1.0, {"exact": True}), (0.5, {"exact": False}), (float("nan"), {})])
    Summary(mean=0.75, std=0.25, nan=1, exact=0.5)
    """
    scored = [(value, detail) for value, detail in column if not math.isnan(value)]
    if not scored:
        return Summary(None, None, len(column))
    values = [value for value, _ in scored]
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    exact = [bool(detail["exact"]) for _, detail in scored if "exact" in detail]
    return Summary(mean, std, len(column) - len(scored), sum(exact) / len(exact) if exact else None)


def _scored(
    folder: Path, rows: Sequence[Row], pool: RewardPool
) -> Iterator[tuple[Sequence[Row], dict[str, Scores]]]:
    """Batches in order, reading at most a few ahead of the workers so that memory stays bounded."""
    waiting: deque[tuple[Sequence[Row], Future[dict[str, Scores]]]] = deque()
    for part, pixels in batches_of(folder, rows, pool.batch):
        waiting.append((part, pool.submit(Media(pixels), [row.as_prompt() for row in part])))
        if len(waiting) > 2 * max(1, pool.workers):
            done, future = waiting.popleft()
            yield done, future.result()
    for done, future in waiting:
        yield done, future.result()


def batches_of(folder: Path, rows: Sequence[Row], batch: int) -> Iterator[tuple[Sequence[Row], Tensor]]:
    """Neighbours of one size, up to `batch` frames of them: the rows and their pixels [B, F, 3, H, W]."""
    import torch

    part: list[Row] = []
    held: list[Tensor] = []
    for row in rows:
        pixels = read_media(folder / row.file)
        if held and ((len(held) + 1) * len(pixels) > batch or pixels.shape != held[0].shape):
            yield part, torch.stack(held)
            part, held = [], []
        part.append(row)
        held.append(pixels)
    yield part, torch.stack(held)


def _line(row: Row, i: int, scores: Mapping[str, Scores], sums: Tensor) -> dict[str, Any]:
    return {
        "file": row.file,
        "index": row.index,
        "seed": row.seed,
        "prompt": row.prompt,
        "total": _number(sums[i]),
        "rewards": {
            name: {**one.details[i], "score": _number(one.values[i])} for name, one in scores.items()
        },
    }


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)  # JSON has no nan


def _numbers_as_numbers(name: str) -> list[tuple[int, int, str]]:
    """A key that puts 10.png after 9.png, and the same number in 007 and 7 in the order of the text."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]
