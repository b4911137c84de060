"""A checkpoint is complete or absent, whatever happens and whenever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowkit.errors import UserError
from flowkit.runtime import checkpoint


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "state.txt").write_text(text)

    return write


def read(path: Path | None) -> str:
    assert path is not None
    return (path / "sub" / "state.txt").read_text()


def test_what_was_saved_is_found(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    path = checkpoint.save(tmp_path, 100, writer("hundred"), keep=2)
    assert path == tmp_path / "checkpoints" / "step-000100" == checkpoint.newest(tmp_path)
    assert read(path) == "hundred"


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1_000_000, writer("million"), keep=9)
    checkpoint.save(tmp_path, 999_999, writer("less"), keep=9)
    assert checkpoint.steps(tmp_path) == [999_999, 1_000_000]
    assert read(checkpoint.newest(tmp_path)) == "million"


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5]), (0, [5])])
def test_the_newest_stay_and_never_none(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, writer(str(step)), keep)
    assert checkpoint.steps(tmp_path) == left
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [
        checkpoint.name_of(s) for s in left
    ]


def test_stray_and_partial_folders_are_no_checkpoints(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 7, writer("seven"), keep=1)
    parent = tmp_path / "checkpoints"
    killed = "step-000009.partial-0a1b2c3d"
    strays = [
        "step-9",
        "step-0000010",
        "step-000011-copy",
        "xstep-000012",
        "step-a",
    ]
    for name in [killed, *strays]:
        (parent / name).mkdir()
        (parent / name / "state.txt").write_text("stray")
    (parent / "step-000013").write_text("a file")
    (parent / "step-000014").mkdir()
    assert checkpoint.steps(tmp_path) == [7]
    checkpoint.save(tmp_path, 8, writer("eight"), keep=1)
    assert checkpoint.steps(tmp_path) == [8]
    there = {path.name for path in parent.iterdir()}
    assert killed not in there
    assert there >= set(strays)  # not ours: not touched


def test_an_empty_folder_of_that_name_gives_way(tmp_path: Path) -> None:
    checkpoint.path_of(tmp_path, 3).mkdir(parents=True)
    assert read(checkpoint.save(tmp_path, 3, writer("three"), keep=1)) == "three"


def test_a_complete_step_is_not_written_again(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, writer("first"), keep=1)
    assert read(checkpoint.save(tmp_path, 3, writer("second"), keep=1)) == "first"


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("bug"), KeyboardInterrupt()]
)
def test_a_failed_save_leaves_the_old_one_and_no_rest(tmp_path: Path, error: BaseException) -> None:
    checkpoint.save(tmp_path, 1, writer("one"), keep=1)

    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(UserError if isinstance(error, OSError) else type(error)) as raised:
        checkpoint.save(tmp_path, 2, write, keep=1)
    if isinstance(error, OSError):
        assert "step-000002: No space left on device" in str(raised.value)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


KILLED = """
import os, signal, sys
from pathlib import Path
from flowkit.runtime import checkpoint

def die(*_): os.kill(os.getpid(), signal.SIGKILL)
def write(folder):
    (folder / "state.txt").write_text("new")
    if sys.argv[2] == "write": die()
folder = Path(sys.argv[1])
checkpoint.save(folder, 1, lambda f: (f / "state.txt").write_text("old"), keep=1)
if sys.argv[2] == "publish": checkpoint._publish = die
if sys.argv[2] == "prune": checkpoint.prune = die
if sys.argv[2] == "remove":
    import shutil
    from flowkit.runtime import files
    def half(path): next(path.iterdir()).unlink(); die()
    files.shutil.rmtree = half
checkpoint.save(folder, 2, write, keep=1)
"""


@pytest.mark.parametrize(("moment", "newest"), [("write", 1), ("publish", 1), ("prune", 2), ("remove", 2)])
def test_kill_at_any_moment_leaves_the_newest_whole(tmp_path: Path, moment: str, newest: int) -> None:
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], check=False)
    assert ran.returncode == -signal.SIGKILL
    path = checkpoint.newest(tmp_path)
    assert path is not None
    assert (path.name, (path / "state.txt").read_text()) == (
        f"step-00000{newest}",
        ["", "old", "new"][newest],
    )
    # Every folder that looks complete is complete.
    assert all((checkpoint.path_of(tmp_path, s) / "state.txt").exists() for s in checkpoint.steps(tmp_path))
    checkpoint.save(tmp_path, 3, lambda f: (f / "x").write_text("x"), keep=1)
    assert os.listdir(tmp_path / "checkpoints") == ["step-000003"]


def test_all_is_on_the_disk_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint.save(tmp_path, 1, writer("one"), keep=1)
    kinds = [Path(p).name.split(".partial")[0] for p in synced]
    assert kinds == ["state.txt", "sub", "step-000001", "checkpoints"]


def test_a_read_only_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"cannot save .*step-000001: Read-only file system"):
        checkpoint.save(tmp_path, 1, writer("one"), keep=1)
