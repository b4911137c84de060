from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from flowkit.assemble.plot_times import svg
from flowkit.cli.app import main
from flowkit.flow.times import UniformShift

NAME = "{http://www.w3.org/2000/svg}"


def test_the_picture_of_a_preset_is_sound_xml_with_two_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "times.svg"
    assert main(["distill", "--preset", "tiny-flux-rcm", "--plot-times", str(file)]) == 0
    assert "times.svg" in capsys.readouterr().out
    root = ET.parse(file).getroot()
    assert len(root.findall(f"{NAME}polyline")) == 2
    assert len(root.findall(f"{NAME}line")) == 4  # the angles of 4 steps


def test_another_ending_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distill", "--preset", "tiny-flux-rcm", "--plot-times", str(tmp_path / "t.png")]) == 2
    assert "ends in .svg" in capsys.readouterr().err


def test_bars_stand_under_their_curve() -> None:
    root = ET.fromstring(svg({"even": UniformShift(1.0)}, torch.tensor([1.0])))
    curve = [float(p.split(",")[1]) for p in root.findall(f"{NAME}polyline")[0].attrib["points"].split()]
    bars = [float(r.attrib["y"]) for r in root.findall(f"{NAME}rect")[1:]]
    # 200,000 draws in 120 bins: a bar is off by 2.5 % (one sigma), 300 pixels are the whole height
    assert max(abs(a - b) for a, b in zip(curve, bars, strict=True)) < 0.1 * 300
    assert sum(abs(a - b) for a, b in zip(curve, bars, strict=True)) / len(bars) < 0.03 * 300
