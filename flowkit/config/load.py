"""File and overrides in, frozen config out, with the place that every value came from."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from flowkit.config.explain import explain, section_of
from flowkit.config.strict_yaml import Document, KeyPath, inline, load_yaml, parse_value
from flowkit.config.suggest import suggestion
from flowkit.errors import UsageError

__all__ = ["Document", "Resolved", "dump", "load_yaml", "override", "print_config", "resolve"]

T = TypeVar("T", bound=BaseModel)
OVERRIDE = "override"
DEFAULT = "default"


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A config, and for every value by its dotted key: 'file:line', 'override' or 'default'."""

    config: T
    sources: Mapping[str, str]


@dataclass
class _Draft:
    """What is known before validation: values, and who wrote them."""

    data: dict[str, Any]
    name: str
    labels: dict[KeyPath, str] = field(default_factory=dict)  # what print_config shows
    places: dict[KeyPath, str] = field(default_factory=dict)  # what messages show


def resolve(schema: type[T], file: str | Path | Document, overrides: Sequence[str] = ()) -> Resolved[T]:
    """Read a config file, apply `key.sub=value` overrides in order, and check everything.

    Args:
        schema: the pydantic class to fill.
        file: a path, or a document that has been read already.
        overrides: each split at its first '='; the value is read by the rules of the YAML file. Of two
            for one key the last holds. A block (`rollout.window={size: 2, lo: 0, hi: 4}`) replaces the block.

    Raises UsageError, one sentence with place and fix, for anything wrong.
    """
    document = file if isinstance(file, Document) else load_yaml(file)
    draft = _Draft(copy.deepcopy(document.data), document.name)
    for path, line in document.lines.items():
        draft.labels[path] = draft.places[path] = f"{document.name}:{line}"
    _refuse_unknown(schema, schema, draft.data, (), draft.places, document.name)
    for text in overrides:
        _apply(schema, draft, text)
    try:
        config = schema.model_validate(draft.data)
    except ValidationError as error:
        raise UsageError(explain(schema, error, draft.places, draft.name)) from error
    return Resolved(config, {".".join(path): _label(draft, path) for path, _ in _leaves(_plain(config))})


def override(key: str, value: Any) -> str:
    """The override that sets a key to a value exactly, whatever the text looks like: for command-line flags.

    >>> override("out", "runs/a: b"), override("steps", 3)
    ("out='runs/a: b'", 'steps=3')
    """
    return f"{key}={inline(value)}"


def dump(config: BaseModel) -> str:
    """The config as YAML, every value written out; reading it back gives an equal config, bit for bit."""
    return "".join(f"{line}\n" for _, line in _emit(_plain(config)))


def print_config(resolved: Resolved[Any]) -> str:
    """The config as `dump` writes it, with the source of each value as a comment behind it."""
    rows = list(_emit(_plain(resolved.config)))
    width = min(48, max(len(line) for _, line in rows))
    text = ""
    for path, line in rows:
        source = resolved.sources.get(".".join(path))
        text += f"{line}\n" if source is None else f"{line:<{width}}  # {source}\n"
    return text


def _apply(schema: type[BaseModel], draft: _Draft, text: str) -> None:
    place = f"override {text!r}"
    key, equals, written = text.partition("=")
    if not equals:
        raise UsageError(f"{place}: an override is KEY=VALUE, such as steps=10")
    path = _override_path(schema, key.strip(), place)
    value = parse_value(written, place)
    _refuse_unknown(schema, _annotation_at(schema, path), value, path, {}, place)
    block = draft.data
    for name in path[:-1]:
        if not isinstance(block.get(name), dict):
            block[name] = {}
        block = block[name]
    block[path[-1]] = value
    for table in (draft.labels, draft.places):
        for old in [p for p in table if p[: len(path)] == path]:
            del table[old]
    draft.labels[path] = OVERRIDE
    draft.places[path] = place


