from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowkit.assets.words import FONTS, GROUNDS, INKS
from flowkit.config.presets import folder
from flowkit.data.ocr_prompts import write
from flowkit.data.ocr_scenes import targets
from flowkit.data.prompts import lint, read

LISTS = {"ocr-train": 2000, "ocr-test": 200, "tiny-ocr-train": 2000, "tiny-ocr-test": 200}


def quoted(name: str) -> list[str]:
    return [re.findall('"([^"]+)"', prompt.text)[0].lower() for prompt in read(f"builtin:{name}")]


def test_the_script_writes_the_committed_lists_byte_for_byte(tmp_path: Path) -> None:
    for file in write(tmp_path):
        assert file.read_bytes() == (folder() / "prompts" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(("name", "least"), LISTS.items())
def test_every_list_is_long_enough_and_says_nothing_twice(name: str, least: int) -> None:
    prompts = read(f"builtin:{name}")
    assert len(prompts) >= least
    assert lint(prompts) == []


@pytest.mark.parametrize("name", LISTS)
def test_every_prompt_quotes_exactly_one_text(name: str) -> None:
    for prompt in read(f"builtin:{name}"):
        assert prompt.text.count('"') == 2, prompt.where


@pytest.mark.parametrize("world", ["", "tiny-"])
def test_no_quoted_text_of_a_test_list_stands_in_the_train_list(world: str) -> None:
    test, train = quoted(f"{world}ocr-test"), quoted(f"{world}ocr-train")
    assert len(set(test)) == len(test)
    assert not set(test) & set(train)


@pytest.mark.parametrize("name", ["tiny-ocr-train", "tiny-ocr-test"])
def test_tiny_prompts_speak_the_grammar_of_the_embedded_world(name: str) -> None:
    ink, ground, font = ("|".join(names) for names in (INKS, GROUNDS, FONTS))
    grammar = re.compile(rf'the word "[A-Z]{{2,4}}"( in ({ink}))?( on ({ground}))?(, ({font}))?')
    for prompt in read(f"builtin:{name}"):
        assert grammar.fullmatch(prompt.text), prompt.where


def test_no_target_text_stands_under_two_kinds_of_scene() -> None:
    texts = [text.lower() for pool in targets().values() for text in pool]
    assert len(set(texts)) == len(texts)
