from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkit.data.prompts import lint, pick, read
from flowkit.errors import UsageError


def file(folder: Path, raw: bytes, name: str = "p.txt") -> Path:
    path = folder / name
    path.write_bytes(raw)
    return path


def refusal(path: Path | str) -> str:
    with pytest.raises(UsageError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_txt_gives_one_prompt_a_line_with_its_index_and_place(tmp_path: Path) -> None:
    path = file(tmp_path, b"one\n\n# a comment\ntwo")
    assert [(p.text, p.index, p.where) for p in read(path)] == [
        ("one", 0, f"{path}:1"),
        ("two", 1, f"{path}:4"),
    ]


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_byte_order_mark_is_dropped(tmp_path: Path, name: str) -> None:
    line = "one" if name == "p.txt" else '{"prompt": "one"}'
    assert [p.text for p in read(file(tmp_path, b"\xef\xbb\xbf" + line.encode(), name))] == ["one"]


def test_carriage_returns_are_dropped_and_other_separators_kept(tmp_path: Path) -> None:
    path = file(tmp_path, "one\r\n\r\ntwo\u2028half\u0085more\r\n".encode())
    assert [p.text for p in read(path)] == ["one", "two\u2028half\u0085more"]


def test_blank_lines_and_comments_are_skipped_but_a_space_before_the_hash_keeps_it(tmp_path: Path) -> None:
    assert [p.text for p in read(file(tmp_path, b"  \t\n#no\n #yes\nx # y\n"))] == ["#yes", "x # y"]


def test_duplicates_are_kept_told_apart_by_index_and_remarked(tmp_path: Path) -> None:
    path = file(tmp_path, b"a\nb\na\n")
    prompts = read(path)
    assert [(p.text, p.index) for p in prompts] == [("a", 0), ("b", 1), ("a", 2)]
    assert lint(prompts) == [f"{path}:3: the same text as in {path}:1"]


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_nul_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    first = b"one" if name == "p.txt" else b'{"prompt": "one"}'
    assert ":2: a NUL character" in refusal(file(tmp_path, first + b"\nt\0wo\n", name))


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_broken_utf8_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    assert ":3: not utf-8" in refusal(file(tmp_path, "\n\ncafé".encode("latin-1"), name))


@pytest.mark.parametrize("raw", ["one", "\ufeffone"])
def test_utf16_is_refused(tmp_path: Path, raw: str) -> None:
    refusal(file(tmp_path, raw.encode("utf-16-le")))


def test_jsonl_gives_prompt_target_and_the_rest_as_meta(tmp_path: Path) -> None:
    row = {"tag": "counting", "include": [{"class": "cat", "count": 2}], "prompt": "two cats", "target": "x"}
    path = file(tmp_path, f"\n{json.dumps(row)}\n".encode(), "p.jsonl")
    (prompt,) = read(path)
    assert (prompt.text, prompt.index, prompt.target, prompt.where) == ("two cats", 0, "x", f"{path}:2")
    assert prompt.meta == {"tag": "counting", "include": [{"class": "cat", "count": 2}]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ("a red cat", "not valid JSON"),
        ("# comment", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('["a"]', "needs an object"),
        ('{"text": "a"}', "has no 'prompt'"),
        ('{"prompt": null}', "'prompt' needs text, not null"),
        ('{"prompt": " "}', "'prompt' needs text"),
        ('{"prompt": 3}', "'prompt' needs text, not 3"),
        ('{"prompt": "a", "target": 3}', "'target' needs text, not 3"),
        (r'{"prompt": "a\u0000"}', "holds a NUL"),
        (r'{"prompt": "\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_broken_jsonl_line_is_refused_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    message = refusal(file(tmp_path, b'{"prompt": "fine"}\n' + line.encode(), "p.jsonl"))
    assert ":2: " in message
    assert reason in message


@pytest.mark.parametrize("raw", [b"", b"\n\n", b"# only this\n", b"\xef\xbb\xbf"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, raw: bytes) -> None:
    assert "holds no prompt" in refusal(file(tmp_path, raw))


def test_a_missing_file_is_refused_and_the_built_in_lists_are_named(tmp_path: Path) -> None:
    message = refusal(tmp_path / "no.txt")
    assert "no such prompt file" in message
    assert "builtin:ocr-train" in message


def test_a_folder_and_an_unknown_ending_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.txt").mkdir()
    assert "cannot be read" in refusal(tmp_path / "d.txt")
    assert ".txt and .jsonl" in refusal(file(tmp_path, b"a", "p.md"))


def test_an_unknown_builtin_is_refused_with_the_closest_name() -> None:
    assert refusal("builtin:ocr-tran") == (
        "there is no prompt list 'builtin:ocr-tran'; did you mean 'builtin:ocr-train'?"
    )


def test_builtin_names_are_places_in_messages() -> None:
    assert read("builtin:ocr-test")[0].where == "builtin:ocr-test:3"


@settings(deadline=None, max_examples=50)  # the machine may be busy
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**63 - 1))
def test_each_prompt_comes_exactly_once_a_pass(n_epochs: int, groups: int, seed: int) -> None:
    n = n_epochs * groups
    for turn in (0, 3):
        epochs = [pick(n, groups, turn * n_epochs + e, seed) for e in range(n_epochs)]
        assert sorted(i for epoch in epochs for i in epoch) == list(range(n))


@settings(deadline=None, max_examples=50)  # the machine may be busy
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 500))
def test_the_prompts_of_an_epoch_are_always_different(n: int, groups: int, epoch: int) -> None:
    if n >= groups:
        chosen = pick(n, groups, epoch, 0)
        assert len(set(chosen)) == groups
        assert set(chosen) <= set(range(n))


def test_passes_and_seeds_differ_and_a_pick_never_changes() -> None:
    assert pick(100, 10, 0, 0) != pick(100, 10, 10, 0)
    assert pick(100, 10, 0, 0) != pick(100, 10, 0, 1)
    assert pick(10, 4, 3, 7) == [9, 6, 3, 8]  # resume relies on it: on every version and machine


def test_fewer_prompts_than_groups_are_refused_with_a_legal_number() -> None:
    with pytest.raises(UsageError, match=r"3 prompts are fewer than the 8 groups.*rollout\.groups=3"):
        pick(3, 8, 0, 0)
