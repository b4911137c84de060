"""The world of tiny-wan: one small thing that moves, drawn from a description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
WIDTH, HEIGHT, FRAMES, FPS = 32, 32, 9, 8
# half the width and half the height in sizes: all have the area of a square of half a side of 1
SHAPES: dict[str, tuple[float, float]] = {"square": (1.0, 1.0), "bar": (1.5, 1 / 1.5), "pole": (1 / 1.5, 1.5)}
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (232, 48, 40),
    "green": (56, 196, 72),
    "blue": (64, 104, 248),
    "yellow": (244, 216, 56),
    "magenta": (224, 72, 216),
    "cyan": (64, 216, 224),
}
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
GROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (10, 10, 10),
    "grey": (96, 96, 96),
    "navy": (16, 20, 80),
    "brown": (84, 52, 24),
}
SIZES = (4.2, 6.0)  # half a side of the square of the same area, pixels
SPEEDS = (0.7, 1.5)  # pixels a frame


@dataclass(frozen=True)
class Scene:
    """One clip: what moves, where from (centre, pixels), how large (see `SIZES`), how fast, before what."""

    shape: str
    colour: str
    direction: str
    x: float
    y: float
    size: float
    speed: float
    ground: str


def draw_scene(rng: np.random.Generator) -> Scene:
    """Draw a scene; the thing stays within the frame for the whole clip."""
    direction, shape = str(rng.choice(list(DIRECTIONS))), str(rng.choice(list(SHAPES)))
    size, speed = float(rng.uniform(*SIZES)), float(rng.uniform(*SPEEDS))
    places = []
    for step, extent, share in zip(DIRECTIONS[direction], (WIDTH, HEIGHT), SHAPES[shape], strict=True):
        travel, half = step * speed * (FRAMES - 1), share * size
        places.append(float(rng.uniform(half + max(0.0, -travel), extent - half - max(0.0, travel))))
    return Scene(
        shape=shape,
        colour=str(rng.choice(list(COLOURS))),
        direction=direction,
        x=places[0],
        y=places[1],
        size=size,
        speed=speed,
        ground=str(rng.choice(list(GROUNDS))),
    )


def render(scenes: Sequence[Scene]) -> NDArray[np.uint8]:
    """Clips [N, F, H, W, 3], the edges of the things antialiased."""
    frame = np.arange(FRAMES, dtype=np.float32)
    steps = np.array([DIRECTIONS[s.direction] for s in scenes], np.float32) * _column(scenes, "speed")
    centre = np.stack([_column(scenes, "x"), _column(scenes, "y")], 1)[..., 0]
    path = centre[:, None] + steps[:, None] * frame[:, None]  # [N, F, 2]
    dx = (np.arange(WIDTH, dtype=np.float32) + 0.5)[None, None, None] - path[..., 0, None, None]
    dy = (np.arange(HEIGHT, dtype=np.float32) + 0.5)[None, None, :, None] - path[..., 1, None, None]
    size = _column(scenes, "size")[..., None, None]
    which = np.array([list(SHAPES).index(s.shape) for s in scenes])[:, None, None, None]
    far = np.choose(which, [outside(shape, dx, dy, size) for shape in SHAPES])
    cover = (0.5 - far).clip(0, 1)[..., None]
    ink = np.array([COLOURS[s.colour] for s in scenes], np.float32)[:, None, None, None]
    ground = np.array([GROUNDS[s.ground] for s in scenes], np.float32)[:, None, None, None]
    pixels: NDArray[np.uint8] = (ground + cover * (ink - ground)).round().astype(np.uint8)
    return pixels


def outside(shape: str, dx: Floats, dy: Floats, size: Floats) -> Floats:
    """How far outside the thing a point is that lies dx to the right of its centre and dy below it.

    In pixels, below 0 inside; the edge is soft from -1/2 to 1/2.
    """
    across, down = SHAPES[shape]
    far: Floats = np.maximum(abs(dx) - np.float32(across) * size, abs(dy) - np.float32(down) * size)
    return far


def _column(scenes: Sequence[Scene], name: str) -> Floats:
    return np.array([getattr(s, name) for s in scenes], np.float32)[:, None]


def prompt_of(scene: Scene, *, shape: bool = True, colour: bool = True, direction: bool = True) -> str:
    """What a prompt says of a scene; the parts left out are the model's to choose.

    >>> scene = Scene("square", "red", "left", 20, 9, 4, 1, "navy")
    >>> prompt_of(scene), prompt_of(scene, colour=False), prompt_of(scene, shape=False)
    ('a red square moving left', 'a square moving left', 'a red thing moving left')
    """
    what = " ".join([*([scene.colour] if colour else []), scene.shape if shape else "thing"])
    return f"a {what} moving{f' {scene.direction}' if direction else ''}"


def draw_prompt(rng: np.random.Generator, scene: Scene) -> str:
    """The prompt of a scene; each part is left out now and then, never all three."""
    said = rng.random(3) > 0.15
    if not said.any():
        said[:] = True
    return prompt_of(scene, shape=bool(said[0]), colour=bool(said[1]), direction=bool(said[2]))
