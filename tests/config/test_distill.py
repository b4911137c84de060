from __future__ import annotations

import pytest

from flowkit.config.distill import DistillConfig
from flowkit.config.load import resolve
from flowkit.config.strict_yaml import parse_document
from flowkit.errors import UsageError

SMALL = """\
algorithm: distill
model: m
steps: 9
out: o
size: 32x32
dtype: float32
batch: 8
data: {kind: made, path: p, prompts: q}
teacher: {guidance: 3.0}
stages: {scm: 4, scm+dmd: 5}
optim: {lr: 1e-4, critic_lr: 1e-4, micro: 4}
"""


def config(*overrides: str) -> DistillConfig:
    return resolve(DistillConfig, parse_document(SMALL, "c.yaml"), overrides).config


def test_the_stages_share_the_iterations_in_their_order() -> None:
    cfg = config()
    assert [cfg.stage_at(i) for i in (0, 3, 4, 8)] == [("scm", 0), ("scm", 0), ("scm+dmd", 4), ("scm+dmd", 4)]
    with pytest.raises(IndexError):
        cfg.stage_at(9)


def test_the_turns_of_each_stage_add_up_to_the_steps_of_the_run() -> None:
    assert config("dmd.freq=2").turns == [("scm", 4, 0), ("scm+dmd", 3, 2)]
    assert config("dmd.freq=2", "steps=6").turns == [("scm", 4, 0), ("scm+dmd", 1, 1)]
    assert config("stages={dmd: 0, scm: 9}").turns == [("dmd", 0, 0), ("scm", 9, 0)]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stages={scm: 4, smc: 5}", "there is no stage 'smc'; did you mean 'scm'"),
        ("stages={scm: 4}", "4 iterations together, fewer than steps 9"),
        ("data={kind: prompts, prompts: q}", "nothing for stage 'scm' to noise"),
        ("data={kind: shards}", "needs a path"),
        ("data={kind: made, path: p}", "needs prompts"),
        ("train=full", "one base carries two adapters"),
        ("student.thetas=[1.0, 1.4]", "do not fall"),
        ("student.steps=5", "5 steps need 4 thetas"),
        ("eval.steps=[1, 5]", "at most 4 steps"),
        ("reward={ocr: 1}", "need held-out prompts"),
        ("optim.micro=16", "more than the batch of 8"),
        ("times.student={lo: 0.6, hi: 0.5}", "is not below hi"),
        ("lora.dropout=0.1", "would drop other weights"),
        ("scm.fd_type=3", "scm.fd_type"),
        ("scm.fd_step=0.5", "scm.fd_step"),
        ("teacher={}", "teacher.guidance"),
        ("ema.width=0.4", "ema.width"),
        ("shard=true", "shards are for all weights"),
    ],
)
def test_a_config_that_cannot_work_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        config(override)
    assert sentence in str(error.value)


def test_shards_compute_in_bfloat16_over_float32_weights_and_park_nothing() -> None:
    full = ("train=full", "networks=three")
    assert config(*full, "shard=true", "dtype=bfloat16").dtype == "bfloat16"
    with pytest.raises(UsageError, match="lose small updates"):
        config(*full, "dtype=bfloat16")
    with pytest.raises(UsageError, match="moments in shards stay where they are"):
        config(*full, "shard=true", "optim.offload=true")


def test_full_weights_and_dmd_of_prompts_are_fine_with_what_they_need() -> None:
    assert config("train=full", "networks=three").networks == "three"
    assert config("data={kind: prompts, prompts: q}", "stages={dmd: 9}").data.kind == "prompts"
