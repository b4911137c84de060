"""Pictures on disk: PNG with its recipe inside, the manifest beside them, the contact sheet."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowkit.errors import UsageError, UserError
from flowkit.runtime.files import disk_errors, write_bytes
from flowkit.types import Prompt

MANIFEST = "manifest.jsonl"
SHEET = "contact-sheet.png"  # beside the pictures, and none of them
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}  # what `read_png` opens
LABEL = 14  # pixels of a label under a picture of a contact sheet


@dataclass(frozen=True)
class Picture:
    """A picture file in memory: pixels [3, H, W] float32 in [0, 1], and the text chunks of a PNG."""

    pixels: Tensor  # [3, H, W]
    text: dict[str, str]


@dataclass(frozen=True)
class Row:
    """One line of a manifest: which file shows which prompt, from which seed.

    Attributes:
        file: name inside the manifest's folder.
        prompt: what was asked for.
        index: the prompt's index in its file.
        seed: the seed it was drawn from, None for a picture from elsewhere.
        target: what a reward should find, if the prompt file said it.
        meta: every other field.
        where: 'file:line' of a row that was read, for messages.
    """

    file: str
    prompt: str
    index: int
    seed: int | None
    target: str | None = None
    meta: dict[str, Any] = field(default_factory=dict, hash=False)
    where: str = ""

    def as_prompt(self) -> Prompt:
        """The prompt that the picture is judged by."""
        return Prompt(self.prompt, self.index, self.target, self.meta, self.where)


def picture_name(index: int, seed: int, ending: str = ".png") -> str:
    """The file name of a picture, or of a clip (.mp4): never made from the prompt.

    >>> picture_name(7, 42)
    '00007-42.png'
    """
    return f"{index:05d}-{seed}{ending}"


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; one that is there is no error, a disk that refuses is a UserError."""
    with disk_errors("make", folder):
        folder.mkdir(parents=True, exist_ok=True)


def to_bytes(pixels: Tensor) -> Tensor:
    """Pixels [..., 3, H, W] in [0, 1] as uint8, rounded and clipped; nan becomes 0. uint8 passes as it is."""
    if pixels.dtype == torch.uint8:
        return pixels.cpu()
    return (pixels.nan_to_num(0.0) * 255).round().clamp(0, 255).to(torch.uint8).cpu()


def save_png(path: Path, pixels: Tensor, text: Mapping[str, Any] | None = None) -> None:
    """Write pixels [3, H, W] (float in [0, 1], or uint8) as a PNG that is whole or absent.

    `text` becomes text chunks: a string as it is, anything else as JSON. UserError when the disk refuses.
    """
    from PIL import Image, PngImagePlugin

    chunks = PngImagePlugin.PngInfo()
    for key, value in (text or {}).items():
        chunks.add_itxt(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    buffer = io.BytesIO()
    Image.fromarray(to_bytes(pixels).permute(1, 2, 0).numpy()).save(buffer, format="PNG", pnginfo=chunks)
    write_bytes(path, buffer.getvalue())


def read_png(path: Path) -> Picture:
    """A PNG with its text chunks, or a JPEG or WebP without; UserError naming a file that is none of them."""
    from PIL import Image

    try:
        with Image.open(path, formats=sorted(set(FORMATS.values()))) as image:
            image.load()
            text = {key: str(value) for key, value in getattr(image, "text", {}).items()}
            data = image.convert("RGB").tobytes()
            width, height = image.size
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such picture") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow has no one type for a broken file: truncated is OSError, a bad chunk one of the others
        raise UserError(f"{path}: not a whole picture ({error}); make it again or take it out") from error
    pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(height, width, 3)
    return Picture(pixels.permute(2, 0, 1).float() / 255, text)


def contact_sheet(
    pictures: Sequence[Tensor] | Tensor, columns: int, labels: Sequence[str] | None = None, gap: int = 2
) -> Tensor:
    """Pictures [3, H, W] of one size in rows of `columns`, each over its label: uint8 [3, H', W'].

    Give the result to `save_png`. A picture that holds nan shows black there; a label is cut to its column.
    """
    from PIL import Image, ImageDraw, ImageFont

    if not len(pictures):
        raise ValueError("a contact sheet of no pictures")
    height, width = pictures[0].shape[-2:]
    below = LABEL if labels else 0
    columns = min(columns, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    step_x, step_y = width + gap, height + below + gap
    sheet = Image.new("RGB", (columns * step_x + gap, rows * step_y + gap), "white")
    font = ImageFont.load_default(10)
    for i, picture in enumerate(pictures):
        x, y = gap + i % columns * step_x, gap + i // columns * step_y
        sheet.paste(Image.fromarray(to_bytes(picture).permute(1, 2, 0).numpy()), (x, y))
        if labels:
            strip = Image.new("RGB", (width, LABEL), "white")
            ImageDraw.Draw(strip).text((1, 0), labels[i], fill="black", font=font)
            sheet.paste(strip, (x, y + height))
    data = torch.frombuffer(bytearray(sheet.tobytes()), dtype=torch.uint8)
    return data.reshape(sheet.height, sheet.width, 3).permute(2, 0, 1)


def append_row(folder: Path, row: Row) -> None:
    """Add a line to the folder's manifest, after its picture has been written."""
    line: dict[str, Any] = {"file": row.file, "prompt": row.prompt, "index": row.index, "seed": row.seed}
    line |= {} if row.target is None else {"target": row.target}
    line = row.meta | line  # a prompt file may have a field called seed; it says nothing of this picture
    path = folder / MANIFEST
    with disk_errors("write", path), path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> list[Row]:
    """The rows of a folder's manifest, in order; UsageError with the line for what is not a manifest."""
    path = folder / MANIFEST
    try:
        lines = path.read_text("utf-8-sig").split("\n")  # splitlines would also split at U+2028
    except FileNotFoundError as error:
        raise UsageError(f"{folder}: no {MANIFEST}; give the prompts of the pictures in a file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error
    rows = [_row(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UsageError(f"{path}: the manifest holds no picture")
    return rows


def _row(line: str, where: str) -> Row:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{where}: a line has to be an object with file, prompt and index")
    known: dict[str, Any] = {}
    for name, kind in (
        ("file", str),
        ("prompt", str),
        ("index", int),
        ("seed", int | None),
        ("target", str | None),
    ):
        value = fields.pop(name, None)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(
                f"{where}: {name!r} is {json.dumps(value)}, but a line needs file, prompt and index"
            )
        known[name] = value
    return Row(**known, meta=fields, where=where)
