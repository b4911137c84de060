"""Encodings are made once, kept by content, and the encoders are gone afterwards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from flowkit.models import load
from flowkit.models.text import encode_all
from tests import tiny

PROMPTS = ["a cat", "two dogs", "a cat", 'the word "SUN"', "x", ""]


def counted(model: Any) -> list[list[str]]:
    """Every list of texts that the model encodes from now on."""
    calls: list[list[str]] = []
    encode = model.encode

    def watch(prompts: list[str]) -> Any:
        calls.append(list(prompts))
        return encode(prompts)

    model.encode = watch
    return calls


@pytest.mark.parametrize("name", ["flux", "sd3"])
@pytest.mark.parametrize("cached", [False, True])
def test_row_i_is_the_encoding_of_prompt_i(name: str, cached: bool, tmp_path: Path) -> None:
    model: Any = load(str(tiny.bundle(name)))
    table = encode_all(model, PROMPTS, tmp_path if cached else None, batch=2)
    assert not model._text
    picked = [4, 0, 2, 3]
    cond = table[picked]
    # the same rows in batches of the same size: the table's chunks hold two texts
    for row, i in enumerate(picked):
        alone = model.encode([PROMPTS[i]])
        for key, value in alone.tensors.items():
            assert (cond.tensors[key][row] - value[0]).abs().max() <= 512 * 2.0**-24 * value.abs().max()
    assert (cond.negative is None) == (name == "flux")
    if cond.negative is not None:
        none = model.encode([""]).tensors
        assert all(v.shape[0] == len(picked) for v in cond.negative.tensors.values())
        assert torch.equal(cond.negative.tensors["text"][1], none["text"][0])
    assert len(table) == len(PROMPTS)


def test_equal_texts_are_encoded_once_and_a_second_run_encodes_nothing(tmp_path: Path) -> None:
    model: Any = load(str(tiny.bundle("flux")))
    calls = counted(model)
    first = encode_all(model, PROMPTS, tmp_path, batch=2)
    assert [t for call in calls for t in call] == ["a cat", "two dogs", 'the word "SUN"', "x", ""]
    calls.clear()
    second = encode_all(model, PROMPTS, tmp_path, batch=2)
    assert not calls
    everything = list(range(len(PROMPTS)))
    assert all(torch.equal(v, second[everything].tensors[k]) for k, v in first[everything].tensors.items())


def test_the_cache_is_keyed_by_encoders_dtype_and_texts(tmp_path: Path) -> None:
    other = tiny.write_flux(tmp_path / "other", seed=5)
    cache = tmp_path / "cache"
    for folder, dtype in (
        (tiny.bundle("flux"), "float32"),
        (tiny.bundle("flux"), "bfloat16"),
        (other, "float32"),
    ):
        model: Any = load(str(folder), dtype=dtype)
        calls = counted(model)
        encode_all(model, ["a", "b"], cache)
        assert calls == [["a", "b"]]
    calls.clear()
    encode_all(model, ["b", "a"], cache)
    assert calls == [["b", "a"]]
    assert len(list(cache.iterdir())) == 4


def test_a_copy_of_the_model_in_another_folder_shares_the_cache(tmp_path: Path) -> None:
    copy = tiny.write_flux(tmp_path / "copy")
    encode_all(load(str(tiny.bundle("flux"))), ["a"], tmp_path / "cache")
    model: Any = load(str(copy))
    calls = counted(model)
    encode_all(model, ["a"], tmp_path / "cache")
    assert not calls


def test_a_broken_cache_file_is_said_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(str(tiny.bundle("flux")))
    before = encode_all(model, ["a"], tmp_path)[[0]]
    file = next(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        after = encode_all(model, ["a"], tmp_path)[[0]]
    assert "truncated" in caplog.text
    assert torch.equal(before.tensors["text"], after.tensors["text"])


def test_a_prompt_longer_than_the_text_length_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        encode_all(load(str(tiny.bundle("flux"))), ["a" * 100, "b"])
    assert f"1 of 2 prompts are longer than {tiny.T5_LENGTH} tokens" in caplog.text


def test_no_prompts_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        encode_all(load(str(tiny.bundle("flux"))), [])
