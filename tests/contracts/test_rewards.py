"""What every reward of the table keeps to, whatever it measures."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flowkit.assets import shapes
from flowkit.assets.words import Sign, render
from flowkit.rewards import REWARDS, Reward, load
from flowkit.types import Media, Prompt

WORDS = ("CAT", "HORSE", "OX")
SIGNS = np.stack([render(Sign(word, "black", "mint", "slab")) for word in WORDS])[:, None]
SCENES = [shapes.draw_scene(np.random.default_rng(seed)) for seed in range(3)]
CLIPS = shapes.render(SCENES)
# What a reward is shown: pictures with words, unless it is one of clips.
SHOWN = {
    "words": (SIGNS, [Prompt(f'the word "{word}"', i) for i, word in enumerate(WORDS)]),
    "clips": (CLIPS, [Prompt(shapes.prompt_of(scene), i) for i, scene in enumerate(SCENES)]),
    "stills": (CLIPS[:, :1], [Prompt(shapes.prompt_of(scene), i) for i, scene in enumerate(SCENES)]),
}
CASES = [
    *((name, "words") for name in REWARDS if name not in ("shapes", "motion")),
    ("jpeg", "clips"),
    ("shapes", "clips"),
    ("shapes", "stills"),
    ("motion", "clips"),
]


@dataclass(frozen=True)
class Case:
    """A reward and what it is shown."""

    reward: Reward
    media: Media
    prompts: list[Prompt]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    name, shown = request.param
    pixels, prompts = SHOWN[shown]
    return Case(load(name), Media(torch.from_numpy(pixels).permute(0, 1, 4, 2, 3).float() / 255), prompts)


def test_every_reward_of_the_table_has_a_case() -> None:
    assert {name for name, _ in CASES} == set(REWARDS)


def test_it_gives_one_finite_float32_and_one_json_detail_a_picture(case: Case) -> None:
    scores = case.reward(case.media, case.prompts)
    assert scores.values.shape == (3,)
    assert scores.values.dtype == torch.float32
    assert scores.values.isfinite().all()
    assert len(scores.details) == 3
    assert json.loads(json.dumps(scores.details, allow_nan=False)) == scores.details


def test_it_scores_a_batch_as_it_scores_each_picture(case: Case) -> None:
    together = case.reward(case.media, case.prompts)
    alone = torch.cat([case.reward(case.media[i : i + 1], case.prompts[i : i + 1]).values for i in range(3)])
    torch.testing.assert_close(together.values, alone, rtol=0, atol=0)


def test_it_changes_neither_the_pictures_nor_its_mind(case: Case) -> None:
    before = case.media.pixels.clone()
    first, second = case.reward(case.media, case.prompts), case.reward(case.media, case.prompts)
    assert torch.equal(case.media.pixels, before)
    assert torch.equal(first.values, second.values)