def _override_path(schema: type[BaseModel], key: str, place: str) -> KeyPath:
    names = key.split(".")
    level: type[BaseModel] = schema
    for i, name in enumerate(names):
        if name not in level.model_fields:
            raise UsageError(f"{place}: {_unknown(schema, level, tuple(names[:i]), name)}")
        annotation = level.model_fields[name].annotation
        section = section_of(annotation)
        if section is not None:
            level = section
        elif get_origin(annotation) is dict and i + 1 < len(names):
            return (*names[: i + 1], ".".join(names[i + 1 :]))  # the names of rewards may hold dots
        elif i + 1 < len(names):
            raise UsageError(
                f"{place}: {'.'.join(names[: i + 1])!r} holds one value and has no keys below it"
            )
    return tuple(names)


def _annotation_at(schema: type[BaseModel], path: KeyPath) -> Any:
    """The annotation of a key; None for an entry of a table such as `reward`."""
    level: type[BaseModel] | None = schema
    annotation: Any = None
    for name in path:
        if level is None:
            return None
        annotation = level.model_fields[name].annotation
        level = section_of(annotation)
    return annotation


def _refuse_unknown(
    schema: type[BaseModel],
    annotation: Any,
    value: Any,
    path: KeyPath,
    places: Mapping[KeyPath, str],
    name: str,
) -> None:
    """Check the keys of a value and of all blocks below it; `name` is the place of keys not in `places`."""
    section = section_of(annotation)
    if section is None or (value is None and type(None) in get_args(annotation)):
        return
    if not isinstance(value, dict):
        keys = ", ".join(section.model_fields)
        place = places.get(path, name)
        raise UsageError(f"{place}: {'.'.join(path)!r} needs keys below it ({keys}), not {inline(value)}")
    for key, below in value.items():
        here = (*path, key)
        if key not in section.model_fields:
            raise UsageError(f"{places.get(here, name)}: {_unknown(schema, section, path, key)}")
        _refuse_unknown(schema, section.model_fields[key].annotation, below, here, places, name)


def _unknown(schema: type[BaseModel], level: type[BaseModel], path: KeyPath, key: str) -> str:
    """The sentence for a key that is not there: a near miss here, the same word elsewhere, or the list."""
    prefix = "".join(f"{name}." for name in path)
    guess = suggestion(key, level.model_fields)
    elsewhere = [".".join(found) for found in _schema_paths(schema) if found[-1] == key]
    if elsewhere:
        guess = f"did you mean {elsewhere[0]!r}?"
    elif prefix:
        guess = guess.replace("did you mean '", f"did you mean '{prefix}")
    return f"unknown key {prefix + key!r}; {guess}"


def _schema_paths(schema: type[BaseModel], path: KeyPath = ()) -> Iterator[KeyPath]:
    for name, info in schema.model_fields.items():
        yield (*path, name)
        section = section_of(info.annotation)
        if section is not None:
            yield from _schema_paths(section, (*path, name))


def _label(draft: _Draft, path: KeyPath) -> str:
    """Who wrote a value: itself, or the nearest block above it that an override replaced."""
    if path in draft.labels:
        return draft.labels[path]
    for end in range(len(path) - 1, 0, -1):
        if draft.labels.get(path[:end]) == OVERRIDE and _written(draft.data, path):
            return OVERRIDE
    return DEFAULT


def _written(data: Any, path: KeyPath) -> bool:
    for name in path:
        if not isinstance(data, dict) or name not in data:
            return False
        data = data[name]
    return True


def _plain(config: BaseModel) -> dict[str, Any]:
    return config.model_dump(mode="python")


def _leaves(data: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _emit(data: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    indent = "  " * len(path)
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, dict) and value:
            yield here, f"{indent}{inline(key)}:"
            yield from _emit(value, here)
        else:
            yield here, f"{indent}{inline(key)}: {inline(value)}"
