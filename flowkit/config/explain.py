"""Pydantic's errors as one sentence that names the place, the key, the value and what would be right."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from flowkit.config.strict_yaml import KeyPath, inline
from flowkit.config.suggest import suggestion

_CHECK = "flowkit_check"
_BOUNDS = {
    "greater_than_equal": ("ge", "{} or more"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "{} or less"),
    "less_than": ("lt", "less than {}"),
}
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text (in quotes, if it looks like a number)",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "too_short": "one entry at least",
    "model_type": "a block of 'key: value' lines",
    "dict_type": "a block of 'name: value' lines",
}


def refuse(key: str, sentence: str) -> PydanticCustomError:
    """The error for a check that pydantic can't express; `key` is dotted, from the section that raises it."""
    return PydanticCustomError(_CHECK, "{sentence}", {"sentence": sentence, "key": key})


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The pydantic class that an annotation holds, if any: `Window | None` holds Window."""
    if get_origin(annotation) in (Union, UnionType):
        return next(filter(None, map(section_of, get_args(annotation))), None)
    return annotation if inspect.isclass(annotation) and issubclass(annotation, BaseModel) else None


def explain(schema: type[BaseModel], error: ValidationError, places: Mapping[KeyPath, str], name: str) -> str:
    """The first error as a sentence, and how many more there are.

    Args:
        schema: the class that was to be filled.
        error: what pydantic found.
        places: where each key was written, 'file:line' or the override.
        name: the file, for a key that is nowhere.
    """
    details = error.errors(include_url=False)
    paths = [_path(schema, detail) for detail in details]
    same = [detail for path, detail in zip(paths, details, strict=True) if path == paths[0]]
    others = len(set(paths)) - 1
    sentence = _sentence(schema, paths[0], same)
    more = f" (and {others} more wrong value{'s' if others > 1 else ''})" if others else ""
    return f"{_place(paths[0], places, name)}: {sentence}{more}"


def _sentence(schema: type[BaseModel], path: KeyPath, details: list[ErrorDetails]) -> str:
    first, key = details[0], ".".join(path)
    if first["type"] == _CHECK:
        return str(first["ctx"]["sentence"])
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if any(detail["type"] == "missing" and detail["loc"] != path for detail in details):
        return f"{key!r} has too few items"
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    if first["type"] == "too_long":
        return f"{key!r} has too many items"
    wanted = " or ".join(dict.fromkeys(_wanted(detail) for detail in details))
    hint = ""
    choices = _choices(first)
    if choices and isinstance(first["input"], str):
        guess = suggestion(first["input"], choices)
        hint = f"; {guess}" if guess.startswith("did") else ""
    elif first["type"] in _BOUNDS:
        about = _description(schema, path)
        hint = f" ({about})" if about else ""
    return f"{key!r} is {_show(first['input'])}, it must be {wanted}{hint}"


def _wanted(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = detail["ctx"][name]
        return words.format(f"{bound:g}" if isinstance(bound, float) else bound)
    if kind == "literal_error":
        return ", ".join(_choices(detail))
    return _KINDS.get(kind, detail["msg"][:1].lower() + detail["msg"][1:])


def _choices(detail: ErrorDetails) -> list[str]:
    return re.findall(r"'([^']*)'", detail["ctx"]["expected"]) if detail["type"] == "literal_error" else []


def _show(value: Any) -> str:
    text = inline(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _path(schema: type[BaseModel], detail: ErrorDetails) -> KeyPath:
    """The key that an error is about: pydantic's location without union branches and list positions."""
    loc = detail["loc"]
    if detail["type"] == _CHECK:
        loc = (*loc, *detail["ctx"]["key"].split("."))
    level: type[BaseModel] | None = schema
    path: list[str] = []
    for part in loc:
        if level is None or part not in level.model_fields:
            break
        path.append(str(part))
        annotation = level.model_fields[str(part)].annotation
        level = section_of(annotation)
        if get_origin(annotation) is dict:
            path.extend(str(name) for name in loc[len(path) : len(path) + 1])
            break
    return tuple(path)


def _place(path: KeyPath, places: Mapping[KeyPath, str], name: str) -> str:
    """Where the key, else an override below it, else the nearest block above it was written."""
    below = [
        place for key, place in places.items() if key[: len(path)] == path and place.startswith("override")
    ]
    above = [places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places]
    return next(iter(below + above), name)


def _description(schema: type[BaseModel], path: KeyPath) -> str:
    level: type[BaseModel] | None = schema
    text = ""
    for name in path:
        if level is None or name not in level.model_fields:
            return text
        info = level.model_fields[name]
        text, level = info.description or "", section_of(info.annotation)
    return text
