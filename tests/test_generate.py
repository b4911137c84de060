from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from flowkit.cli.app import main
from flowkit.errors import UsageError
from flowkit.flow.schedule import SCHEDULES, dynamic, mu_of
from flowkit.generate import Recipe, draw, grid_of, solve
from flowkit.models import load
from flowkit.models.text import encode_all
from flowkit.runtime.media import read_manifest, read_png
from flowkit.types import Size
from tests import tiny

SIZE = Size(32, 32)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_flux(tmp_path_factory.mktemp("flux")))


def pixels(model, jobs, recipe, batch):
    table = encode_all(model, ["a", "b", "c"])
    return torch.cat([m.pixels for _, m in draw(model, lambda rows: table[rows], jobs, recipe, batch)])


@pytest.mark.parametrize(("law", "level"), [("ode", 0.0), ("flow-sde", 0.7), ("consistency", 0.0)])
def test_a_picture_is_the_same_in_every_batch(flux: str, law: str, level: float) -> None:
    model = load(flux)
    recipe = Recipe(steps=3, size=SIZE, law=law, level=level)
    jobs = [(0, 5), (1, 5), (2, 5), (1, 6)]
    whole = pixels(model, jobs, recipe, 4)
    # float32 sums of a small network in other batch shapes, seen in [0, 1]
    torch.testing.assert_close(pixels(model, jobs, recipe, 3), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(pixels(model, [(1, 6), (0, 5)], recipe, 1), whole[[3, 0]], rtol=0, atol=1e-5)
    assert (whole[1] - whole[3]).abs().max() > 1e-3  # another seed is another picture
    assert (whole[0] - whole[1]).abs().max() > 1e-3


def test_auto_is_the_models_own_schedule_and_dynamic_without_mu_counts_tokens(flux: str) -> None:
    model = load(flux)
    assert torch.equal(grid_of(model, 5, SIZE), model.schedule(5, SIZE).float())
    assert torch.equal(grid_of(model, 5, SIZE, "dynamic"), dynamic(5, mu_of(4)).float())
    assert torch.equal(
        grid_of(model, 4, SIZE, "static", {"shift": 3.0}), torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0])
    )


def test_a_schedule_refuses_settings_that_it_does_not_take(flux: str) -> None:
    with pytest.raises(UsageError, match="schedule 'unshifted'"):
        grid_of(load(flux), 4, SIZE, "unshifted", {"shift": 3.0})
    with pytest.raises(UsageError, match="schedule 'static'"):
        grid_of(load(flux), 4, SIZE, "static")


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("unipc", 2)])
def test_every_solver_walks_the_exact_flow_of_gaussian_data(solver: str, order: int) -> None:
    # data N(0, .25): v = (t - (1-t)/4) x / ((1-t)^2/4 + t^2), and x(0) = x(1) / 2
    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        t = t.to(x)[:, None]
        return (t - (1 - t) * 0.25) * x / ((1 - t) ** 2 * 0.25 + t**2)

    x = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)

    def error(n: int) -> float:
        grid = SCHEDULES["unshifted"](n)
        ended = solve(velocity, x, grid, Recipe(steps=n, size=SIZE, solver=solver), lambda j: x)
        return (ended - x / 2).abs().max().item()

    assert error(40) < error(20) / 2**order * 1.35
    assert error(40) < 0.05


def test_a_noisy_law_asks_for_the_noise_of_each_step() -> None:
    asked = []

    def drawn(step: int) -> torch.Tensor:
        asked.append(step)
        return torch.zeros(1, 1)

    recipe = Recipe(steps=3, size=SIZE, law="consistency")
    ended = solve(
        lambda x, t: torch.ones_like(x), torch.ones(1, 1), SCHEDULES["unshifted"](3).float(), recipe, drawn
    )
    assert asked == [0, 1, 2]
    # consistency with zero noise: x0 = x - t v, then (1-s) x0; the last step returns x0 itself
    x, grid = 1.0, [1.0, 2 / 3, 1 / 3, 0.0]
    for t, s in pairwise(grid):
        x = (1 - s) * (x - t)
    assert ended.item() == pytest.approx(x, abs=1e-6)


def test_sample_writes_pictures_with_their_recipe_manifest_and_sheet(
    flux: str, tmp_path: Path, capsys
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "target": "A", "tag": 1}\n{"prompt": "b"}\n')
    arguments = [
        "sample",
        "--prompts",
        tmp_path / "p.jsonl",
        "--model",
        flux,
        "--size",
        "32x16",
        "--num-images",
        2,
    ]
    arguments += ["--steps", 2, "--guidance", 2, "--seed", 7, "--out", tmp_path / "out", "--json"]
    assert main([str(a) for a in arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pictures"], report["black_or_nan"], report["steps"]) == (4, 0, 2)
    names = sorted(p.name for p in (tmp_path / "out").glob("0*.png"))
    assert names == ["00000-7.png", "00000-8.png", "00001-7.png", "00001-8.png"]
    rows = read_manifest(tmp_path / "out")
    assert [(r.index, r.seed, r.prompt, r.target) for r in rows][:2] == [(0, 7, "a", "A"), (0, 8, "a", "A")]
    assert rows[0].meta == {"tag": 1}
    picture = read_png(tmp_path / "out" / names[3])
    assert picture.pixels.shape == (3, 16, 32)
    assert picture.text["prompt"] == "b"
    recipe = json.loads(picture.text["flowkit"])
    assert (recipe["index"], recipe["seed"], recipe["guidance"], recipe["model"]) == (1, 8, 2.0, flux)
    sheet = read_png(tmp_path / "out" / "contact-sheet.png")
    assert sheet.pixels.shape[-1] >= 2 * 32


def test_one_picture_of_a_file_is_drawn_again_by_its_seed_alone(flux: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\n")
    base = [
        "sample",
        "--prompts",
        str(tmp_path / "p.txt"),
        "--model",
        flux,
        "--size",
        "32x32",
        "--steps",
        "2",
    ]
    assert main([*base, "--num-images", "2", "--out", str(tmp_path / "x")]) == 0
    assert main([*base, "--seed", "1", "--batch", "1", "--out", str(tmp_path / "y")]) == 0
    a, b = (read_png(tmp_path / name / "00001-1.png").pixels for name in "xy")
    # 8-bit pixels of the same float32 arithmetic in another batch shape
    assert (a - b).abs().max() <= 1 / 255 + 1e-6


def test_the_shift_option_means_the_static_schedule(flux: str, tmp_path: Path, capsys) -> None:
    arguments = ["sample", "-p", "a", "--model", flux, "--size", "32x32", "--steps", "4", "--shift", "3"]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["times"] == [1.0, 0.9, 0.75, 0.5, 0.0]


def test_black_pictures_are_counted_and_nothing_but_black_is_a_failure(
    flux: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from flowkit.models import parts

    real = parts.decode
    monkeypatch.setattr(parts, "decode", lambda *a: type(real(*a))(torch.zeros_like(real(*a).pixels)))
    arguments = ["sample", "-p", "a", "--model", flux, "--size", "32x32", "--steps", "1"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert "1 of 1 pictures are black or hold nan" in capsys.readouterr().err
