from __future__ import annotations

import json
import math
import re
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from flowkit.assets.words import Sign, render
from flowkit.cli.reward import command, parse, plain
from flowkit.errors import UsageError, UserError
from flowkit.runtime.media import SHEET, Row, append_row, picture_name, save_png
from flowkit.score import score_folder

FAULTY = "tests.rewards.faulty:"


def word(text: str) -> torch.Tensor:
    return torch.from_numpy(render(Sign(text, "black", "white", "sans")).copy()).permute(2, 0, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures of words; the last one shows another word than was asked for."""
    for i, (shown, asked) in enumerate([("CAT", "CAT"), ("HORSE", "HORSE"), ("DOT", "DOG")]):
        row = Row(picture_name(i, 7), f'the word "{asked}"', i, 7)
        save_png(tmp_path / row.file, word(shown))
        append_row(tmp_path, row)
    return tmp_path


def run(*args: str | Path) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [*map(str, args)])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_is_scored_into_a_table_and_a_file_with_what_was_read(folder: Path) -> None:
    result = run(folder, "--reward", "ocr", "--reward", "jpeg=0.1", "--workers", "0")
    assert result.exit_code == 0, result.output
    table = [line.split() for line in result.stdout.splitlines()]
    assert table[0] == ["reward", "weight", "mean", "std", "nan", "exact"]
    mean = (1 + 1 + 2 / 3) / 3
    std = math.sqrt(((1 - mean) ** 2 * 2 + (2 / 3 - mean) ** 2) / 3)
    assert table[1] == ["ocr", "1", f"{mean:.4f}", f"{std:.4f}", "0", "0.6667"]
    assert [row[0] for row in table[2:4]] == ["jpeg", "total"]
    assert table[4][:2] == ["3", "pictures;"]
    written = lines(folder / "scores.jsonl")
    assert [row["rewards"]["ocr"]["read"] for row in written] == ["CAT", "HORSE", "DOT"]
    assert written[2]["file"] == "00002-7.png"
    assert (written[2]["index"], written[2]["seed"], written[2]["prompt"]) == (2, 7, 'the word "DOG"')
    ocr, jpeg = (written[2]["rewards"][name]["score"] for name in ("ocr", "jpeg"))
    assert ocr == pytest.approx(2 / 3, abs=1e-6)
    assert written[2]["total"] == pytest.approx(ocr + 0.1 * jpeg, abs=1e-6)


def test_json_is_one_document_on_stdout_and_nothing_else(folder: Path) -> None:
    result = run(folder, "--reward", "ocr", "--json", "--workers", "0")
    document = json.loads(result.stdout)
    assert document["pictures"] == 3
    assert document["rewards"]["ocr"]["exact"] == pytest.approx(2 / 3)
    assert document["weights"] == {"ocr": 1.0}


def test_a_worker_process_gives_the_scores_of_this_one(folder: Path, tmp_path: Path) -> None:
    one = score_folder(folder, {"jpeg": 1.0}, workers=0, out=tmp_path / "a.jsonl", batch=2)
    other = score_folder(folder, {"jpeg": 1.0}, workers=1, out=tmp_path / "b.jsonl", batch=2)
    assert one.rewards == other.rewards
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_scores_are_not_overwritten_without_force(folder: Path) -> None:
    args = (folder, "--reward", "jpeg", "--workers", "0")
    assert run(*args).exit_code == 0
    before = (folder / "scores.jsonl").read_bytes()
    again = run(*args)
    assert isinstance(again.exception, UsageError)
    assert "--force" in str(again.exception)
    assert run(*args, "--force").exit_code == 0
    assert (folder / "scores.jsonl").read_bytes() == before


def test_pictures_without_a_manifest_are_matched_to_a_prompt_file_in_the_order_of_their_numbers(
    tmp_path: Path,
) -> None:
    for name, text in (("2.png", "CAT"), ("10.png", "DOG"), (SHEET, "SHEET")):
        save_png(tmp_path / name, word(text))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a cat", "target": "cat"}\n{"prompt": "the word \\"DOG\\""}\n')
    report = score_folder(tmp_path, {"ocr": 1.0}, prompts=prompts, workers=0)
    assert report.rewards["ocr"].exact == 1.0
    assert [(row["file"], row["seed"]) for row in lines(tmp_path / "scores.jsonl")] == [
        ("2.png", None),
        ("10.png", None),
    ]


def test_pictures_of_several_sizes_keep_their_order(tmp_path: Path) -> None:
    for i, size in enumerate((8, 8, 16, 8)):
        save_png(tmp_path / f"{i}.png", torch.rand(3, size, size))
    (tmp_path / "p.txt").write_text("a\nb\nc\nd\n")
    report = score_folder(tmp_path, {FAULTY + "numbers": 1.0}, prompts=tmp_path / "p.txt", workers=0, batch=2)
    assert report.pictures == 4
    assert [row["total"] for row in lines(tmp_path / "scores.jsonl")] == [0.0, 1.0, 2.0, 3.0]


def test_too_many_pictures_without_a_score_fail_after_the_table_is_shown(folder: Path) -> None:
    save_png(folder / "00001-7.png", torch.zeros(3, 32, 96))
    args = (folder, "--reward", FAULTY + "redness", "--workers", "0")
    result = run(*args)
    assert isinstance(result.exception, UserError)
    assert result.exception.code == 1
    assert "1 of 3 pictures could not be scored" in str(result.exception)
    assert "black" in str(result.exception)
    assert "3 pictures, 0 failed, 1 black or nan" in result.stdout
    assert [row["total"] is None for row in lines(folder / "scores.jsonl")] == [False, True, False]
    assert run(*args, "--force", "--max-failed", "0.5").exit_code == 0


def test_when_nothing_could_be_scored_the_figures_are_dashes_and_json_nulls(folder: Path) -> None:
    for i in range(3):
        save_png(folder / picture_name(i, 7), torch.zeros(3, 32, 96))
    report = score_folder(folder, {"jpeg": 1.0}, workers=0)
    assert report.rewards["jpeg"].mean is None
    assert plain(report).splitlines()[1].split() == ["jpeg", "1", "-", "-", "3", "-"]
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no folder", "no such folder"),
        ("empty", "holds no pictures"),
        ("no manifest", r"no manifest\.jsonl; give the prompts of its pictures with --prompts"),
        ("count", r"holds 1 pictures, but .*p\.txt 2 prompts"),
        ("both", "leave out --prompts"),
        ("unknown", r"did you mean 'ocr'\?"),
        ("no target", r"1 of 1 prompts have no text .*\(.*manifest\.jsonl:1\)"),
        ("twice", "stands twice"),
        ("weight", "write NAME or NAME=WEIGHT"),
        ("broken prompts", r"p\.txt"),
    ],
)
def test_what_cannot_be_scored_is_a_usage_error_and_nothing_is_written(
    case: str, said: str, tmp_path: Path
) -> None:
    rewards, folder, prompts = ["ocr"], tmp_path, tmp_path / "p.txt"
    prompts.write_text('"CAT"\n"DOG"\n')
    if case != "empty":
        save_png(tmp_path / "a.png", word("CAT"))
    if case in ("both", "no target", "unknown"):
        append_row(tmp_path, Row("a.png", "no words", 0, 0))
    if case == "no folder":
        folder = tmp_path / "nowhere"
    if case == "broken prompts":
        prompts.write_bytes(b"\xff\xfe\x00\n")
    rewards = {"unknown": ["orc"], "twice": ["ocr", "ocr=2"], "weight": ["ocr=much"]}.get(case, rewards)
    given = ["--prompts", prompts] if case in ("count", "both", "broken prompts") else []
    flags = [part for name in rewards for part in ("--reward", name)]
    result = run(folder, *flags, *given, "--workers", "0")
    assert isinstance(result.exception, UsageError), result.output
    assert re.search(said, str(result.exception))
    assert not list(tmp_path.glob("*scores*"))


def test_a_reward_has_to_be_named(folder: Path) -> None:
    assert run(folder).exit_code == 2


def test_a_broken_picture_is_named_and_leaves_no_scores(folder: Path) -> None:
    (folder / "00001-7.png").write_bytes(b"\x89PNG\r\n")
    result = run(folder, "--reward", "jpeg", "--workers", "0")
    assert isinstance(result.exception, UserError)
    assert "00001-7.png" in str(result.exception)
    assert not list(folder.glob("*scores*"))


def test_a_full_disk_is_said_and_leaves_no_part_of_the_scores(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*scores\.jsonl"):
            score_folder(folder, {"jpeg": 1.0}, workers=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(folder.glob("*scores*"))


def test_a_terminal_gets_the_same_figures_from_rich(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = score_folder(folder, {"jpeg": 1.0}, workers=0)
    monkeypatch.setattr("flowkit.score.score_folder", lambda *args, **kwargs: report)

    class Terminal:
        """Standard output that says it is a terminal."""

        def __init__(self) -> None:
            self.text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    command(folder, ["jpeg"])
    assert f"{report.rewards['jpeg'].mean:.4f}" in terminal.text
    assert "3 pictures" in terminal.text
    assert "─" in terminal.text


def test_weights_are_typed_behind_the_name() -> None:
    assert parse(["my_pkg.mod:fn=-2", "ocr"]) == {"my_pkg.mod:fn": -2.0, "ocr": 1.0}
