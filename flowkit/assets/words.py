"""The world of tiny-flux: a word in a picture, and the sentence that asks for it.

A prompt names the word and may name the ink, the ground and the font; what it leaves open is drawn at random, and
so is the cell that the word begins in. The conditional distribution therefore has many modes, which is what makes
few-step sampling hard (a mean over cells shows every letter over every other) and diversity measurable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.random import Generator
    from PIL.ImageFont import FreeTypeFont

WIDTH, HEIGHT = 96, 32
CELL = 16
CELLS = 5  # a word begins in any cell that leaves it room
X, Y = (2, 3, 4), (-1, 0, 1)  # pixels from a cell's edge, and below the middle line
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
INKS: dict[str, tuple[int, int, int]] = {
    "black": (16, 16, 16),
    "white": (245, 245, 245),
    "red": (200, 30, 30),
    "green": (20, 120, 50),
    "blue": (30, 60, 200),
    "gold": (240, 180, 30),
}
GROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (240, 240, 240),
    "black": (20, 20, 20),
    "pink": (250, 195, 205),
    "navy": (20, 25, 80),
    "mint": (180, 235, 205),
}
FONTS: dict[str, tuple[str, float, float]] = {  # name: file in matplotlib's font folder, size, extra stroke
    "sans": ("DejaVuSansMono-Bold.ttf", 26, 0.0),
    "slab": ("cmtt10.ttf", 30, 0.6),
}
PAIRS: tuple[tuple[str, str], ...] = tuple(  # (ink, ground) that a person can read
    (ink, ground)
    for ink, a in INKS.items()
    for ground, b in GROUNDS.items()
    if abs(np.dot((0.299, 0.587, 0.114), np.subtract(a, b))) >= 60
)


@dataclass(frozen=True)
class Sign:
    """One picture of the world, described in full: the word begins in `cell`, moved by x and y pixels."""

    word: str
    ink: str
    ground: str
    font: str
    cell: int = 0
    x: int = 3
    y: int = 0


def draw_word(rng: Generator) -> str:
    """A word of 2 to 5 letters, each letter uniform."""
    return "".join(rng.choice(list(LETTERS), size=rng.integers(2, 6)))


def draw_sign(rng: Generator, word: str | None = None) -> Sign:
    """One picture of the data distribution."""
    ink, ground = PAIRS[rng.integers(len(PAIRS))]
    font = list(FONTS)[rng.integers(len(FONTS))]
    word = word or draw_word(rng)
    cell = int(rng.integers(CELLS - len(word) + 1))
    return Sign(word, ink, ground, font, cell, int(rng.choice(X)), int(rng.choice(Y)))


def prompt_of(sign: Sign, *, ink: bool, ground: bool, font: bool) -> str:
    """The sentence that asks for the sign, naming what it is told to name.

    >>> prompt_of(Sign("CAT", "red", "white", "slab"), ink=True, ground=False, font=True)
    'the word "CAT" in red, slab'
    """
    return (
        f'the word "{sign.word}"'
        + (f" in {sign.ink}" if ink else "")
        + (f" on {sign.ground}" if ground else "")
        + (f", {sign.font}" if font else "")
    )


def draw_prompt(rng: Generator, sign: Sign) -> str:
    """The sentence for a sign with each attribute named half of the time."""
    ink, ground, font = rng.random(3) < 0.5
    return prompt_of(sign, ink=ink, ground=ground, font=font)


@lru_cache
def _font(name: str) -> FreeTypeFont:
    import matplotlib
    from PIL import ImageFont

    file, size, _ = FONTS[name]
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / file), size)


def render(sign: Sign) -> np.ndarray:
    """Draw the sign: uint8 [32, 96, 3], every letter centred in a 16-pixel cell."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (WIDTH, HEIGHT), GROUNDS[sign.ground])
    pen = ImageDraw.Draw(picture)
    for i, letter in enumerate(sign.word):
        pen.text(
            (sign.x + CELL * (sign.cell + i + 0.5), HEIGHT / 2 + 10 + sign.y),
            letter,
            fill=INKS[sign.ink],
            font=_font(sign.font),
            anchor="ms",
            stroke_width=FONTS[sign.font][2],
        )
    return np.asarray(picture)
