"""A run folder is gone on with by the same command, and refused to any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowkit.errors import UsageError, UserError
from flowkit.runtime import checkpoint
from flowkit.runtime.folder import HARMLESS, Opened, changes, open_folder

CONFIG = "optim: {lr: 0.1}\nsteps: 5\neval: {every: 2}\n"


def opened(out: Path, config: str = CONFIG, **how: object) -> Opened:
    with open_folder(out, config, **how) as run:  # type: ignore[arg-type]
        return run


def add(out: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(out, step, lambda folder: (folder / "state").write_text("x"), keep=99)


def test_a_new_run_writes_its_config_and_environment(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    run = opened(out, seed=3)
    assert run == Opened(out, None)
    assert run.step is None
    assert (out / "config.yaml").read_text() == CONFIG
    assert json.loads((out / "env.json").read_text())["seed"] == 3


def test_the_same_command_goes_on_from_the_newest(tmp_path: Path) -> None:
    opened(tmp_path)
    assert opened(tmp_path).checkpoint is None  # killed before the first
    add(tmp_path, 2, 10)
    assert opened(tmp_path).step == 10
    resumed = json.loads((tmp_path / "env.json").read_text())["resumed"]
    assert [record["step"] for record in resumed] == [10]


def test_a_config_that_never_trained_a_step_can_be_mended(tmp_path: Path) -> None:
    opened(tmp_path)
    mended = CONFIG.replace("0.1", "0.2")
    assert opened(tmp_path, mended).checkpoint is None
    assert (tmp_path / "config.yaml").read_text() == mended


def test_a_changed_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    opened(tmp_path)
    add(tmp_path, 2)
    with pytest.raises(UsageError, match=r"another config \(optim.lr 0.1 -> 0.2; seed \(not set\) -> 1\)"):
        opened(tmp_path, "optim: {lr: 0.2}\nsteps: 9\neval: {every: 2}\nseed: 1")
    assert (tmp_path / "config.yaml").read_text() == CONFIG


def test_changed_files_are_refused_by_the_key_that_names_them(tmp_path: Path) -> None:
    before = {"prompts.train": "a", "model": "b"}
    opened(tmp_path, inputs=before)
    assert opened(tmp_path, inputs={**before, "model": "c"}).checkpoint is None  # nothing was trained yet
    assert opened(tmp_path, inputs=before).checkpoint is None
    add(tmp_path, 2)
    assert opened(tmp_path, inputs=before).step == 2
    with pytest.raises(UsageError, match="the files of model are not those that"):
        opened(tmp_path, inputs={**before, "model": "c"})
    with pytest.raises(UsageError, match=r"the files of prompts\.train are not those that"):
        opened(tmp_path, inputs={**before, "prompts.train": "c"})


def test_a_change_that_cannot_matter_is_taken_over(tmp_path: Path) -> None:
    opened(tmp_path)
    add(tmp_path, 2)
    longer = "optim: {lr: 0.1}\nsteps: 9\neval: {every: 1, limit: 3}\n"
    opened(tmp_path, longer)
    assert (tmp_path / "config.yaml").read_text() == longer
    with pytest.raises(UsageError, match="steps 9 -> 5"):
        opened(tmp_path, CONFIG, harmless={"eval"})


def test_a_key_is_harmless_with_all_below_it_and_no_others() -> None:
    assert changes("eval: {a: 1}\nevaluate: 1", "eval: {a: 2}\nevaluate: 2", {"eval"}) == ["evaluate 1 -> 2"]
    assert changes("a: {b: 1}", "a: {}") == ["a.b 1 -> (not set)", "a (not set) -> {}"]
    assert changes("a: [1, 2]", "a: [1, 3]") == ["a [1, 2] -> [1, 3]"]
    assert changes("a: 1.0e-4", "a: 0.0001") == []
    assert "optim" not in HARMLESS


def test_starting_over_needs_force_and_removes_only_what_a_run_makes(tmp_path: Path) -> None:
    opened(tmp_path)
    add(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds a run; choose another out, or add --force"):
        opened(tmp_path, fresh=True)
    assert checkpoint.steps(tmp_path) == [2]
    assert opened(tmp_path, "other: 1", fresh=True, force=True).checkpoint is None
    assert {p.name for p in tmp_path.iterdir()} == {"config.yaml", "env.json", "notes.txt", ".lock"}


def test_fresh_is_no_trouble_where_nothing_is(tmp_path: Path) -> None:
    assert opened(tmp_path / "new", fresh=True).checkpoint is None


def test_a_folder_of_other_things_is_refused_without_force(tmp_path: Path) -> None:
    (tmp_path / "holiday.png").touch()
    with pytest.raises(UsageError, match="holds files that are no run"):
        opened(tmp_path)
    opened(tmp_path, force=True)
    assert (tmp_path / "holiday.png").exists()


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        opened(tmp_path / "file", force=True)


def test_resuming_an_older_checkpoint_deletes_the_newer_only_with_force(tmp_path: Path) -> None:
    opened(tmp_path)
    add(tmp_path, 2, 4, 6)
    older = checkpoint.path_of(tmp_path, 2)
    assert opened(tmp_path, resume=checkpoint.path_of(tmp_path, 6)).step == 6
    with pytest.raises(UsageError, match="has gone on to step 6; add --force to delete what came after 2"):
        opened(tmp_path, resume=older)
    assert opened(tmp_path, resume=older, force=True).checkpoint == older
    assert checkpoint.steps(tmp_path) == [2]


def test_another_runs_checkpoint_starts_a_new_folder_and_the_same_command_goes_on(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    opened(first)
    add(first, 4)
    source = checkpoint.path_of(first, 4)
    assert opened(second, resume=first).checkpoint == source  # a run folder means its newest
    assert opened(second, resume=source).checkpoint == source
    add(second, 6)
    assert opened(second, resume=source).step == 6
    assert checkpoint.steps(first) == [4]
    with pytest.raises(UsageError, match="another config"):
        opened(tmp_path / "third", "optim: {lr: 7}", resume=source)
    opened(tmp_path / "fourth")
    with pytest.raises(UsageError, match="holds a run of its own"):
        opened(tmp_path / "fourth", resume=source)


def test_a_resume_from_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no complete checkpoint is there"):
        opened(tmp_path / "new", resume=tmp_path / "none")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="contradict"):
        opened(tmp_path, resume=tmp_path, fresh=True)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from flowkit.runtime.folder import open_folder as o\n"
    code += "from flowkit.errors import UsageError\n"
    code += "try:\n with o(Path(sys.argv[1]), sys.argv[2]): print('opened')\nexcept UsageError as e: print(e)"

    def other() -> str:
        command = [sys.executable, "-c", code, str(tmp_path), CONFIG]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    import os

    with open_folder(tmp_path, CONFIG):
        assert f"is in use by process {os.getpid()};" in other()
    assert other() == "opened\n"


def test_a_disk_error_of_the_run_itself_is_not_renamed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of the run"), open_folder(tmp_path, CONFIG):
        raise OSError(28, "of the run")


def test_a_read_only_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"cannot use .*new: Read-only file system"):
        opened(tmp_path / "new")
