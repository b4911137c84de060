from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowkit.cli.app import main
from flowkit.config import presets


def test_ls_names_every_preset_with_its_verb_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == presets.names()
    assert lines[presets.names().index("tiny-ocr")].split()[1:3] == ["grpo", "builtin:tiny-flux"]


def test_ls_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "ls", "--json"]) == 0
    said = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(said.out)}
    assert rows["flux-ocr"]["verb"] == "grpo"
    assert rows["flux-ocr"]["model"] == "black-forest-labs/FLUX.1-dev"
    assert Path(rows["flux-ocr"]["file"]).is_file()
    assert said.err == ""


def test_show_prints_the_file_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "show", "tiny-ocr"]) == 0
    assert capsys.readouterr().out == presets.find("tiny-ocr").read_text(encoding="utf-8")


def test_cp_copies_says_where_and_refuses_to_clobber(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "mine.yaml"
    assert main(["presets", "cp", "tiny-ocr", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    target.write_text("mine")
    assert main(["presets", "cp", "tiny-ocr", str(target)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["presets", "cp", "tiny-ocr", str(target), "--force"]) == 0
    assert target.read_bytes() == presets.find("tiny-ocr").read_bytes()


@pytest.mark.parametrize("verb", [["show"], ["cp"]])
def test_an_unknown_preset_exits_2_with_the_closest_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    extra = [str(tmp_path / "x.yaml")] if verb == ["cp"] else []
    assert main(["presets", *verb, "tinyocr", *extra]) == 2
    assert capsys.readouterr().err == "Error: there is no preset 'tinyocr'; did you mean 'tiny-ocr'?\n"
