"""The figures of tiny-wan, measured on models whose figures are known: the world itself, and spoiled copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from flowkit.assets.measure_clips import OFTEN, choice, kept, rows, scenes_of, seen
from flowkit.assets.shapes import COLOURS, DIRECTIONS, SHAPES, draw_scene, prompt_of, render
from flowkit.data.prompts import read
from flowkit.models import Cond
from flowkit.rewards.shapes import asked_of
from flowkit.types import Media, Prompt, Size

TABLES = [list(SHAPES), list(COLOURS), list(DIRECTIONS)]


class World:
    """A flow whose clips are rendered: three numbers go where the prompt says, the fourth, noise, picks the scene."""

    device = torch.device("cpu")

    def __init__(self, modes: int = 10**6, keep: float = 1.0) -> None:
        self.modes, self.keep = modes, keep
        self.kept: list[Tensor] = []

    def text_key(self) -> str:
        return "world"

    def free_text(self) -> None:
        pass

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        return (4,)

    def schedule(self, n: int, size: Size) -> Tensor:
        return torch.linspace(1, 0, n + 1, dtype=torch.float64)

    def encode(self, prompts: Sequence[str]) -> Cond:
        asked = [asked_of(Prompt(p)) for p in prompts]
        parts = [(a.shape, a.colour, a.direction) for a in asked if a is not None]
        rows = [[table.index(str(part)) for table, part in zip(TABLES, row, strict=True)] for row in parts]
        return Cond({"goal": torch.tensor(rows, dtype=torch.float32)})

    def velocity(self, x: Tensor, t: Tensor, cond: Cond, guidance: float = 1.0) -> Tensor:
        v = torch.zeros_like(x)
        v[:, :3] = (x[:, :3] - cond.tensors["goal"]) / t[:, None]
        return v

    def decode(self, x0: Tensor) -> Media:
        return Media(torch.stack([self._clip(row) for row in x0]))

    def encode_media(self, pixels: Tensor) -> Tensor:
        first = len(self.kept)
        self.kept += list(pixels)
        return torch.tensor([[-1.0, 0.0, 0.0, float(first + i)] for i in range(len(pixels))])

    def _clip(self, row: Tensor) -> Tensor:
        if row[0] < -0.5:
            return self.kept[int(row[3])] * self.keep
        shape, colour, direction = (
            table[int(i)] for table, i in zip(TABLES, row[:3].round().tolist(), strict=True)
        )
        rng = np.random.default_rng(int(abs(float(row[3])) * 1e6) % self.modes)
        scene = draw_scene(rng)
        while (scene.shape, scene.direction) != (shape, direction):
            scene = draw_scene(rng)
        (clip,) = render([replace(scene, colour=colour)])
        return torch.from_numpy(clip).permute(0, 3, 1, 2).float() / 255


@pytest.mark.slow
def test_a_model_that_is_the_world_has_all_of_everything() -> None:
    figures = dict(rows(World(), 20, [(2, 3.0), (1, 1.0)]))
    assert list(figures) == [
        "autoencoder",
        "steps 2 guidance 3",
        "steps 1 guidance 1",
        "diversity, steps 2 guidance 3",
        "diversity, steps 1 guidance 1",
    ]
    assert figures["autoencoder"].pop("motion") > 0.99
    # of 20 clips before four grounds, by chance
    assert figures["autoencoder"].pop("grounds") < 0.4
    assert figures["autoencoder"] == {"exact": 1.0, "mean": 1.0, "error": 0.0}
    assert figures["steps 2 guidance 3"]["exact"] == figures["steps 1 guidance 1"]["mean"] == 1.0
    found = figures["diversity, steps 2 guidance 3"]
    assert (found["seen"], found["prompts"]) == (OFTEN, 6)
    # the mean over six prompts of deviations that 32 clips give to 10 % each, those above 1 cut off
    assert found["mean"] > 0.88


def test_a_model_of_one_mode_a_prompt_is_right_and_has_no_choice() -> None:
    figures = dict(rows(World(modes=1), 6, [(1, 3.0)]))
    assert figures["steps 1 guidance 3"]["exact"] == 1.0
    found = figures["diversity, steps 1 guidance 3"]
    assert [found[part] for part in ("x", "y", "size", "speed")] == [0.0] * 4
    assert found["ground"] < 0.4


def test_an_autoencoder_that_loses_half_the_light_is_seen_to() -> None:
    scenes = [draw_scene(np.random.default_rng(seed)) for seed in range(40)]
    whole, lost = (kept(World(keep=keep), scenes) for keep in (1.0, 0.5))
    assert (whole["exact"], whole["error"]) == (1.0, 0.0)
    # dark grounds halve too, so a thing stays a thing, but its colour is no ink of the world
    assert lost["exact"] == 0.0
    assert lost["error"] == pytest.approx(float(render(scenes).mean()) / 255 / 2, abs=1e-3)


def test_clips_that_cannot_be_scored_are_counted_as_wrong() -> None:
    scene = draw_scene(np.random.default_rng(0))
    clips = torch.from_numpy(render([scene, scene])).permute(0, 1, 4, 2, 3).float() / 255
    clips[1] = 0.0
    found = seen(Media(clips), [prompt_of(scene)] * 2)
    assert (found["exact"], found["mean"]) == (0.5, 0.5)
    assert found["motion"] == pytest.approx(0.5, abs=0.01)
    nothing = choice(Media(clips[1:].repeat(4, 1, 1, 1, 1)), ["a thing moving"], [[scene, scene]])
    assert nothing == {"prompts": 0}


def test_the_scenes_of_a_prompt_are_those_that_it_may_stand_for() -> None:
    rng = np.random.default_rng(1)
    for prompt in read("builtin:shapes-train")[::20]:
        asked = asked_of(prompt)
        assert asked is not None
        for scene in scenes_of(prompt.text, rng, 3):
            assert all(value in (None, getattr(scene, part)) for part, value in asdict(asked).items())
    with pytest.raises(ValueError, match="no prompt of the moving things"):
        scenes_of("a cat", rng, 1)
