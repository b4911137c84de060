from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from flowkit.errors import UsageError
from flowkit.rewards.pool import RewardPool
from flowkit.types import Media, Prompt

RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "add-a-reward.md"


def test_the_recipe_fits_forty_lines_and_its_code_runs_as_the_rewards_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RECIPE.read_text()
    assert len(text.splitlines()) <= 40
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text("\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)

    red = torch.zeros(1, 1, 3, 4, 4)
    red[:, :, 0] = 1
    prompts = [Prompt("a red square", target="red")]
    with RewardPool({"my_rewards:brightness": 0.1, "my_rewards:Colour": 1.0}, workers=0) as pool:
        pool.check(prompts)
        scores = pool.submit(Media(red), prompts).result()
        with pytest.raises(UsageError, match="red, green or blue"):
            pool.check([Prompt("a pink square", target="pink", where="p.jsonl:1")])
    torch.testing.assert_close(scores["my_rewards:brightness"].values, torch.tensor([1 / 3]))
    assert scores["my_rewards:Colour"].values.tolist() == [1.0]
    assert scores["my_rewards:Colour"].details == [{"mean": [1.0, 0.0, 0.0]}]
