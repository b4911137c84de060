"""Safetensors on disk: whole or absent, and a named refusal for everything that is none."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkit.errors import UserError
from flowkit.models import files


def good(path: Path) -> Path:
    files.write_safetensors(
        path, {"a": torch.arange(600.0), "b": torch.ones(3, 2, dtype=torch.bfloat16)}, {"k": "v"}
    )
    return path


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "nan": torch.tensor([torch.nan, -0.0, torch.inf]),
        "bf16": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "view": torch.arange(12.0).reshape(3, 4).T,
        "int": torch.arange(3),
    }
    files.write_safetensors(tmp_path / "x" / "a.safetensors", tensors, {"note": "é"})
    found, metadata = files.read_safetensors(tmp_path / "x" / "a.safetensors")
    assert metadata == {"note": "é"}
    assert found.keys() == tensors.keys()
    assert all(files.same_bits(found[k], v) for k, v in tensors.items())
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["a.safetensors"]


def test_tensors_read_before_a_file_is_replaced_keep_their_values(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    files.write_safetensors(path, {"a": torch.zeros(1 << 16)}, {})
    read = files.read_safetensors(path)[0]["a"]
    files.write_safetensors(path, {"a": torch.ones(1 << 16)}, {})
    # they are mapped from the old file, which a rename leaves as it is
    assert not read.any()


def test_tensors_that_share_storage_are_written_as_separate_ones(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    files.write_safetensors(tmp_path / "a.safetensors", {"all": base, "part": base[2:5]}, {})
    found, _ = files.read_safetensors(tmp_path / "a.safetensors")
    assert torch.equal(found["part"], base[2:5])


def test_same_bits_tells_zeros_dtypes_and_shapes_apart() -> None:
    assert not files.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not files.same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not files.same_bits(torch.zeros(2, 3), torch.zeros(3, 2))
    assert files.same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "one byte": (b"x", "not a safetensors file"),
    "lfs": (LFS, "Git LFS pointer"),
    "html": (b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
    "pickle": (pickle.dumps({"a": 1}, protocol=4), "pickle"),
    "torch zip": (b"PK\x03\x04" + b"\0" * 60, "pickle"),
    "gguf": (b"GGUF" + b"\0" * 60, "GGUF"),
    "text": (b"hello, these are my weights, I hope", "not a safetensors file"),
    "bad json": ((20).to_bytes(8, "little") + b'{"a": {"dtype": "F32', "broken safetensors header"),
    "not offsets": ((9).to_bytes(8, "little") + b'{"a": {}}', "broken safetensors header"),
    "header only": ((500).to_bytes(8, "little") + b'{"a":', "truncated"),
    "no tensors": ((2).to_bytes(8, "little") + b"{}", "holds no tensors"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_each_broken_file_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    content, said = BROKEN[kind]
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        files.read_safetensors(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        files.read_safetensors(tmp_path / "nothing.safetensors")
    with pytest.raises(UserError, match="is a folder"):
        files.read_safetensors(tmp_path)


@settings(deadline=None, max_examples=30)  # time says nothing here: the disk is in it
@given(st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(share: float) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = good(Path(folder) / "w.safetensors")
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(UserError, match=r"truncated|empty|not a safetensors"):
            files.read_safetensors(path)


def test_a_header_whose_first_bytes_look_like_a_pickle_is_read(tmp_path: Path) -> None:
    # 0x0280 bytes of header, little end first, start as a pickle of protocol 2 does
    header = json.dumps(
        {"__metadata__": {"x": "y" * 500}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    )
    raw = header.encode().ljust(0x0280)
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0\0\0\0")
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert files.read_safetensors(path)[0]["a"].tolist() == [0.0]


def test_nothing_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="empty"):
        files.write_safetensors(tmp_path / "a.safetensors", {}, {})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_file_and_no_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = good(tmp_path / "w.safetensors")
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device") as caught:
        files.write_safetensors(path, {"a": torch.zeros(2)}, {})
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="Could not write"):
        files.write_safetensors(tmp_path / "file" / "w.safetensors", {"a": torch.zeros(2)}, {})


def test_a_disk_that_returns_other_bits_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = files.save_file
    monkeypatch.setattr(
        files, "save_file", lambda tensors, *a, **k: save({n: v + 1 for n, v in tensors.items()}, *a, **k)
    )
    with pytest.raises(UserError, match="other values in a"):
        files.write_safetensors(tmp_path / "w.safetensors", {"a": torch.zeros(2)}, {})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "not an object"),
        (LFS, "LFS"),
        (b"<html>", "HTML"),
    ],
)
def test_broken_json_is_refused_by_its_name(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(UserError, match=said):
        files.read_json(tmp_path / "c.json")


def test_the_fingerprint_sees_names_sizes_and_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(bytes(4 << 20))
    prints = {files.fingerprint([path])}
    for place in (0, 2 << 20, (4 << 20) - 1):
        raw = bytearray(4 << 20)
        raw[place] = 1
        path.write_bytes(raw)
        prints.add(files.fingerprint([path]))
    path.write_bytes(bytes((4 << 20) + 1))
    prints.add(files.fingerprint([path]))
    path.write_bytes(bytes(4 << 20))
    other = path.rename(tmp_path / "v")
    prints.add(files.fingerprint([other]))
    assert len(prints) == 6
