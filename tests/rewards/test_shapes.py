from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from flowkit.assets.shapes import (
    COLOURS,
    DIRECTIONS,
    FRAMES,
    GROUNDS,
    HEIGHT,
    SHAPES,
    SIZES,
    WIDTH,
    Scene,
    draw_prompt,
    draw_scene,
    prompt_of,
    render,
)
from flowkit.errors import UsageError
from flowkit.rewards import load
from flowkit.rewards.pool import RewardPool
from flowkit.rewards.shapes import STILL, Asked, asked_of
from flowkit.types import Media, Prompt, Scores

RNG = np.random.default_rng(1)
SCENES = [draw_scene(RNG) for _ in range(300)]
CLIPS = render(SCENES)
FULL = [prompt_of(scene) for scene in SCENES]
RED = Scene("square", "red", "left", 22.0, 12.0, 5.0, 1.5, "navy")
rewards = {name: load(name) for name in ("shapes", "motion")}


def media(clips: np.ndarray) -> Media:
    levels = np.asarray(clips, np.float64).round().clip(0, 255)
    return Media(torch.from_numpy(levels).permute(0, 1, 4, 2, 3).float() / 255)


def score(clips: np.ndarray, prompts: list[str], reward: str = "shapes") -> Scores:
    return rewards[reward](media(clips), [Prompt(text, i) for i, text in enumerate(prompts)])


def exact(clips: np.ndarray, prompts: list[str] = FULL) -> np.ndarray:
    return np.array([detail["exact"] for detail in score(clips, prompts).details])


