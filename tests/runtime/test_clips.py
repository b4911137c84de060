from __future__ import annotations

import io
import json
import resource
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowkit.errors import UsageError, UserError
from flowkit.runtime.clips import read_media, read_mp4, read_text, save_mp4, save_sheet, thumbnail
from flowkit.runtime.media import contact_sheet, read_png, save_png


def smooth(frames: int = 9, height: int = 48, width: int = 64) -> torch.Tensor:
    """A clip [F, 3, H, W] whose red runs across, whose green runs down, and whose blue grows with time."""
    down, across = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    return torch.stack(
        [torch.stack([across, down, torch.full_like(down, f / frames)]) for f in range(frames)]
    )


def test_a_clip_keeps_its_frames_its_colours_and_its_text_to_the_letter(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.mp4"
    text = {"prompt": 'das “Größe” 字\n"x" = ; # \\ \\n', "flowkit": {"steps": 6, "schedule": None}}
    save_mp4(path, smooth(), text)
    pixels = read_mp4(path)
    assert pixels.shape == (9, 3, 48, 64)
    assert pixels.dtype == torch.float32
    # chroma has half the resolution, and 8 bits of YUV are 7 of RGB; the quality factor adds a level or two
    assert (pixels - smooth()).abs().mean() < 3 / 255
    assert (pixels - smooth()).abs().max() < 16 / 255
    assert read_text(path) == text
    assert [p.name for p in path.parent.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize("colour", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0.5, 0.5, 0.5), (0, 0, 0)])
def test_a_flat_colour_comes_back_to_two_levels(colour: tuple[float, ...], tmp_path: Path) -> None:
    pixels = torch.tensor(colour, dtype=torch.float32).view(1, 3, 1, 1).expand(3, 3, 32, 32)
    save_mp4(tmp_path / "a.mp4", pixels)
    assert (read_mp4(tmp_path / "a.mp4") - pixels).abs().max() <= 2 / 255 + 1e-6


def test_any_player_opens_it(tmp_path: Path) -> None:
    from imageio_ffmpeg import get_ffmpeg_exe

    save_mp4(tmp_path / "a.mp4", smooth(), fps=8)
    command = [get_ffmpeg_exe(), "-hide_banner", "-i", str(tmp_path / "a.mp4")]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "h264" in said
    assert "yuv420p(tv, bt709" in said
    assert "8 fps" in said
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")  # it plays while it is loaded


def test_a_clip_of_odd_sides_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a clip of 31x32 cannot be an MP4"):
        save_mp4(tmp_path / "a.mp4", smooth(2, 32, 31))
    assert list(tmp_path.iterdir()) == []


def cuts(data: bytes) -> dict[str, bytes]:
    """A clip's bytes, broken."""
    # the size of the second frame, behind that of the first in the table of sizes: a cut between two frames
    table = data.index(b"stsz") + 12
    begin = data.index(b"mdat") + 4
    first = int.from_bytes(data[table + 4 : table + 8], "big")
    return {
        "empty": b"",
        "head": data[:10],
        "no index": data[:100],
        "half": data[: len(data) // 2],
        "last byte": data[:-1],
        "one frame": data[: begin + first],
        "lfs": b"version https://git-lfs.github.com/spec/v1\n",
        "html": b"<!DOCTYPE html><html></html>" * 20,
        "zeros": bytes(64),
    }


@pytest.mark.parametrize(
    "cut",
    [
        "empty",
        "head",
        "no index",
        "half",
        "last byte",
        "one frame",
        "lfs",
        "html",
        "zeros",
        "missing",
    ],
)
def test_a_broken_clip_is_named(cut: str, tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    save_mp4(path, smooth())
    if cut == "missing":
        path.unlink()
    else:
        path.write_bytes(cuts(path.read_bytes())[cut])
    with pytest.raises(UserError, match=r"a\.mp4: (not a whole clip \(.+\)|no such clip)"):
        read_mp4(path)


def test_a_name_that_looks_like_an_option_or_an_address_is_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-y.mp4", "concat:a.mp4"):
        save_mp4(Path(name), smooth(2))
        assert len(read_mp4(Path(name))) == 2


def test_a_clip_without_our_comment_has_no_text(tmp_path: Path) -> None:
    from imageio_ffmpeg import get_ffmpeg_exe

    save_mp4(tmp_path / "a.mp4", smooth(2))
    assert read_text(tmp_path / "a.mp4") == {}
    comment = ["-metadata", "comment=a holiday", "-c", "copy", str(tmp_path / "b.mp4")]
    command = [get_ffmpeg_exe(), "-v", "error", "-i", str(tmp_path / "a.mp4"), *comment]
    subprocess.run(command, check=True)
    assert read_text(tmp_path / "b.mp4") == {}


def test_a_full_disk_is_said_in_a_sentence_and_leaves_no_part_of_a_clip(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # a write past 10 bytes fails, as on a full disk
    try:
        with pytest.raises(UserError, match=r"a\.mp4"):
            save_mp4(tmp_path / "a.mp4", smooth(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_clips_of_one_frame(tmp_path: Path) -> None:
    save_png(tmp_path / "a.png", smooth(1)[0])
    save_mp4(tmp_path / "a.mp4", smooth(5))
    assert read_media(tmp_path / "a.png").shape == (1, 3, 48, 64)
    assert read_media(tmp_path / "a.mp4").shape == (5, 3, 48, 64)


def test_a_sheet_of_clips_moves_and_shows_every_frame_at_its_place(tmp_path: Path) -> None:
    clips = [smooth(3), 1 - smooth(3), smooth(3)]
    save_sheet(tmp_path / "a.png", clips, 2, ["a", "b", "c"], {"step": 3}, fps=8)
    with Image.open(tmp_path / "a.png") as sheet:
        assert (sheet.n_frames, sheet.info["duration"], sheet.info["loop"]) == (3, 125, 0)
        assert json.loads(sheet.text["step"]) == 3
        for f in range(3):
            sheet.seek(f)
            buffer = io.BytesIO()
            sheet.convert("RGB").save(buffer, "PNG")
            (tmp_path / "frame.png").write_bytes(buffer.getvalue())
            shown = (read_png(tmp_path / "frame.png").pixels * 255).round().byte()
            assert torch.equal(shown, contact_sheet([clip[f] for clip in clips], 2, ["a", "b", "c"]))


def test_a_sheet_of_pictures_is_the_still_one(tmp_path: Path) -> None:
    save_sheet(tmp_path / "a.png", [smooth(1), 1 - smooth(1)], 2)
    save_png(tmp_path / "b.png", contact_sheet([smooth(1)[0], 1 - smooth(1)[0]], 2))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_thumbnail_keeps_the_shape_and_the_mean_of_a_clip_and_pictures_as_they_are() -> None:
    clip = smooth(2, 192, 384)
    small = thumbnail(clip)
    assert small.shape == (2, 3, 96, 192)
    torch.testing.assert_close(small.mean((2, 3)), clip.mean((2, 3)), rtol=0, atol=1e-5)
    assert thumbnail(clip[:1]).shape == (1, 3, 192, 384)
    assert torch.equal(thumbnail(smooth()), smooth())
