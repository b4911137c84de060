"""Devices by name, and what a run takes on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowkit.errors import UsageError
from flowkit.runtime import env
from flowkit.runtime.device import memory_estimate, pick


def machine(monkeypatch: pytest.MonkeyPatch, *, cards: int = 0, apple: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)


@pytest.mark.parametrize(
    ("cards", "apple", "best"), [(0, False, "cpu"), (2, False, "cuda"), (0, True, "mps"), (1, True, "cuda")]
)
def test_auto_is_the_best_there_is(
    monkeypatch: pytest.MonkeyPatch, cards: int, apple: bool, best: str
) -> None:
    machine(monkeypatch, cards=cards, apple=apple)
    assert pick("auto") == torch.device(best)


def test_a_card_is_picked_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cards=2)
    assert pick("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "no device is called 'gpu'"),
        ("cpu:1", "no device is called"),
        ("cuda:x", "no device is called"),
        ("cuda:-1", "no device is called"),
        ("", "no device is called"),
        ("cuda:2", "torch sees 2 CUDA devices"),
        ("mps", "torch sees no Apple GPU"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    machine(monkeypatch, cards=2)
    with pytest.raises(UsageError, match=message):
        pick(name)


SMALL: dict[str, Any] = {
    "weights": 1000, "trainable": 10, "full": False, "dtype_bytes": 2, "layers": 3, "width": 8, "tokens": 5,
    "micro": 2, "gradient_checkpointing": False, "latent": 7, "images": 4, "states": 11, "other_weights": 500,
}  # fmt: skip


def test_the_parts_of_the_memory_are_those_of_the_formula() -> None:
    assert memory_estimate(**SMALL) == {
        "weights": 2000,
        "trained": 40,
        "gradients": 40,
        "optimizer": 80,
        "ema": 40,
        "reference": 0,
        "encoders": 1000,
        "latents": 4 * 11 * 7 * 4,
        "activations": 3 * 17 * 2 * 5 * 8 * 2,
        "total": 2000 + 40 * 3 + 80 + 1000 + 4 * 11 * 7 * 4 + 3 * 17 * 2 * 5 * 8 * 2,
    }


def test_full_training_holds_its_weights_once_and_a_copy_for_the_reference() -> None:
    full = {**SMALL, "full": True, "trainable": 1000}
    assert memory_estimate(**full)["weights"] == memory_estimate(**full)["reference"] == 0
    assert memory_estimate(**full)["trained"] == 4000
    assert memory_estimate(**{**full, "reference": True})["reference"] == 2000
    assert memory_estimate(**{**SMALL, "reference": True})["reference"] == 0  # adapters off


def test_checkpointing_keeps_one_number_a_layer_and_redoes_one_layer() -> None:
    light = memory_estimate(**{**SMALL, "gradient_checkpointing": True})
    assert light["activations"] == (3 + 17) * 2 * 5 * 8 * 2


def test_the_activations_of_a_real_block_are_about_as_estimated() -> None:
    # What autograd keeps of an SD3-like block (MLP ratio 4) within a third, as the docstring claims.
    width, tokens = 64, 48
    block = torch.nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(2, tokens, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        out = block(x)
    assert out.requires_grad
    sizes = {**SMALL, "layers": 1, "width": width, "tokens": tokens, "dtype_bytes": 4}
    assert sum(kept.values()) == pytest.approx(memory_estimate(**sizes)["activations"], rel=1 / 3)


def test_the_environment_is_json_and_says_what_matters() -> None:
    about = json.loads(json.dumps(env.describe(seed=7)))
    assert about["seed"] == 7
    assert about["versions"]["torch"] == torch.__version__
    assert about["hardware"]["cores"] >= 1
    assert about["python"].startswith("3.")


def test_the_environment_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert env.describe()["git"] is None
    assert env.version("no-such-package-at-all") is None


def test_the_commit_is_of_a_checkout_that_holds_the_file(tmp_path: Path) -> None:
    import subprocess

    def git(*arguments: str) -> None:
        author = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert env.git_commit(tmp_path) is None
    git("init")
    (tmp_path / "other.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    assert env.git_commit(tmp_path) is None  # some other project's checkout
    (tmp_path / "env.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "two")
    clean = env.git_commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "env.py").write_text("2")
    assert env.git_commit(tmp_path) == f"{clean}+changes"
