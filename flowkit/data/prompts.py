"""Prompt files: read strictly before anything is loaded, and picked by address.

.txt holds one prompt a line: blank lines and lines that start with `#` are skipped (a prompt that has to
start with one takes a space before it). .jsonl holds one object a line with `prompt`, perhaps `target`,
and whatever else a reward wants (GenEval's metadata are such lines). Both are utf-8.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowkit.config.presets import prompt_file, prompt_names
from flowkit.config.strict_yaml import decode_utf8
from flowkit.errors import UsageError
from flowkit.types import Prompt

BUILTIN = "builtin:"


def read(source: str | Path) -> list[Prompt]:
    """All prompts of a file or of `builtin:NAME`, in order; the index counts prompts, not lines.

    Duplicates are kept. Raises UsageError, with the line, for a missing, empty or unreadable file, NUL,
    broken utf-8, broken JSON and a line without a prompt.
    """
    path = prompt_file(str(source).removeprefix(BUILTIN)) if str(source).startswith(BUILTIN) else Path(source)
    name = str(source)
    parse = {".txt": _from_text, ".jsonl": _from_json}.get(path.suffix)
    if parse is None:
        raise UsageError(f"{name}: prompts are read from .txt and .jsonl files, or builtin:NAME")
    prompts: list[Prompt] = []
    for line, text in _lines(path, name):
        prompt = parse(text, len(prompts), f"{name}:{line}")
        if prompt is not None:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{name}: the file holds no prompt")
    return prompts


def lint(prompts: Sequence[Prompt]) -> list[str]:
    """Remarks on what is legal but may be a mistake: texts that stand more than once."""
    first: dict[str, Prompt] = {}
    remarks = []
    for prompt in prompts:
        earlier = first.setdefault(prompt.text, prompt)
        if earlier is not prompt:
            remarks.append(f"{prompt.where}: the same text as in {earlier.where}")
    return remarks


def pick(n_prompts: int, groups: int, epoch: int, seed: int) -> list[int]:
    """The prompt indices of one epoch, all different: `groups` of them, a function of the arguments alone.

    Each pass through the file is a permutation of its own, cut into epochs; a rest that is shorter than an
    epoch is left out of that pass. Raises UsageError when there are fewer prompts than groups.

    >>> sorted(pick(4, 2, 0, 7) + pick(4, 2, 1, 7))
    [0, 1, 2, 3]
    """
    if n_prompts < groups:
        fix = f"use rollout.groups={n_prompts} or more prompts"
        raise UsageError(f"{n_prompts} prompts are fewer than the {groups} groups of a round; {fix}")
    turn, part = divmod(epoch, n_prompts // groups)
    return _order(f"pick {seed} {turn}", n_prompts)[part * groups : (part + 1) * groups]


def _lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        known = ", ".join(BUILTIN + known for known in prompt_names())
        raise UsageError(f"{name}: no such prompt file (flowkit brings {known})") from error
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror})") from error
    # Only \n ends a line: str.splitlines would also cut prompts at U+2028 and its like.
    for line, text in enumerate(decode_utf8(raw, name).split("\n"), 1):
        if "\0" in text:
            raise UsageError(f"{name}:{line}: a NUL character in the line; is this a text file in utf-8?")
        yield line, text  # the \r of a CRLF goes with the white space at the ends


def _from_text(line: str, index: int, where: str) -> Prompt | None:
    text = line.strip()
    return Prompt(text, index, where=where) if text and not line.startswith("#") else None


def _from_json(line: str, index: int, where: str) -> Prompt | None:
    if not line.strip():
        return None
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f" ({error.msg}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{where}: not valid JSON{reason}") from error
    if not isinstance(row, dict):
        raise UsageError(f'{where}: the line needs an object such as {{"prompt": "a red cat"}}')
    if "prompt" not in row:
        raise UsageError(f"{where}: the object has no 'prompt'")
    text, target = row.pop("prompt"), row.pop("target", None)
    _check(text, "prompt", where)
    if target is not None:
        _check(target, "target", where)
    return Prompt(text.strip(), index, target, row, where)


def _check(text: Any, key: str, where: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{where}: {key!r} needs text, not {json.dumps(text)}")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise UsageError(f"{where}: {key!r} holds a NUL or half of a surrogate pair, which no text has")


def deal(n: int, batch: int, turn: int, seed: int) -> list[int]:
    """Which of n samples make up a batch: pass after pass through all of them, each in an order of its own.

    Unlike `pick` a batch may run over the end of a pass, and may be larger than n.

    >>> sorted(deal(4, 3, 0, 7) + deal(4, 3, 1, 7) + deal(4, 2, 3, 7))
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    if n < 1:
        raise ValueError("there is nothing to deal")
    places = [divmod(at, n) for at in range(turn * batch, (turn + 1) * batch)]
    return [_order(f"deal {seed} {which}", n)[place] for which, place in places]


@lru_cache(maxsize=4)
def _order(name: str, n: int) -> list[int]:
    """The numbers below n by a hash: it needs no generator, so no library's version can change it."""
    return sorted(range(n), key=lambda i: hashlib.sha256(f"{name} {i}".encode()).digest())
