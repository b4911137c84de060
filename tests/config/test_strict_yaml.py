from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkit.config.strict_yaml import inline, load_yaml, parse_value
from flowkit.errors import UsageError


def write(folder: Path, raw: bytes | str) -> Path:
    path = folder / "c.yaml"
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    return path


def refusal(folder: Path, raw: bytes | str) -> str:
    path = write(folder, raw)
    with pytest.raises(UsageError) as caught:
        load_yaml(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", ".1e-3", "1.0e-4", "+1e-4"])
def test_floats_without_a_point_are_floats(text: str) -> None:
    value = parse_value(text, "here")
    assert isinstance(value, float)
    assert value == 1e-4


@pytest.mark.parametrize("text", ["16:9", "190:20:30", "1:1", "-1:30", "1:30.5"])
def test_sexagesimal_numbers_stay_text(text: str) -> None:
    assert parse_value(text, "here") == text


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "Yes", "NO", "On", "OFF", "y", "n"])
def test_yes_no_on_off_stay_text(text: str) -> None:
    assert parse_value(text, "here") == text


@pytest.mark.parametrize("text", ["1_000", "2024-01-01", "0b11", "<<", "="])
def test_other_traps_of_yaml_1_1_stay_text(text: str) -> None:
    assert parse_value(text, "here") == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("3", 3),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        (".inf", math.inf),
        ("'1e-4'", "1e-4"),
        ("{a: 1, b: [x, 2.5]}", {"a": 1, "b": ["x", 2.5]}),
        ("!!str 3", "3"),
    ],
)
def test_plain_values_have_the_meaning_of_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse_value(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n") == (
        ":5: the key 'c' stands twice, first in line 3"
    )


def test_the_same_key_in_two_blocks_is_fine(tmp_path: Path) -> None:
    assert load_yaml(write(tmp_path, "a: {x: 1}\nb: {x: 2}\n")).data == {"a": {"x": 1}, "b": {"x": 2}}


def test_every_key_keeps_its_line(tmp_path: Path) -> None:
    lines = load_yaml(write(tmp_path, "# head\na: 1\nb:\n  c:\n    d: 2\n  e: [1, 2]\n")).lines
    assert lines == {("a",): 2, ("b",): 3, ("b", "c"): 4, ("b", "c", "d"): 5, ("b", "e"): 6}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_utf8_is_read_with_and_without_byte_order_mark(tmp_path: Path, mark: bytes) -> None:
    assert load_yaml(write(tmp_path, mark + "a: café\r\nb: 2\r\n".encode())).data == {"a": "café", "b": 2}


def test_broken_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    assert refusal(tmp_path, b"a: 1\nb: caf\xe9\n").startswith(":2: not utf-8")


def test_a_control_character_is_refused_with_its_line(tmp_path: Path) -> None:
    assert refusal(tmp_path, b"a: 1\n\nb: x\0y\n").startswith(":3: a control character (0x00)")


@pytest.mark.parametrize("raw", ["", "\n\n", "# only a comment\n"])
def test_an_empty_file_is_refused(tmp_path: Path, raw: str) -> None:
    assert "the file is empty" in refusal(tmp_path, raw)


@pytest.mark.parametrize("raw", ["- a\n- b\n", "just text\n", "3\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, raw: str) -> None:
    assert "needs 'key: value' lines" in refusal(tmp_path, raw)


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    assert refusal(tmp_path, "a: 1\nb: [1, 2\nc: 3\n").startswith(":3: not valid YAML")
    assert refusal(tmp_path, "a: 1\n\tb: 2\n").startswith(":2: not valid YAML")


def test_a_second_document_is_refused(tmp_path: Path) -> None:
    assert ":2: not valid YAML" in refusal(tmp_path, "a: 1\n---\nb: 2\n")


@pytest.mark.parametrize("key", ["1", "1.5", "true", "null", "~"])
def test_a_key_that_is_not_text_is_refused(tmp_path: Path, key: str) -> None:
    assert f":2: the key {key!r} is not text" in refusal(tmp_path, f"a: 1\n{key}: 2\n")


@pytest.mark.parametrize("key", ["[a, b]", "{a: 1}", "? - a\n"])
def test_a_list_or_block_as_key_is_refused(tmp_path: Path, key: str) -> None:
    assert "stands where a key should" in refusal(tmp_path, f"{key}: 2\n")


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system [x]", "!mine 3", "!!set {a}", "!!binary aGk="]
)
def test_tags_are_refused_and_build_nothing(tmp_path: Path, tag: str) -> None:
    assert ":1: the tag" in refusal(tmp_path, f"a: {tag}\n")


@pytest.mark.parametrize("value", ["!!int x", "!!bool maybe", "!!float x", "9" * 5000])
def test_a_value_that_its_type_cannot_hold_is_refused(tmp_path: Path, value: str) -> None:
    assert "can't be read as" in refusal(tmp_path, f"a: {value}\n")


def test_aliases_work_and_a_value_that_holds_itself_is_refused(tmp_path: Path) -> None:
    assert load_yaml(write(tmp_path, "a: &x {b: 1}\nc: *x\n")).data == {"a": {"b": 1}, "c": {"b": 1}}
    assert "contains itself" in refusal(tmp_path, "a: &x [*x]\n")


def test_bottomless_nesting_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in refusal(tmp_path, "a: " + "[" * 1_000)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_yaml(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        load_yaml(tmp_path)


def test_a_broken_override_names_itself_and_no_line() -> None:
    with pytest.raises(UsageError, match=r"^override 'a=\[': not valid YAML"):
        parse_value("[", "override 'a=['")


TEXTS = st.text(st.sampled_from("\n\t\u2028 :#'\"-") | st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)  # the machine may be busy
@given(VALUES)
def test_a_value_on_one_line_reads_back_exactly(value: Any) -> None:
    line = inline(value)
    assert "\n" not in line
    again = parse_value(line, "here")
    assert again == value
    assert repr(again) == repr(value)  # -0.0 is not 0.0, True is not 1


@pytest.mark.parametrize(
    "text", ["1e-4", "3", "true", "null", "", "~", " a ", "a: b", "a # b", "- a", "a\nb", "é"]
)
def test_text_that_looks_like_something_else_is_quoted(text: str) -> None:
    assert "\n" not in inline(text)
    assert parse_value(inline(text), "here") == text
    assert parse_value(inline([text]), "here") == [text]


def test_only_flowkit_reads_by_these_rules() -> None:
    assert yaml.safe_load("on") is True  # PyYAML's own loader is left as it was
