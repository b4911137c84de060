"""YAML without its traps, read and written by the same rules.

Against PyYAML's SafeLoader: `1e-4` is a number; `16:9`, `yes`, `no`, `on`, `off`, `1_000` and dates stay
text; a key that stands twice is refused with both lines; keys are text. Every key keeps its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowkit.errors import UsageError

KeyPath = tuple[str, ...]
Place = Callable[[int], str]  # a line to what messages call it

_TAG = "tag:yaml.org,2002:"
_SCALARS = ("null", "bool", "int", "float", "str")

_RULES: tuple[tuple[str, str, str], ...] = (  # tag, pattern (YAML 1.2 core schema), possible first characters
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    # A line break inside plain or single quotes would spread over several lines.
    style = '"' if not value.isprintable() else None
    return dumper.represent_scalar(_TAG + "str", value, style=style)


_Loader.yaml_implicit_resolvers = {}  # without YAML 1.1's
_Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _RULES:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _tag, re.compile(rf"^(?:{_pattern})$"), [*_first, ""])
_Loader.add_constructor(_TAG + "int", _int)
_Dumper.add_representer(str, _text)


@dataclass(frozen=True)
class Document:
    """A parsed file: plain values, and the line on which every key stands."""

    data: dict[str, Any]
    lines: Mapping[KeyPath, int]
    name: str


def load_yaml(path: str | Path) -> Document:
    """Read one YAML file whose top level is 'key: value' lines.

    Raises UsageError, with file and line, for a missing or empty file, broken utf-8, broken YAML, a key that
    stands twice, a key that is not text, an unknown tag or a value that contains itself.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    name = _shown(path)
    return parse_document(decode_utf8(raw, name), name)


def parse_document(text: str, name: str) -> Document:
    """Parse text as `load_yaml` does; `name` stands for the file in messages."""
    lines: dict[KeyPath, int] = {}
    value = _parse(text, lambda line: f"{name}:{line}", lines)
    if value is None:
        raise UsageError(f"{name}: the file is empty, it needs 'key: value' lines")
    if not isinstance(value, dict):
        raise UsageError(f"{name}:1: the file needs 'key: value' lines at its top level")
    return Document(value, lines, name)


def parse_value(text: str, name: str) -> Any:
    """One value by the same rules; `name` stands for its place in messages.

    >>> parse_value("1e-4", "here"), parse_value("16:9", "here"), parse_value("[a, 2]", "here")
    (0.0001, '16:9', ['a', 2])
    """
    return _parse(text, lambda line: name, {})


def decode_utf8(raw: bytes, name: str) -> str:
    """Text of a file in utf-8, with or without byte order mark; UsageError names the line of a bad byte."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}:{line}: not utf-8; save the file as utf-8") from error


def inline(value: Any) -> str:
    """A value as one line of YAML that `parse_value` reads back.

    >>> inline("1e-4"), inline(1e-10), inline((0.9, 0.999)), inline("16:9")
    ("'1e-4'", '1.0e-10', '[0.9, 0.999]', '16:9')
    """
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=2**31, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("...\n").strip("\n")


def _parse(text: str, at: Place, lines: dict[KeyPath, int]) -> Any:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _Builder(loader, at, lines).build(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise UsageError(f"{at(line)}: not valid YAML ({error.problem or error.context})") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(f"{at(line)}: a control character ({error.character:#04x}) in the text") from error
    except RecursionError as error:
        raise UsageError(f"{at(1)}: lists or blocks are nested too deeply to be read") from error


@dataclass(frozen=True)
class _Builder:
    """Nodes to values, scalars by PyYAML's own constructors."""

    loader: _Loader
    at: Place
    lines: dict[KeyPath, int]

    def build(self, node: yaml.Node, path: KeyPath = (), above: tuple[yaml.Node, ...] = ()) -> Any:
        if any(node is outer for outer in above):
            raise self._error(node, "a value contains itself through an alias")
        above = (*above, node)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = self._key(key_node)
                here = (*path, key)
                if key in result:
                    raise self._error(
                        key_node, f"the key {key!r} stands twice, first in line {self.lines[here]}"
                    )
                self.lines[here] = key_node.start_mark.line + 1
                result[key] = self.build(value_node, here, above)
            return result
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(item, (*path, str(i)), above) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, "a list or block stands where a key should; keys are text")
        key = self._scalar(node)
        if not isinstance(key, str):
            raise self._error(node, f"the key {node.value!r} is not text; put it in quotes")
        return key

    def _scalar(self, node: yaml.Node) -> Any:
        if node.tag.removeprefix(_TAG) not in _SCALARS:
            raise self._error(node, f"the tag {node.tag!r} is not used here; write the plain value")
        try:
            return self.loader.construct_object(node)
        except (ValueError, KeyError) as error:
            raise self._error(
                node, f"{node.value[:40]!r} can't be read as {node.tag.removeprefix(_TAG)}"
            ) from error

    def _error(self, node: yaml.Node, sentence: str) -> UsageError:
        return UsageError(f"{self.at(node.start_mark.line + 1)}: {sentence}")


def _shown(path: Path) -> str:
    """The path from the current folder where it lies below it: what a person would type."""
    full, here = path.absolute(), Path.cwd()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(path)
