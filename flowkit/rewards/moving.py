"""What a clip of the moving things shows, by plain image analysis: one thing before a plain ground, or why not.

The ground is the median of the clip's border. Against it a frame becomes a map of coverage; its mass and centroid
say where each shape of the world would have to lie and how large it would be, and the shape is the one whose
drawing, by the formula of `flowkit.assets.shapes`, then comes nearest to the map.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowkit.assets.shapes import COLOURS, DIRECTIONS, GROUNDS, SHAPES, Floats, outside

# Levels are Euclidean distances of RGB in 0..255. The inks are at least 114 apart, the grounds 71, an ink and a
# ground 110.
CONTRAST = 60.0  # what differs less from the ground is no thing
INK = 48.0  # a colour farther from every ink is none of them
GROUND = 32.0
STRAY = 48.0  # a pixel this far from the drawing of the thing belongs to something else
STRAYS = 2  # so many of those in a frame are let pass
MISFIT = 0.08  # squared difference from the best drawing, as a share of the thing's own
CLEARLY = 0.75  # the best drawing has at most this share of the misfit of the second
SMALLEST = 2.0  # pixels: below, shapes can't be told apart
GROWTH = 0.3  # largest difference of size within a clip, as a share of its mean
JUMP = 3.0  # largest step from frame to frame, in mean steps
DRIFT = 0.25  # how far a path may stray sideways, as a share of its length

AREA = 4.0  # of every shape, in sizes squared


@dataclass(frozen=True)
class Sight:
    """What was seen; None where it can't be said.

    Attributes:
        fault: why this is not one thing of the world throughout, else None.
        shape: of SHAPES, the same in all frames.
        colour: of COLOURS, the same in all frames.
        direction: of DIRECTIONS, the way that every frame goes on; None for a picture.
        ground: of GROUNDS.
        path: centres [F, 2] in pixels, None unless every frame has a thing.
        size: as `flowkit.assets.shapes.SIZES`, pixels, the mean of the frames.
    """

    fault: str | None
    shape: str | None = None
    colour: str | None = None
    direction: str | None = None
    ground: str | None = None
    path: Floats | None = None
    size: float | None = None

    def line(self) -> tuple[Floats, Floats, float]:
        """Least-squares line through the path: start [2], velocity [2] in pixels a frame, rms distance from it."""
        assert self.path is not None
        t = np.arange(len(self.path), dtype=np.float32)
        apart = t - t.mean()
        velocity = apart @ self.path / max(float(apart @ apart), 1.0)
        start = self.path.mean(0) - velocity * t.mean()
        rest = self.path - start - t[:, None] * velocity
        return start, velocity, float(np.sqrt((rest**2).sum(1).mean()))


def look(clip: Floats) -> Sight:
    """Judge one clip [F, H, W, 3], values 0 to 255, of any size."""
    edge = (clip[:, 0], clip[:, -1], clip[:, :, 0], clip[:, :, -1])
    base = np.median(np.concatenate([e.reshape(-1, 3) for e in edge]), axis=0).astype(np.float32)
    ground = nearest(base[None], GROUNDS, GROUND)
    above = clip - base
    apart = np.sqrt((above**2).sum(-1))  # [F, H, W]
    peak = np.partition(apart.reshape(len(clip), -1), -4, axis=1)[:, -4, None, None]
    if peak.min() < CONTRAST:
        return Sight("a frame shows no thing", ground=ground)
    ink = _mean(above, apart > 0.8 * peak)  # [F, 3], less the ground
    cover = (above * ink[:, None, None]).sum(-1) / (ink**2).sum(-1)[:, None, None]
    seen = _around(cover > 0.5)
    mass = np.maximum((cover * seen).sum((1, 2)), 1.0)
    x, y = (np.arange(n, dtype=np.float32) + 0.5 for n in cover.shape[:0:-1])
    centre = np.stack([(cover * seen).sum(1) @ x, (cover * seen).sum(2) @ y], 1) / mass[:, None]  # [F, 2]
    size = np.sqrt(mass / AREA)  # [F]
    dx = (x - centre[:, :1])[:, None]
    dy = (y - centre[:, 1:])[..., None]  # [F, H, 1]
    far = np.stack([outside(name, dx, dy, size[:, None, None]) for name in SHAPES])
    drawn = (0.5 - far).clip(0, 1)  # [3, F, H, W]
    misfit = (((cover.clip(0, 1) - drawn) * seen) ** 2).sum((2, 3)) / np.maximum((drawn**2).sum((2, 3)), 1.0)
    best, frames = misfit.argmin(0), np.arange(len(clip))
    far, drawn = far[best, frames], drawn[best, frames]
    ink = np.where((far < -1).any((1, 2))[:, None], _mean(above, far < -1), ink)
    rest = np.sqrt(((above - drawn[..., None] * ink[:, None, None]) ** 2).sum(-1))
    near = np.maximum(1.5, size / 4)[:, None, None]  # an edge may be drawn in stairs
    stray = ((rest > STRAY) & (abs(far) > near)).sum((1, 2))
    colour = nearest(base + ink, COLOURS, INK)
    first, second = np.partition(misfit, 1, axis=0)[:2]
    clear = bool(((first <= MISFIT) & (first <= CLEARLY * second) & (size >= SMALLEST)).all())
    shape = list(SHAPES)[best[0]] if clear and (best == best[0]).all() else None
    fault = None
    if stray.max() > STRAYS:
        fault = "a frame shows more than one thing, or a smear"
    elif not clear:
        fault = "a frame shows no shape of the world"
    elif shape is None:
        fault = "the shape changes"
    elif colour is None:
        fault = "the colour is no ink of the world, or changes"
    elif np.ptp(size) > GROWTH * size.mean():
        fault = "the size changes"
    mean_size = float(size.mean())
    return Sight(fault, shape, colour, heading(centre, mean_size), ground, centre, mean_size)


def nearest(levels: Floats, names: dict[str, tuple[int, int, int]], limit: float) -> str | None:
    """The one colour of a table that all levels [N, 3] are nearest to and within `limit` of, else None."""
    distances = np.linalg.norm(levels[:, None] - np.array(list(names.values()), np.float32), axis=-1)
    which = distances.argmin(1)
    same = (which == which[0]).all() and distances.min(1).max() <= limit
    return list(names)[which[0]] if same else None


def heading(path: Floats, size: float) -> str | None:
    """Left, right, up or down: all steps of the path [F, 2] go there evenly, by half of `size` or more; else None."""
    if len(path) < 2:
        return None
    for name, step in DIRECTIONS.items():
        way = np.array(step, np.float32)
        along, aside = path @ way, path @ way[::-1]
        length = float(along[-1] - along[0])
        steps = np.diff(along)
        even = steps.min() > 0 and steps.max() <= JUMP * steps.mean()
        if even and length >= size / 2 and np.ptp(aside) <= DRIFT * length:
            return name
    return None


def _mean(levels: Floats, where: NDArray[np.bool_]) -> Floats:
    """Mean of levels [F, H, W, 3] over the chosen pixels of each frame: [F, 3]."""
    chosen = where[..., None].astype(np.float32)
    mean: Floats = (levels * chosen).sum((1, 2)) / np.maximum(chosen.sum((1, 2)), 1)
    return mean


def _around(inside: NDArray[np.bool_], margin: int = 2) -> NDArray[np.bool_]:
    """The bounding box of what is inside in each frame [F, H, W], two pixels wider on all sides."""
    rows, columns = (_span(np.asarray(inside.any(axis)), margin) for axis in (2, 1))
    both: NDArray[np.bool_] = rows[:, :, None] & columns[:, None, :]
    return both


def _span(line: NDArray[np.bool_], margin: int) -> NDArray[np.bool_]:
    """From the first to the last of each line [F, N] that is set, and `margin` more on both sides."""
    at, last = np.arange(line.shape[1]), line.shape[1] - 1 - line[:, ::-1].argmax(1)
    span: NDArray[np.bool_] = (at >= line.argmax(1)[:, None] - margin) & (at <= last[:, None] + margin)
    return span