def blurred(clips: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian blur of every frame, the border repeated."""
    reach = int(4 * sigma + 1)
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    out = clips.astype(np.float64)
    for axis in (2, 3):
        wide = np.pad(out, [(reach, reach) if i == axis else (0, 0) for i in range(5)], mode="edge")
        size = out.shape[axis]
        out = sum(w * np.take(wide, range(i, i + size), axis) for i, w in enumerate(weights))
    return out


def other(names: object, name: str) -> str:
    known = list(names)  # type: ignore[call-overload]
    return known[(known.index(name) + 1) % len(known)]


def _alike(scene: Scene) -> tuple[str, ...]:
    """What two scenes must share to pass for one that goes on."""
    return scene.shape, scene.colour, scene.direction, scene.ground


def _part(one: Scene, two: Scene) -> bool:
    """Whether the two things have at least one frame in which they do not touch."""
    gaps = [
        max(abs(a.x - b.x), abs(a.y - b.y)) - a.size - b.size
        for a, b in ((_at(one, frame), _at(two, frame)) for frame in range(FRAMES))
    ]
    return max(gaps) > 1


def _at(scene: Scene, frame: int) -> Scene:
    dx, dy = (step * scene.speed * frame for step in DIRECTIONS[scene.direction])
    return replace(scene, x=scene.x + dx, y=scene.y + dy)


def test_every_rendered_scene_is_seen_as_what_it_is() -> None:
    result = score(CLIPS, FULL)
    assert result.values.tolist() == [1.0] * len(SCENES)
    for scene, detail in zip(SCENES, result.details, strict=True):
        said = {part: detail[part] for part in ("shape", "colour", "direction", "ground", "exact")}
        true = {part: getattr(scene, part) for part in ("shape", "colour", "direction", "ground")}
        assert said == true | {"exact": True}
        assert "fault" not in detail
        # Moments of 8-bit pixels; the corners of the antialiased drawing hold a little less than the shape does.
        for part, tolerance in {"x": 0.1, "y": 0.2, "size": 0.2, "speed": 0.02}.items():
            assert detail[part] == pytest.approx(getattr(scene, part), abs=tolerance)


def test_parts_that_a_prompt_leaves_open_do_not_count() -> None:
    rng = np.random.default_rng(2)
    assert exact(CLIPS, [draw_prompt(rng, scene) for scene in SCENES]).all()
    assert exact(CLIPS[:20], ["a thing moving"] * 20).all()


@pytest.mark.slow
def test_a_worn_clip_is_still_seen_for_what_it_is() -> None:
    rng = np.random.default_rng(3)
    shift = 12 * rng.choice([-1, 1], (len(CLIPS), 1, 1, 1, 3))
    worn = {
        "noise": CLIPS + rng.normal(0, 6, CLIPS.shape),
        "blur": blurred(CLIPS, 0.5),
        "shift": CLIPS + shift,
        "all": blurred(CLIPS, 0.5) + rng.normal(0, 6, CLIPS.shape) + shift,
    }
    for name, clips in worn.items():
        assert exact(clips).mean() >= 0.99, name  # measured: 1 for all four


@pytest.mark.parametrize("part", ["colour", "shape", "direction"])
def test_a_wrong_part_costs_its_share_and_is_never_exact(part: str) -> None:
    names = {"colour": COLOURS, "shape": SHAPES, "direction": DIRECTIONS}[part]
    wrong = [prompt_of(replace(s, **{part: other(names, getattr(s, part))})) for s in SCENES]
    result = score(CLIPS, wrong)
    np.testing.assert_allclose(result.values, 2 / 3, rtol=1e-6)
    assert not any(detail["exact"] for detail in result.details)


@pytest.mark.slow
def test_smears_are_never_exact_whatever_is_asked() -> None:
    rng = np.random.default_rng(4)
    n = 120
    clips = CLIPS[:n].astype(np.float64)
    ground = np.array([GROUNDS[s.ground] for s in SCENES[:n]], float)[:, None, None, None]
    apart = np.array([_part(a, b) for a, b in pairwise(SCENES[: n + 1])])
    pairs = [(replace(a, ground="grey"), replace(b, ground="grey")) for a, b in pairwise(SCENES[: n + 1])]
    first, second = (render(list(side)).astype(np.float64) for side in zip(*pairs, strict=True))
    both = np.where(abs(second - np.array(GROUNDS["grey"])).sum(-1, keepdims=True) > 60, second, first)
    fade = np.linspace(1, 0.2, FRAMES)[None, :, None, None, None]
    cut = rng.permutation(n)
    smears = {
        "average of two": ((first + second) / 2)[apart],
        "blur": blurred(clips, 2.0),
        "fade": ground + (clips - ground) * fade,
        "half there": ground + (clips - ground) / 2,
        "two things": both[apart],
        "ground alone": np.broadcast_to(ground, clips.shape),
        "noise": rng.uniform(0, 255, clips.shape),
        "another from the middle on": np.concatenate([clips[:, :4], clips[cut][:, 4:]], 1)[
            [_alike(SCENES[i]) != _alike(SCENES[k]) for i, k in enumerate(cut)]
        ],
        "still": np.repeat(clips[:, :1], FRAMES, 1),
        "one frame missing": np.where(np.arange(FRAMES)[:, None, None, None] == 5, ground, clips),
    }
    for name, bad in smears.items():
        for prompts in (["a thing moving"] * len(bad), FULL[: len(bad)]):
            assert not exact(bad, prompts).any(), name


def test_a_shape_between_two_is_none() -> None:
    square, bar = (render([replace(RED, shape=shape)]) for shape in ("square", "bar"))
    (detail,) = score((square.astype(float) + bar) / 2, ["a red thing moving left"]).details
    assert detail["shape"] is None
    assert detail["fault"] == "a frame shows more than one thing, or a smear"


def test_a_thing_that_changes_its_shape_or_its_colour_is_none_of_the_world() -> None:
    clip = render([RED])
    for other_one, fault in (
        (replace(RED, shape="pole"), "the shape changes"),
        (replace(RED, colour="cyan"), "the colour is no ink of the world, or changes"),
        (replace(RED, size=7.0), "the size changes"),
    ):
        mixed = np.concatenate([clip[:, :4], render([other_one])[:, 4:]], 1)
        result = score(mixed, ["a thing moving left"])
        assert result.values.tolist() == [0.0]
        assert result.details[0]["fault"] == fault


def test_a_thing_that_stands_still_has_its_other_parts_right() -> None:
    still = np.repeat(render([RED])[:, :1], FRAMES, 1)
    result = score(np.repeat(still, 2, 0), ["a red square moving left", "a red square moving"])
    np.testing.assert_allclose(result.values, [2 / 3, 2 / 3], rtol=1e-6)
    assert [d["direction"] for d in result.details] == [None, None]


def test_a_path_with_a_step_back_or_aslant_has_no_direction() -> None:
    clip = render([RED])
    back = clip[:, [0, 1, 2, 3, 2, 5, 6, 7, 8]]
    slanted = np.stack([np.roll(frame, k, 0) for k, frame in enumerate(clip[0])])[None]
    for bad in (back, slanted):
        assert score(bad, ["a red square moving left"]).details[0]["direction"] is None


def test_clips_of_any_size_and_length_are_seen() -> None:
    ground = np.array([GROUNDS[s.ground] for s in SCENES], np.uint8)[:, None, None, None]
    larger = np.broadcast_to(ground, (len(CLIPS), FRAMES, HEIGHT + 9, WIDTH + 30, 3)).copy()
    larger[:, :, 9:, :WIDTH] = CLIPS
    assert exact(larger).all()
    # edges in stairs of three pixels, where the drawing that they are compared with has soft ones: .977 measured
    assert exact(CLIPS[:100].repeat(3, 2).repeat(3, 3), FULL[:100]).mean() > 0.94
    short = exact(CLIPS[:, :5])
    for scene, right in zip(SCENES, short, strict=True):
        far = 4 * scene.speed - scene.size / 2  # a thing has to get half its size on to have a direction
        assert right or far < 0.1, scene
    assert short.mean() > 0.95


def test_a_picture_has_no_motion_so_only_colour_and_shape_count() -> None:
    prompts = ["a red square moving left", "a blue square moving", "a thing moving up"]
    result = score(np.repeat(render([RED])[:, :1], 3, 0), prompts)
    assert result.values[:2].tolist() == [1.0, 0.5]
    assert result.values[2].isnan()
    assert result.details[2]["error"] == STILL
    assert [d["direction"] for d in result.details] == [None] * 3


@pytest.mark.parametrize("reward", ["shapes", "motion"])
def test_black_and_nan_clips_have_no_score(reward: str) -> None:
    clips = media(np.zeros((2, FRAMES, HEIGHT, WIDTH, 3)))
    clips.pixels[1, 0, 0, 0, 0] = math.nan
    result = rewards[reward](clips, [Prompt("a thing moving")] * 2)
    assert result.values.isnan().all()
    assert all("black or holds nan" in detail["error"] for detail in result.details)


def test_prompts_of_another_world_are_refused_before_the_run_with_their_lines() -> None:
    good = Prompt("a red square moving left", where="p.txt:1")
    bad = [Prompt("a cat", i, where=f"p.txt:{i}") for i in range(2, 7)]
    with RewardPool({"shapes": 1.0}, workers=0) as pool:
        pool.check([good])
        with pytest.raises(UsageError, match=r"5 of 6 prompts .*\(p.txt:2, p.txt:3, p.txt:4, \.\.\.\)"):
            pool.check([good, *bad])
    result = score(render([RED]), ["a cat"])
    assert result.values.isnan().all()
    assert "is not of the form" in result.details[0]["error"]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("a red square moving left", Asked("red", "square", "left")),
        ("A Blue  bar moving.", Asked("blue", "bar", None)),
        ("a thing moving up", Asked(None, None, "up")),
        ("a magenta thing moving", Asked("magenta", None, None)),
        ("a red square", None),
        ("a red square moving left and right", None),
        ("a mauve square moving left", None),
        ("two red squares moving left", None),
    ],
)
def test_what_a_prompt_asks_is_read_from_its_text(text: str, asked: Asked | None) -> None:
    assert asked_of(Prompt(text)) == asked
    assert asked_of(Prompt("whatever", target=text)) == asked


def test_motion_is_one_for_constant_velocity_and_falls_with_what_leaves_the_line() -> None:
    clip = render([RED])
    jump = clip[:, [0, 0, 0, 0, 0, 8, 8, 8, 8]]
    result = score(np.concatenate([clip, jump]), ["-"] * 2, "motion")
    steady, jumpy = result.values.tolist()
    assert steady > 0.999
    path = np.array([0.0] * 5 + [1.0] * 4)
    assert jumpy == pytest.approx(np.corrcoef(path, np.arange(9))[0, 1] ** 2, abs=1e-3)
    assert result.details[0]["speed"] == pytest.approx(RED.speed, abs=0.02)
    assert result.details[0]["residual"] < 0.1


def test_motion_counts_the_distance_up_to_half_the_height_of_the_thing() -> None:
    slow = render([replace(RED, speed=v) for v in (0.0, SIZES[0] / 8 / 4)])
    still, crawling = score(slow, ["-"] * 2, "motion").values.tolist()
    assert still == 0.0
    assert crawling == pytest.approx(SIZES[0] / 4 / RED.size, abs=0.02)


def test_motion_of_no_thing_is_zero_and_of_a_picture_nan() -> None:
    clip = render([RED])
    assert score(np.full_like(clip, 90), ["-"], "motion").values.tolist() == [0.0]
    assert score((clip // 2 + clip[:, ::-1] // 2), ["-"], "motion").values.tolist() == [0.0]
    picture = score(clip[:, :1], ["-"], "motion")
    assert picture.values.isnan().all()
    assert picture.details[0]["error"] == STILL
