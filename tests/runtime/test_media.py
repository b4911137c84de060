from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowkit.errors import UsageError, UserError
from flowkit.runtime.media import (
    LABEL,
    Row,
    append_row,
    contact_sheet,
    make_folder,
    picture_name,
    read_manifest,
    read_png,
    save_png,
)

PIXELS = torch.rand(3, 6, 10, generator=torch.Generator().manual_seed(0))


def test_a_png_keeps_its_pixels_to_half_a_level_and_its_text_to_the_letter(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.png"
    text = {"prompt": 'das Wort “Größe” 字\n"x"', "flowkit": {"steps": 6, "schedule": None}}
    save_png(path, PIXELS, text)
    picture = read_png(path)
    torch.testing.assert_close(picture.pixels, PIXELS, rtol=0, atol=0.5 / 255 + 1e-6)
    assert picture.text["prompt"] == text["prompt"]
    assert json.loads(picture.text["flowkit"]) == text["flowkit"]
    assert [p.name for p in path.parent.iterdir()] == ["a.png"]


def test_what_was_read_and_written_again_is_the_same_picture(tmp_path: Path) -> None:
    save_png(tmp_path / "a.png", PIXELS)
    first = read_png(tmp_path / "a.png").pixels
    save_png(tmp_path / "b.png", first)
    assert torch.equal(read_png(tmp_path / "b.png").pixels, first)


def test_values_out_of_range_are_clipped_and_nan_is_black(tmp_path: Path) -> None:
    pixels = torch.tensor([-1.0, 2.0, float("nan")]).repeat(3, 1, 1)
    save_png(tmp_path / "a.png", pixels)
    assert read_png(tmp_path / "a.png").pixels[0].tolist() == [[0.0, 1.0, 0.0]]


def test_jpeg_and_grey_pictures_are_read_as_rgb_too(tmp_path: Path) -> None:
    Image.new("L", (4, 2), 128).save(tmp_path / "a.jpg")
    assert read_png(tmp_path / "a.jpg").pixels.shape == (3, 2, 4)


@pytest.mark.parametrize("cut", ["empty", "truncated", "text", "flipped", "missing"])
def test_a_broken_picture_is_named(cut: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    save_png(path, torch.rand(3, 64, 64))
    data = path.read_bytes()
    broken = {
        "empty": b"",
        "truncated": data[: len(data) // 2],
        "text": b"version https://git-lfs.github.com/spec/v1\n",
        "flipped": data[:60] + bytes(b ^ 255 for b in data[60:90]) + data[90:],
    }
    path.write_bytes(broken[cut]) if cut in broken else path.unlink()
    with pytest.raises(UserError, match=r"a\.png: (not a whole picture|no such picture)"):
        read_png(path)


def test_a_full_disk_is_said_in_a_sentence_and_leaves_no_part_of_a_picture(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # a write past 10 bytes fails, as on a full disk
    try:
        with pytest.raises(UserError, match=r"cannot write .*a\.png"):
            save_png(tmp_path / "a.png", PIXELS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*a\.png"):
        save_png(tmp_path / "file" / "a.png", PIXELS)
    with pytest.raises(UserError, match=r"cannot write .*manifest\.jsonl"):
        append_row(tmp_path / "file", Row("a.png", "p", 0, 0))
    with pytest.raises(UserError, match=r"cannot make .*deep"):
        make_folder(tmp_path / "file" / "deep")


def test_a_contact_sheet_holds_every_picture_in_rows_over_its_label() -> None:
    pictures = [torch.full((3, 8, 30), value) for value in (0.2, 0.4, 0.6)]
    sheet = contact_sheet(pictures, columns=2, labels=["a", "b", "a long label that has to be cut"], gap=2)
    height, width = 8 + LABEL + 2, 30 + 2
    assert sheet.shape == (3, 2 * height + 2, 2 * width + 2)
    for i, value in enumerate((0.2, 0.4, 0.6)):
        y, x = 2 + i // 2 * height, 2 + i % 2 * width
        assert (sheet[:, y : y + 8, x : x + 30] == round(value * 255)).all()
        assert (sheet[:, y + 8 : y + 8 + LABEL, x : x + 30] < 128).any()  # ink of the label
    last = sheet[:, 2 + height + 8 :, 2 + 30 :]
    assert (last == 255).all()  # the long label stays in its column


def test_a_contact_sheet_of_fewer_pictures_than_columns_is_one_row_and_plain_without_labels() -> None:
    assert contact_sheet(torch.rand(2, 3, 4, 6), columns=8, gap=0).shape == (3, 4, 12)


def test_a_field_of_the_prompt_file_never_hides_what_the_row_says(tmp_path: Path) -> None:
    append_row(tmp_path, Row("a.png", "p", 3, 1, meta={"seed": 9, "file": "b.png", "tag": "x"}))
    (row,) = read_manifest(tmp_path)
    assert (row.file, row.seed, row.meta) == ("a.png", 1, {"tag": "x"})


def test_names_come_from_index_and_seed() -> None:
    assert picture_name(123456, 2**40) == "123456-1099511627776.png"


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        Row("00000-1.png", 'the “word”\u2028"字"', 0, 1, meta={"steps": 6}),
        Row("00001-1.png", "b", 1, None, target="B"),
    ]
    for row in rows:
        append_row(tmp_path, row)
    read = read_manifest(tmp_path)
    assert [(r.file, r.prompt, r.index, r.seed, r.target, r.meta) for r in read] == [
        (r.file, r.prompt, r.index, r.seed, r.target, r.meta) for r in rows
    ]
    assert read[1].where == f"{tmp_path / 'manifest.jsonl'}:2"
    assert read[1].as_prompt().target == "B"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no picture"),
        ("\n{", r"manifest\.jsonl:2: not JSON"),
        ("[1]", r"manifest\.jsonl:1: a line has to be an object"),
        ('{"file": "a.png", "prompt": "p"}', r"manifest\.jsonl:1: 'index' is null"),
        ('{"file": "a.png", "prompt": 3, "index": 0}', r"manifest\.jsonl:1: 'prompt' is 3"),
        ('{"file": "a.png", "prompt": "p", "index": true}', r"manifest\.jsonl:1: 'index' is true"),
    ],
)
def test_what_is_no_manifest_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_manifest(tmp_path)


def test_a_missing_or_garbled_manifest_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no manifest\.jsonl"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        read_manifest(tmp_path)
