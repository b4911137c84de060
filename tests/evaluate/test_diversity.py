from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from flowkit.assets.shapes import Scene, draw_scene, prompt_of, render
from flowkit.evaluate.diversity import PLACES, diversity
from flowkit.rewards import load
from flowkit.types import Media, Prompt

RNG = np.random.default_rng(0)
SCENES = [draw_scene(RNG) for _ in range(2000)]
LEFT = [replace(s, shape="square", colour="red") for s in SCENES if s.direction == "left"]


def said(scenes: list[Scene]) -> list[dict[str, object]]:
    """The details of clips in which exactly these scenes are seen."""
    return [asdict(scene) | {"exact": True} for scene in scenes]


def test_the_world_has_all_of_its_own_diversity() -> None:
    found = diversity(said(LEFT[:200]), said(LEFT[200:]))
    # 200 of a uniform: the deviation is known to 3 % (one sigma), four shares to .03 each
    assert [getattr(found, part) for part in PLACES] == pytest.approx([1.0] * 4, abs=0.12)
    assert found.ground > 0.9
    assert found.mean > 0.9
    assert found.seen == 200


def test_one_mode_has_none_and_half_the_width_has_half() -> None:
    world = said(LEFT)
    one = diversity(said([LEFT[0]] * 9), world)
    assert [getattr(one, part) for part in PLACES] == [0.0] * 4
    # all clips before one ground of four
    assert one.ground == pytest.approx(0.25, abs=0.05)
    middle = {part: float(np.mean([getattr(s, part) for s in LEFT])) for part in PLACES}
    halves = [replace(s, **{p: (getattr(s, p) + middle[p]) / 2 for p in PLACES}) for s in LEFT]
    half = diversity(said(halves), world)
    assert [getattr(half, part) for part in PLACES] == pytest.approx([0.5] * 4, abs=1e-9)
    assert half.ground == 1.0
    assert half.mean == pytest.approx(0.6, abs=1e-9)


def test_a_spread_wider_than_the_worlds_makes_up_for_nothing() -> None:
    wide = [replace(s, x=3 * s.x, y=LEFT[0].y) for s in LEFT]
    found = diversity(said(wide), said(LEFT))
    assert (found.x, found.y) == pytest.approx((3.0, 0.0), abs=1e-9)
    assert found.mean == pytest.approx(0.8, abs=1e-9)


def test_clips_without_one_thing_say_nothing() -> None:
    world = said(LEFT)
    odd = [{"fault": "a frame shows no thing", "x": None, "ground": "navy"}, {"error": "black"}]
    assert diversity([*said(LEFT[:50]), *odd], world) == diversity(said(LEFT[:50]), world)
    nothing = diversity([*said(LEFT[:1]), *odd], world)
    assert nothing.seen == 1
    assert math.isnan(nothing.mean)
    with pytest.raises(ValueError, match="two scenes or more"):
        diversity(world, said(LEFT[:1]))


def test_it_takes_what_the_reward_says_of_clips() -> None:
    scenes = LEFT[:40]
    media = Media(torch.from_numpy(render(scenes)).permute(0, 1, 4, 2, 3).float() / 255)
    details = load("shapes")(media, [Prompt(prompt_of(scene)) for scene in scenes]).details
    found, true = (diversity(d, said(LEFT)) for d in (details, said(scenes)))
    for part in (*PLACES, "ground"):
        # places are seen to a tenth of a pixel, sizes that spread by half a pixel a little worse
        assert getattr(found, part) == pytest.approx(getattr(true, part), abs=0.05)
