"""What every reward of the table keeps to, whatever it measures."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from flowkit.assets.words import Sign, render
from flowkit.rewards import REWARDS, Reward, load
from flowkit.types import Media, Prompt

WORDS = ("CAT", "HORSE", "OX")
PROMPTS = [Prompt(f'the word "{word}"', i) for i, word in enumerate(WORDS)]
PIXELS = np.stack([render(Sign(word, "black", "mint", "slab")) for word in WORDS])


@pytest.fixture(scope="module", params=REWARDS)
def reward(request: pytest.FixtureRequest) -> Reward:
    return load(request.param)


@pytest.fixture
def media() -> Media:
    return Media(torch.from_numpy(PIXELS).permute(0, 3, 1, 2)[:, None].float() / 255)


def test_it_gives_one_finite_float32_and_one_json_detail_a_picture(reward: Reward, media: Media) -> None:
    scores = reward(media, PROMPTS)
    assert scores.values.shape == (3,)
    assert scores.values.dtype == torch.float32
    assert scores.values.isfinite().all()
    assert len(scores.details) == 3
    assert json.loads(json.dumps(scores.details, allow_nan=False)) == scores.details


def test_it_scores_a_batch_as_it_scores_each_picture(reward: Reward, media: Media) -> None:
    together = reward(media, PROMPTS)
    alone = torch.cat([reward(media[i : i + 1], PROMPTS[i : i + 1]).values for i in range(3)])
    torch.testing.assert_close(together.values, alone, rtol=0, atol=0)


def test_it_changes_neither_the_pictures_nor_its_mind(reward: Reward, media: Media) -> None:
    before = media.pixels.clone()
    first, second = reward(media, PROMPTS), reward(media, PROMPTS)
    assert torch.equal(media.pixels, before)
    assert torch.equal(first.values, second.values)
