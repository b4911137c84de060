"""Clips on disk: MP4 with its recipe inside, and contact sheets that move.

ffmpeg comes with the package imageio-ffmpeg; the clip goes through its pipes as raw frames.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowkit.errors import UsageError, UserError
from flowkit.runtime.files import disk_errors, write_bytes
from flowkit.runtime.media import contact_sheet, read_png, save_png, to_bytes

MP4 = ".mp4"
FPS = 16  # frames a second; what Wan was trained on
QUALITY = 12  # x264's constant rate factor: 0 keeps everything, 18 is called visually lossless
THUMBNAIL = 192  # pixels of the longer side of a clip on a contact sheet
# RGB is converted by BT.709 and the file says so: untagged, players guess by the size and colours shift
_MEND = "make it again or take it out"
_COLOURS = ["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"]


def save_mp4(path: Path, pixels: Tensor, text: Mapping[str, Any] | None = None, fps: int = FPS) -> None:
    """Write a clip [F, 3, H, W] (float in [0, 1], or uint8) as H.264 in yuv420p, whole or absent.

    `text` becomes the container's comment, as one JSON object. UsageError for an odd width or height, which
    yuv420p does not have; UserError when the disk or ffmpeg refuses.
    """
    data = to_bytes(pixels).permute(0, 2, 3, 1).contiguous().numpy()
    height, width = data.shape[1:3]
    if height % 2 or width % 2:
        raise UsageError(
            f"{path}: a clip of {width}x{height} cannot be an MP4, whose sides are even; use an even size"
        )
    comment = json.dumps(dict(text or {}), ensure_ascii=False)
    with disk_errors("write", path), tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / "clip.mp4"  # mp4 goes back to its beginning at the end: it needs a real file
        _ffmpeg(
            f"{path}: the clip cannot be encoded",
            "free some space or use another size",
            *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"),
            *("-vf", "scale=out_color_matrix=bt709:out_range=tv:flags=accurate_rnd+full_chroma_int"),
            *("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(QUALITY), *_COLOURS),
            *("-metadata", f"comment={comment}", "-movflags", "+faststart", str(partial)),
            given=data.tobytes(),
        )
        content = partial.read_bytes()
    write_bytes(path, content)


def read_mp4(path: Path) -> Tensor:
    """The frames of a clip: [F, 3, H, W] float32 in [0, 1].

    UserError naming a file that is missing, no clip, or not whole: any complaint of the decoder counts.
    """
    frames_as_ppm = ["-map", "0:v:0", "-fps_mode", "passthrough", "-c:v", "ppm", "-f", "image2pipe", "-"]
    raw = _ffmpeg(f"{path}: not a whole clip", _MEND, "-i", _url(path), *frames_as_ppm)
    head = re.match(rb"P6\n(\d+) (\d+)\n255\n", raw)
    if head is None:
        raise UserError(f"{path}: not a whole clip (no frame in it); {_MEND}")
    width, height = int(head[1]), int(head[2])
    frames = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, head.end() + width * height * 3)
    pixels = frames[:, head.end() :].reshape(-1, height, width, 3)
    return pixels.permute(0, 3, 1, 2).float() / 255


def read_text(path: Path) -> dict[str, Any]:
    """What `save_mp4` was given as `text`; empty for a clip without it. UserError for a file that is no clip."""
    command = ("-i", _url(path), "-f", "ffmetadata", "-")
    listing = _ffmpeg(f"{path}: not a whole clip", _MEND, *command).decode()
    found = re.search(r"^comment=((?:[^\\\n]|\\[\s\S])*)$", listing, re.MULTILINE)
    try:
        text = json.loads(re.sub(r"\\([\s\S])", r"\1", found[1])) if found else {}
    except ValueError:
        return {}  # somebody else's comment
    return text if isinstance(text, dict) else {}


def read_media(path: Path) -> Tensor:
    """The frames [F, 3, H, W] float32 of a clip, or of a picture as a clip of one frame."""
    return read_mp4(path) if path.suffix.lower() == MP4 else read_png(path).pixels[None]


def thumbnail(clip: Tensor) -> Tensor:
    """A clip [F, 3, H, W] no larger than a contact sheet shows it; one frame stays as it is."""
    longest = max(clip.shape[-2:])
    if len(clip) == 1 or longest <= THUMBNAIL:
        return clip
    height, width = (max(1, round(side * THUMBNAIL / longest)) for side in clip.shape[-2:])
    return torch.nn.functional.interpolate(clip, (height, width), mode="area")


def save_sheet(
    path: Path,
    clips: Sequence[Tensor],
    columns: int,
    labels: Sequence[str] | None = None,
    text: Mapping[str, Any] | None = None,
    fps: int = FPS,
) -> None:
    """Write clips [F, 3, H, W] of one size as a contact sheet: a PNG, and an animated one where F > 1.

    Args:
        path: ends in .png either way; what cannot show an animated PNG shows its first frame.
        clips: pictures are clips of one frame.
        columns: clips in a row.
        labels: under each clip.
        text: as in `save_png`.
        fps: frames a second.
    """
    from PIL import Image, PngImagePlugin

    sheets = [contact_sheet(list(frames), columns, labels) for frames in zip(*clips, strict=True)]
    if len(sheets) == 1:
        save_png(path, sheets[0], text)
        return
    chunks = PngImagePlugin.PngInfo()
    for key, value in (text or {}).items():
        chunks.add_itxt(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    first, *others = [Image.fromarray(sheet.permute(1, 2, 0).contiguous().numpy()) for sheet in sheets]
    buffer = io.BytesIO()
    first.save(
        buffer,
        format="PNG",
        save_all=True,
        append_images=others,
        duration=1000 / fps,
        loop=0,
        pnginfo=chunks,
    )
    write_bytes(path, buffer.getvalue())


def _url(path: Path) -> str:
    """A path that ffmpeg takes for a file whatever its name; UserError where there is none, or a cut one.

    ffmpeg itself takes a file that was cut between two frames for a shorter clip.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such clip")
    at, end = 0, path.stat().st_size
    with disk_errors("read", path), path.open("rb") as handle:
        while at < end:  # a list of boxes, each begins with its length (0: to the end; 1: a long one follows)
            handle.seek(at)
            head = handle.read(16)
            length = int.from_bytes(head[:4], "big")
            length = int.from_bytes(head[8:], "big") if length == 1 else length or end - at
            if length < 8:
                break  # no box; ffmpeg says what it is
            at += length
            if at > end:
                raise UserError(f"{path}: not a whole clip ({at - end} bytes are missing); {_MEND}")
    return f"file:{path}"


def _ffmpeg(what: str, mend: str, *arguments: str, given: bytes = b"") -> bytes:
    """What ffmpeg writes to its output; UserError with its first complaint, if it has any, and how to mend it."""
    from imageio_ffmpeg import get_ffmpeg_exe

    try:
        command = [get_ffmpeg_exe(), "-y", "-hide_banner", "-v", "error", *arguments]
    except RuntimeError as error:
        raise UserError(f"{what}: no ffmpeg is found ({error}); pip install imageio-ffmpeg") from error
    done = subprocess.run(command, input=given, capture_output=True, check=False)
    complaint = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode or complaint:
        reason = re.sub(r"^\[[^]]*\]\s*", "", complaint[0]) if complaint else f"ffmpeg: {done.returncode}"
        raise UserError(f"{what} ({reason.rstrip('.')}); {mend}")
    return done.stdout
