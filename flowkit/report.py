"""report.html of a run folder: one file without scripts, which opens anywhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import yaml

from flowkit.runtime.files import write_text
from flowkit.runtime.log import read_rows

Points = list[tuple[int, float]]

_SECTIONS = (  # title, what a metric's name begins with, in this order
    ("Evaluation", ("eval/",)),
    (
        "Student and critic",
        ("loss/", "dmd_weight", "grad_norm/fake", "g_norm", "cos_g", "probe/", "frac_dropped"),
    ),
    ("Reward", ("reward", "rewards/", "frac_")),
    (
        "Policy",
        ("loss", "kl", "approx_kl", "clip_ratio", "clip", "ratio", "grad_norm", "logp", "lr", "skipped"),
    ),
    ("Time", ("step_time", "images/s")),
    ("Other", ("",)),
)
_BUCKETS = 200  # a longer curve is drawn as the mean of as many stretches, over the band of its extremes
_WIDTH, _HEIGHT = 340, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 20
_CSS = """
:root { --paper: #fff; --card: #f7f8fa; --ink: #1c2330; --soft: #5d6879; --line: #dfe3ea; --mark: #2f6fb3 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171d; --card: #1c2129; --ink: #e6e9ef; --soft: #98a3b5; --line: #323a47 }
  :root { --mark: #74b0ee }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 28px 20px 60px; font: 15px/1.5 system-ui, sans-serif }
body { background: var(--paper); color: var(--ink) }
h1 { font-size: 26px; margin: 0 }
h2 { font-size: 18px; margin: 36px 0 12px }
p { margin: 4px 0 }
.soft, th, figcaption { color: var(--soft) }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr)) }
.card, pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px }
.card header { display: flex; justify-content: space-between; gap: 8px; font-size: 13px }
.card header { overflow-wrap: anywhere }
.card b, .big, td { font-variant-numeric: tabular-nums }
.big { font-size: 24px; font-weight: 600 }
svg { display: block; width: 100%; height: auto; margin-top: 6px }
svg text { fill: var(--soft); font-size: 10px }
.axis { stroke: var(--line) }
.curve { fill: none; stroke: var(--mark); stroke-width: 1.6; stroke-linejoin: round }
.dot { fill: var(--mark) }
.band { fill: var(--mark); opacity: .2 }
table { border-collapse: collapse; font-size: 13px }
td, th { border-bottom: 1px solid var(--line); padding: 3px 18px 3px 0; text-align: right; font-weight: 400 }
td:first-child, th:first-child { text-align: left }
.wide, pre { overflow-x: auto }
figure { margin: 0 0 16px }
figure img { max-width: 100%; border-radius: 6px; border: 1px solid var(--line) }
figcaption, pre { font-size: 13px }
summary { cursor: pointer }
"""


def write(folder: Path) -> Path:
    """Writes report.html of a run folder from what lies in it: metrics, previews, config, environment.

    Returns:
        The path of the report.

    Raises:
        UserError: the disk is full or read-only.
    """
    path = folder / "report.html"
    write_text(path, render(folder))
    return path


def render(folder: Path) -> str:
    """The report of a run folder as HTML; pictures are linked relative to the folder, all else is inside."""
    rows = read_rows(folder)
    curves = _curves(rows)
    config, env = _read(folder / "config.yaml"), _read(folder / "env.json")
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(folder.resolve().name)} - flowkit</title><style>{_CSS}</style>",
        _head(folder, rows, config, env),
        _summary(curves),
        _previews(folder),
    ]
    for title, names in _by_section(curves):
        cards = "".join(_card(name, curves[name]) for name in names)
        parts.append(f"<h2>{title}</h2><div class=grid>{cards}</div>")
    parts += [_table(curves), _text("Config", config), _text("Environment", env), "</html>\n"]
    return "\n".join(parts)


def _curves(rows: Sequence[dict[str, float | None]]) -> dict[str, Points]:
    """The points of each metric; a value that was not finite is nan and leaves a gap."""
    curves: dict[str, Points] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                point = (int(row["step"] or 0), math.nan if value is None else float(value))
                curves.setdefault(name, []).append(point)
    return curves


def _by_section(curves: dict[str, Points]) -> list[tuple[str, list[str]]]:
    left, sections = list(curves), []
    for title, prefixes in _SECTIONS:
        names = [name for prefix in prefixes for name in left if name.startswith(prefix)]
        names = list(dict.fromkeys(names))
        left = [name for name in left if name not in names]
        if names:
            sections.append((title, names))
    return sections


def _head(folder: Path, rows: Sequence[dict[str, float | None]], config: str, env: str) -> str:
    settings = yaml.safe_load(config) or {}
    about = json.loads(env) if env else {}
    done = int(rows[-1]["step"] or 0) if rows else 0
    total = f" of {settings['steps']}" if "steps" in settings else ""
    facts = [f"step {done}{total}"]
    facts += [f"{key} {settings[key]}" for key in ("algorithm", "model", "seed") if key in settings]
    facts += [
        f"{name} {v}"
        for name, v in (about.get("versions") or {}).items()
        if name in ("flowkit", "torch") and v
    ]
    name = escape(folder.resolve().name)
    return f"<h1>{name}</h1><p class=soft>{escape(' · '.join(facts))}</p>"


def _summary(curves: dict[str, Points]) -> str:
    """Each evaluation's first and last value, large."""
    tiles = []
    for name, points in curves.items():
        known = [point for point in points if math.isfinite(point[1])]
        if not name.startswith("eval/") or not known:
            continue
        (begin, first), (end, last) = known[0], known[-1]
        tiles.append(
            f"<div class=card><header>{escape(name)}</header>"
            f"<div class=big>{_number(first)} &rarr; {_number(last)}</div>"
            f"<div class=soft>{last - first:+.3g} from step {begin} to step {end}</div></div>"
        )
    return f"<h2>Result</h2><div class=grid>{''.join(tiles)}</div>" if tiles else ""


