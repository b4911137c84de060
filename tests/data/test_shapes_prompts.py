from __future__ import annotations

from pathlib import Path

from flowkit.assets.build.tiny_wan.text import prompts as known
from flowkit.config.presets import folder
from flowkit.data.prompts import lint, read
from flowkit.data.shapes_prompts import write
from flowkit.rewards.shapes import asked_of


def test_the_script_writes_the_committed_lists_byte_for_byte(tmp_path: Path) -> None:
    for file in write(tmp_path):
        assert file.read_bytes() == (folder() / "prompts" / file.name).read_bytes(), file.name


def test_the_lists_share_nothing_and_make_the_whole_world_together() -> None:
    train, test = (read(f"builtin:shapes-{name}") for name in ("train", "test"))
    assert (len(train), len(test)) == (103, 36)
    assert lint([*train, *test]) == []
    assert {p.text for p in (*train, *test)} == {*known()[0]} - {"a thing moving"}


def test_every_prompt_can_be_judged_and_the_test_list_leaves_nothing_open() -> None:
    for prompt in (*read("builtin:shapes-train"), *read("builtin:shapes-test")):
        assert asked_of(prompt) is not None, prompt.where
    for prompt in read("builtin:shapes-test"):
        asked = asked_of(prompt)
        assert asked is not None
        assert None not in (asked.colour, asked.shape, asked.direction)
