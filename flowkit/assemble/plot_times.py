"""`flowkit distill --plot-times`: the angles that a config trains at, as a picture."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from flowkit.assemble.distill import times_of
from flowkit.config.distill import DistillConfig
from flowkit.errors import UsageError
from flowkit.flow.student import student_thetas
from flowkit.flow.times import Times
from flowkit.runtime.files import disk_errors, write_text
from flowkit.runtime.seeds import generator

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 360, 48, 40, 24
DRAWS, BINS = 200_000, 120
COLOURS = ("#2563eb", "#d97706")


def plot(cfg: DistillConfig, path: Path) -> None:
    """Write an SVG: drawn angles as bars and their densities as curves, and the student's own angles as lines.

    Raises:
        UsageError: a file name that does not end in .svg.
        UserError: a folder that cannot be written to.
    """
    if path.suffix != ".svg":
        raise UsageError(f"--plot-times {path}: the picture is an SVG; give a name that ends in .svg.")
    named = {
        "p_G, the student's": times_of(cfg.times.student),
        "p_D, DMD's and the critic's": times_of(cfg.times.critic),
    }
    with disk_errors("write", path):
        write_text(
            path,
            svg(named, student_thetas(cfg.student.steps, cfg.student.sigma_max, cfg.student.thetas)[:-1]),
        )


def svg(named: dict[str, Times], student: torch.Tensor) -> str:
    """The picture. Angles [0, pi/2] run to the right; each curve is a density per radian."""
    edges = torch.linspace(0, math.pi / 2, BINS + 1, dtype=torch.float64)
    middles, width = (edges[:-1] + edges[1:]) / 2, float(edges[1])
    bars, curves = {}, {}
    for name, times in named.items():
        drawn = times.sample(DRAWS, generator(0, "plot", name))
        bars[name] = torch.histogram(drawn, edges)[0] / DRAWS / width
        curves[name] = times.density(middles).nan_to_num()
    top = max(float(c.max()) for c in (*bars.values(), *curves.values()))

    def x(theta: float) -> float:
        return LEFT + theta / (math.pi / 2) * (WIDTH - LEFT - 16)

    def y(density: float) -> float:
        return HEIGHT - BOTTOM - density / top * (HEIGHT - BOTTOM - TOP)

    parts = []
    for tick in (0, 0.25, 0.5, 1, 1.5, math.pi / 2):
        label = "&#960;/2" if tick == math.pi / 2 else f"{tick:g}"
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{label}</text>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">angle theta, radians (tan theta = sigma)</text>'
    )
    parts += [
        f'<line x1="{x(theta):.1f}" x2="{x(theta):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#888" '
        f'stroke-dasharray="4 3" />'
        for theta in student.tolist()
    ]
    for k, name in enumerate(named):
        for middle, height in zip(middles.tolist(), bars[name].tolist(), strict=True):
            parts.append(
                f'<rect x="{x(middle - width / 2):.1f}" width="{x(width) - x(0):.2f}" y="{y(height):.1f}" '
                f'height="{y(0) - y(height):.1f}" fill="{COLOURS[k]}" opacity=".25" />'
            )
        line = " ".join(
            f"{x(t):.1f},{y(d):.1f}" for t, d in zip(middles.tolist(), curves[name].tolist(), strict=True)
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[k]}" stroke-width="1.6" />')
        parts.append(f'<text x="{LEFT + 8}" y="{TOP + 14 * (k + 1)}" fill="{COLOURS[k]}">{name}</text>')
    parts.append(
        f'<text x="{LEFT + 8}" y="{TOP + 14 * (len(named) + 1)}" fill="#888">the student\'s sampling angles</text>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white" />\n{body}\n</svg>\n'
    )