def _previews(folder: Path) -> str:
    found = (re.fullmatch(r"step-(\d+)\.png", path.name) for path in (folder / "previews").glob("*"))
    figures = [
        f"<figure><img src='previews/step-{step}.png' alt='preview of step {int(step)}'>"
        f"<figcaption>step {int(step)}</figcaption></figure>"
        for step in sorted((match[1] for match in found if match), key=int)
    ]
    if not figures:
        return ""
    between = "".join(figures[1:-1]).replace("<img ", "<img loading=lazy ")
    hidden = (
        f"<details><summary>{len(figures) - 2} in between</summary>{between}</details>" if between else ""
    )
    return f"<h2>Previews</h2>{figures[0]}{hidden}{figures[-1] if len(figures) > 1 else ''}"


def _card(name: str, points: Points) -> str:
    last = f"<b>{_number(points[-1][1])}</b>"
    return f"<div class=card><header><span>{escape(name)}</span>{last}</header>{_chart(name, points)}</div>"


def _chart(name: str, points: Points) -> str:
    """A curve as SVG with its axes."""
    known = [point for point in points if math.isfinite(point[1])]
    if not known:
        return "<p class=soft>no finite value</p>"
    ticks = _ticks(min(v for _, v in known), max(v for _, v in known))
    low, high = ticks[0], ticks[-1]
    first, last = known[0][0], max(known[-1][0], known[0][0] + 1)

    def x(step: float) -> str:
        return f"{_LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(value: float) -> str:
        return f"{_HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    parts = [
        f"<line class=axis x1={_LEFT} x2={_WIDTH - _RIGHT} y1={y(tick)} y2={y(tick)} />"
        f"<text x={_LEFT - 6} y={float(y(tick)) + 3:.1f} text-anchor=end>{tick:.6g}</text>"
        for tick in ticks
    ]
    for step, anchor in ((first, "start"), (last, "end")):
        parts.append(f"<text x={x(step)} y={_HEIGHT - 5} text-anchor={anchor}>{step}</text>")
    for stretch in _unbroken(points):
        buckets = _buckets(stretch)
        mean = " ".join(f"{x(step)},{y(value)}" for step, value, _, _ in buckets)
        if len(buckets) < len(stretch):
            edge = [f"{x(step)},{y(top)}" for step, _, _, top in buckets]
            edge += [f"{x(step)},{y(bottom)}" for step, _, bottom, _ in reversed(buckets)]
            parts.append(f"<polygon class=band points='{' '.join(edge)}' />")
        parts.append(f"<polyline class=curve points='{mean}' />")
        if len(points) <= 40:
            parts += [
                f"<circle class=dot cx={x(s)} cy={y(v)} r=2.4><title>step {s}: {_number(v)}</title></circle>"
                for s, v in stretch
            ]
    label = escape(name, quote=True)
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='{label}'>{''.join(parts)}</svg>"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, three to seven of them, around an interval.

    >>> _ticks(0.12, 0.58)
    [0.0, 0.2, 0.4, 0.6]
    >>> _ticks(3.0, 3.0)
    [2.0, 2.5, 3.0, 3.5, 4.0]
    """
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):  # a flat line, up to rounding
        margin = abs(low) / 3 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / 4
    digits = math.floor(math.log10(rough))
    step = next(factor * 10.0**digits for factor in (1, 2, 5, 10) if factor * 10.0**digits >= rough * 0.999)
    return [round(k * step, 2 - digits) for k in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _unbroken(points: Points) -> list[Points]:
    """The curve's stretches of finite values."""
    stretches: list[Points] = [[]]
    for step, value in points:
        if math.isfinite(value):
            stretches[-1].append((step, value))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _buckets(points: Points) -> list[tuple[float, float, float, float]]:
    """Step, mean, least and largest value of at most `_BUCKETS` stretches of a curve."""
    size = math.ceil(len(points) / _BUCKETS)
    pieces = [points[at : at + size] for at in range(0, len(points), size)]
    return [
        (
            sum(step for step, _ in piece) / len(piece),
            sum(value for _, value in piece) / len(piece),
            min(value for _, value in piece),
            max(value for _, value in piece),
        )
        for piece in pieces
    ]


def _table(curves: dict[str, Points]) -> str:
    if not curves:
        return "<p class=soft>no step has been finished</p>"
    lines = []
    for name, points in sorted(curves.items()):
        values = [value for _, value in points if math.isfinite(value)]
        least, most = (_number(min(values)), _number(max(values))) if values else ("-", "-")
        cells = (_number(points[-1][1]), str(points[-1][0]), _number(points[0][1]), least, most)
        lines.append(f"<tr><td>{escape(name)}" + "".join(f"<td>{cell}" for cell in cells))
    head = "<tr><th>metric<th>last<th>at step<th>first<th>least<th>most"
    return f"<h2>Last values</h2><div class=wide><table>{head}{''.join(lines)}</table></div>"


def _text(title: str, text: str) -> str:
    return (
        f"<h2>{title}</h2><details><summary>show</summary><pre>{escape(text)}</pre></details>" if text else ""
    )


def _number(value: float) -> str:
    return f"{value:.4g}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
