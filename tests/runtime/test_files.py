"""A file holds its old content or its new, and disk errors are sentences."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowkit.errors import UserError
from flowkit.runtime import files


def test_text_is_written_as_it_stands_and_the_folder_made(tmp_path: Path) -> None:
    files.write_text(tmp_path / "new" / "a.txt", "é\r\n\n")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "é\r\n\n".encode()
    assert os.listdir(tmp_path / "new") == ["a.txt"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_text(tmp_path / "a", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*a: No space left on device"):
        files.write_text(tmp_path / "a", "new")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_json_with_nan_is_a_bug_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "a.json", {"x": float("nan")})
    assert not (tmp_path / "a.json").exists()


def test_an_error_of_safetensors_is_a_disk_error_too(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "w.safetensors"
    with pytest.raises(UserError, match=r"cannot save .*w.safetensors"), files.disk_errors("save", path):
        save_file({"w": torch.zeros(1)}, path)


def test_remove_takes_files_folders_links_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    files.remove(tmp_path / "link")
    assert (tmp_path / "folder").exists()
    files.remove(tmp_path / "folder")
    files.remove(tmp_path / "none")
    assert os.listdir(tmp_path) == []
