"""A run folder: start it, go on with it, or refuse it."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from flowkit.errors import UsageError
from flowkit.runtime import checkpoint, env
from flowkit.runtime.dist import Dist
from flowkit.runtime.files import disk_errors, remove, write_json, write_text

# Keys (with all below them) that can change in a resumed run without changing what a step computes.
HARMLESS = frozenset(
    [
        "out",
        "steps",
        "checkpoint",
        "eval",
        "preview",
        "report_to",
        "reward_workers",
        "prompts.test",
        "prompts.test_limit",
    ]
)
# What a run makes; --fresh --force removes these and nothing else.
OURS = (
    "checkpoints", "config.yaml", "env.json", "metrics.jsonl", "previews", "report.html", "tb",
    "wandb", ".wandb-id", ".trackio-id",
)  # fmt: skip


@dataclass(frozen=True)
class Opened:
    """A run folder that is ready to be worked in.

    Attributes:
        folder: the run folder, with config.yaml and env.json.
        checkpoint: the complete checkpoint to go on from, or None for a new run.
        step: the step of that checkpoint, or None.
    """

    folder: Path
    checkpoint: Path | None = None

    @property
    def step(self) -> int | None:
        """The step of the checkpoint, or None for a new run."""
        return None if self.checkpoint is None else checkpoint.step_of(self.checkpoint)


@contextmanager
def open_folder(
    out: Path,
    config_text: str,
    *,
    seed: int | None = None,
    resume: Path | None = None,
    fresh: bool = False,
    force: bool = False,
    harmless: Collection[str] = HARMLESS,
    inputs: Mapping[str, str] | None = None,
    dist: Dist | None = None,
) -> Iterator[Opened]:
    """Opens a run folder on rank 0 and tells all ranks; locked against a second run until the end.

    A folder that holds a run of the same config is gone on with, from its newest complete checkpoint.

    Args:
        out: the run folder; made if it is not there.
        config_text: the resolved config as YAML; becomes config.yaml.
        seed: for env.json.
        resume: a checkpoint, or a run folder whose newest one is meant; of this run or another.
        fresh: start over; needs `force` where a run would be deleted.
        force: delete what stands in the way: with `fresh` the run, with an older `resume` the newer
            checkpoints, and work in a folder that holds something else.
        harmless: dotted keys in which the config may differ from the run's.
        inputs: config key -> digest of what stands in the files that it names; kept in env.json, and a run
            whose files have changed since is refused as one whose config has.
        dist: the processes that run together.

    Raises:
        UsageError: the folder holds another run, something else, or a run at work; nothing is changed.
        UserError: the disk is full or read-only.
    """
    with ExitStack() as stack:
        yield (dist or Dist()).on_main(
            lambda: _open(stack, out, config_text, seed, resume, fresh, force, harmless, inputs or {})
        )


def changes(old: str, new: str, harmless: Collection[str] = ()) -> list[str]:
    r"""The keys in which two YAML configs differ, as 'key old -> new', but for harmless ones.

    >>> changes("a: {b: 1, c: 2}", "a: {b: 1, c: 3}\nd: x")
    ['a.c 2 -> 3', 'd (not set) -> x']
    """
    before, after = _flat(yaml.safe_load(old)), _flat(yaml.safe_load(new))
    keys = [key for key in {**before, **after} if before.get(key, _UNSET) != after.get(key, _UNSET)]
    return [
        f"{key} {before.get(key, _UNSET)} -> {after.get(key, _UNSET)}"
        for key in keys
        if not any(key == free or key.startswith(f"{free}.") for free in harmless)
    ]


_UNSET = "(not set)"


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {key: value for name in tree for key, value in _flat(tree[name], f"{prefix}{name}.").items()}


def _open(
    stack: ExitStack,
    out: Path,
    config_text: str,
    seed: int | None,
    resume: Path | None,
    fresh: bool,
    force: bool,
    harmless: Collection[str],
    inputs: Mapping[str, str],
) -> Opened:
    if resume is not None and fresh:
        raise UsageError("--resume and --fresh contradict each other: give one of them")
    start = None if resume is None else _checkpoint(resume)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, not a run folder; choose another out")
    run = (out / "config.yaml").is_file()
    if not run and not force and out.is_dir() and any(not p.name.startswith(".") for p in out.iterdir()):
        raise UsageError(
            f"{out} holds files that are no run; choose another out, or add --force to work there"
        )
    with disk_errors("use", out):
        out.mkdir(parents=True, exist_ok=True)
    stack.enter_context(_lock(out))
    if run and fresh:
        if not force:
            raise UsageError(f"{out} holds a run; choose another out, or add --force to delete it")
        for name in OURS:
            remove(out / name)
        run = False
    source = out if start is None else start.parent.parent
    if (source / "config.yaml").is_file() and checkpoint.newest(source) is not None:
        _refuse_changes(source, config_text, harmless)
        _refuse_other_inputs(source, inputs)
    foreign = start if start is not None and source.resolve() != out.resolve() else None
    if run and foreign is not None and _environment(out).get("from") != str(foreign.resolve()):
        raise UsageError(f"{out} holds a run of its own; --resume from another run needs another out")
    if run and start is not None and foreign is None:
        _drop_newer(out, start, force)
    elif run:
        start = checkpoint.newest(out) or start
    _describe(out, config_text, seed, inputs, start, foreign)
    return Opened(out, start)


def _checkpoint(path: Path) -> Path:
    if checkpoint.step_of(path) is not None:
        return path
    found = checkpoint.newest(path)
    if found is None:
        raise UsageError(f"--resume {path}: no complete checkpoint is there (checkpoints/step-... of a run)")
    return found


def _refuse_changes(source: Path, config_text: str, harmless: Collection[str]) -> None:
    differ = changes((source / "config.yaml").read_text(encoding="utf-8"), config_text, harmless)
    if differ:
        raise UsageError(
            f"{source} was run with another config ({'; '.join(differ)}): put it back, choose another out, "
            "or start over with --fresh --force"
        )


def _refuse_other_inputs(source: Path, inputs: Mapping[str, str]) -> None:
    before = _environment(source).get("inputs", {})
    differ = sorted(key for key in inputs if before.get(key, inputs[key]) != inputs[key])
    if differ:
        raise UsageError(
            f"the files of {' and '.join(differ)} are not those that {source} was started with: put them back, "
            "choose another out, or start over with --fresh --force"
        )


def _drop_newer(out: Path, start: Path, force: bool) -> None:
    step = checkpoint.step_of(start) or 0
    newer = [other for other in checkpoint.steps(out) if other > step]
    if newer and not force:
        raise UsageError(
            f"{out} has gone on to step {newer[-1]}; add --force to delete what came after {step}"
        )
    for other in newer:
        checkpoint.discard(checkpoint.path_of(out, other))


def _environment(out: Path) -> dict[str, Any]:
    """What env.json says, empty where there is none."""
    path = out / "env.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _describe(
    out: Path,
    config_text: str,
    seed: int | None,
    inputs: Mapping[str, str],
    start: Path | None,
    foreign: Path | None,
) -> None:
    """Writes env.json, with the environment of every resume under 'resumed', then config.yaml.

    config.yaml makes the folder a run, so it comes last.
    """
    now, path = {**env.describe(seed), "inputs": dict(inputs)}, out / "env.json"
    if start is not None and path.is_file():
        first = _environment(out)
        resumed = [*first.get("resumed", []), {"step": checkpoint.step_of(start), **now}]
        now = {**first, "resumed": resumed}
    elif foreign is not None:
        now["from"] = str(foreign.resolve())
    write_json(path, now)
    write_text(out / "config.yaml", config_text)


def _lock(out: Path) -> TextIO:
    """A file that holds the folder until it is closed; the system closes it however the process ends."""
    with disk_errors("lock", out):
        handle = (out / ".lock").open("a+", encoding="utf-8")
        try:
            _flock(handle)
        except BlockingIOError as error:
            with handle:
                handle.seek(0)
                owner = handle.read().strip() or "unknown"
            raise UsageError(f"{out} is in use by process {owner}; wait for it or end it") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            logging.getLogger(__name__).warning("%s can't be locked here; keep other runs out of it", out)
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
    return handle


def _flock(handle: TextIO) -> None:
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
