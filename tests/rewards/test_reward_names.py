from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from flowkit.errors import UsageError, UserError
from flowkit.rewards import REWARDS, check, load, total
from flowkit.types import Media, Prompt, Scores

MEDIA = Media(torch.rand(3, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0)))
PROMPTS = [Prompt(f"picture {i}", i) for i in range(3)]


def scores(*values: float) -> Scores:
    return Scores(torch.tensor(values), [{} for _ in values])


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"reward 'jpg' is unknown: did you mean 'jpeg'\?"):
        load("jpg")


def test_a_function_out_of_tree_gives_tensor_or_list_and_both_become_scores() -> None:
    of_tensor = load("tests.rewards.faulty:redness")(MEDIA, PROMPTS)
    assert torch.equal(of_tensor.values, MEDIA.pixels[:, 0, 0].mean((1, 2)))
    of_list = load("tests.rewards.faulty:numbers")(MEDIA, PROMPTS)
    assert of_list.values.tolist() == [0.0, 1.0, 2.0]
    assert of_list.values.dtype == torch.float32
    assert of_list.details == [{}, {}, {}]


def test_a_class_out_of_tree_is_built_once_and_may_refuse_prompts() -> None:
    reward = load("tests.rewards.faulty:Learned")
    reward(MEDIA, PROMPTS)
    assert reward(MEDIA, PROMPTS).values.tolist() == [2.0, 2.0, 2.0]
    check([reward], PROMPTS)
    with pytest.raises(UsageError, match="a prompt is empty"):
        check([reward], [Prompt("")])


def test_a_module_in_the_current_folder_is_found_as_python_m_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards_here.py").write_text("def one(media, prompts):\n    return [1] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert load("my_rewards_here:one")(MEDIA, PROMPTS).values.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.rewards.faulty:rednes", r"has no function 'rednes'; did you mean 'redness'\?"),
        ("tests.rewards.faulty:not_callable", "has no function 'not_callable'"),
        ("tests.rewards.faulty:", "has no function ''"),
        ("tests.rewards.faulty:Mute", r"the class has no __call__"),
        ("no_such_package.mod:fn", "no module 'no_such_package.mod'"),
        (":fn", "write it as my_pkg.mod:fn"),
        (".mod:fn", "write it as my_pkg.mod:fn"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_usage_error_that_says_why(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(name)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_thing", "needs another package: No module named 'no_such_thing'"),
        ("1 / 0", "failed with ZeroDivisionError"),
        ("def fn(:", "failed with SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_said_in_one_sentence(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_reward", raising=False)
    with pytest.raises(UserError, match=said):
        load("broken_reward:fn")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("short", r"values of shape \[1\] for 3 pictures"),
        ("words", "returned str, not one number a picture"),
    ],
)
def test_a_result_that_is_not_one_number_a_picture_stops_the_run(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(f"tests.rewards.faulty:{name}")(MEDIA, PROMPTS)


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("flowkit.rewards.find_spec", lambda name: None if name == "rapidocr" else real(name))
    with pytest.raises(UserError, match=r"reward 'ocr' needs rapidocr: pip install 'flowkit\[ocr\]'"):
        load("ocr")


def test_the_total_is_the_weighted_sum_and_nan_where_any_is_nan() -> None:
    both = {"ocr": scores(1.0, 0.5, math.nan), "jpeg": scores(-2.0, math.nan, -1.0)}
    result = total(both, {"ocr": 1.0, "jpeg": 0.25})
    assert result[0] == 0.5
    assert result.isnan().tolist() == [False, True, True]
    assert total({"ocr": both["ocr"]}, {"ocr": 0.0}).isnan().tolist() == [False, False, True]


def test_jpeg_is_the_short_name_of_compressibility() -> None:
    assert REWARDS["jpeg"] == REWARDS["jpeg-compressibility"]
