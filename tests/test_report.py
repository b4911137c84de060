"""The report is one legible file, whatever lies in the run folder."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkit import report
from flowkit.runtime.log import Metrics

VOID = {"meta", "img", "tr", "td", "th", "line", "circle", "polyline", "polygon"}


class Page(HTMLParser):
    """Collects tags and text, and fails on tags that don't match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def a_run(folder: Path) -> Page:
    metrics = Metrics(folder)
    metrics.log(0, {"eval/ocr_exact": 0.25})
    for step in range(1, 31):
        row = {"reward": step / 30, "loss": math.nan if step == 9 else 1 / step, "rewards/<b>/mean": 0.5}
        metrics.log(step, {**row, "eval/ocr_exact": 0.5} if step == 30 else row)
    (folder / "config.yaml").write_text("algorithm: grpo\nsteps: 60\nmodel: a<script>b\n")
    (folder / "env.json").write_text(json.dumps({"versions": {"torch": "2.7", "numpy": "2"}}))
    (folder / "previews").mkdir()
    for name in (
        "step-000010.png",
        "step-000000.png",
        "step-1000000.png",
        "step-x.png",
        ".partial-step-000020.png",
    ):
        (folder / "previews" / name).touch()
    return Page(report.write(folder).read_text())


def test_the_report_holds_every_curve_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = a_run(tmp_path)
    assert [svg["aria-label"] for svg in page.all("svg")] == [
        "eval/ocr_exact",
        "reward",
        "rewards/<b>/mean",
        "loss",
    ]
    assert page.all("script") == page.all("link") == page.all("b ") == []
    sources = [image["src"] for image in page.all("img")]
    assert sources == [f"previews/step-{step}.png" for step in ("000000", "000010", "1000000")]


def test_the_result_and_the_state_of_the_run_stand_in_words(tmp_path: Path) -> None:
    text = " ".join(a_run(tmp_path).texts)
    assert "step 30 of 60 · algorithm grpo · model a<script>b · torch 2.7" in text
    assert "+0.25 from step 0 to step 30" in text


def test_a_curve_breaks_where_a_value_is_not_finite(tmp_path: Path) -> None:
    chart = Page(report._chart("loss", [(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0), (5, 2.0)]))
    assert [len(str(line["points"]).split()) for line in chart.all("polyline")] == [2, 2]


def test_a_long_curve_is_the_mean_over_a_band_of_its_extremes() -> None:
    points = [(step, float(step % 2)) for step in range(4000)]
    chart = report._chart("x", points)
    assert len(chart) < 20_000
    assert "class=band" in chart
    assert {mean for _, mean, _, _ in report._buckets(points)} == {0.5}
    assert {(low, high) for _, _, low, high in report._buckets(points)} == {(0.0, 1.0)}


def test_higher_is_drawn_higher_and_later_further_right() -> None:
    chart = Page(report._chart("x", [(0, 0.0), (10, 1.0)]))
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in str(chart.all("polyline")[0]["points"]).split())
    assert x1 > x0
    assert y1 < y0  # SVG counts downwards


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_ticks_enclose_the_values_and_are_few(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = report._ticks(low, high)
    room = 1e-9 * (abs(low) + abs(high)) + 1e-12 * (high - low)
    assert ticks[0] <= low + room
    assert ticks[-1] >= high - room
    assert 3 <= len(set(ticks)) == len(ticks) <= 7


@pytest.mark.parametrize("names", [[], ["metrics.jsonl"]])
def test_an_empty_run_gives_a_report_too(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert "no step has been finished" in " ".join(Page(report.render(tmp_path)).texts)


def test_a_metric_that_was_never_finite_is_said(tmp_path: Path) -> None:
    Metrics(tmp_path).log(1, {"kl": math.inf})
    assert "no finite value" in report.render(tmp_path)


def test_the_figures_of_a_distillation_stand_together(tmp_path: Path) -> None:
    row = {
        "step": 1,
        "loss/fake": 2.0,
        "g_norm": 1.0,
        "g_norm/theta_1_of_4": 3.0,
        "frac_dropped": 0.0,
        "lr": 1.0,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    page = report.render(tmp_path)
    section = page.split("<h2>Student and critic</h2>")[1].split("<h2>")[0]
    assert all(name in section for name in row.keys() - {"step", "lr"})
    assert "lr" in page.split("<h2>Policy</h2>")[1]
