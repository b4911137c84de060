from __future__ import annotations

import inspect
from typing import get_args

import pytest
from pydantic import ValidationError

from flowkit.config.grpo import LEVELS, GrpoConfig, KlName, LawName
from flowkit.config.load import resolve
from flowkit.config.sections import RESOLUTIONS, SCHEDULE_SETTINGS, ScheduleConfig, ScheduleName
from flowkit.config.strict_yaml import parse_document
from flowkit.errors import UsageError
from flowkit.flow.laws import LAWS
from flowkit.flow.policy import KLS
from flowkit.flow.schedule import SCHEDULES
from flowkit.flow.windows import trained_steps
from flowkit.types import Size
from tests.config.small import SMALL


def config(*overrides: str) -> GrpoConfig:
    return resolve(GrpoConfig, parse_document(SMALL, "c.yaml"), overrides).config


def refusal(*overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        config(*overrides)
    return str(caught.value)


def test_the_names_in_the_schema_are_those_of_the_tables_in_flow() -> None:
    assert set(get_args(LawName)) == set(LAWS)
    assert set(get_args(KlName)) == set(KLS)
    assert set(get_args(ScheduleName)) == {"auto", *SCHEDULES} == set(SCHEDULE_SETTINGS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_settings_of_a_schedule_are_the_arguments_of_its_function(name: str) -> None:
    arguments = {
        k: p for k, p in inspect.signature(SCHEDULES[name]).parameters.items() if k not in ("n", "dtype")
    }
    needs, may_have = SCHEDULE_SETTINGS[name]
    found_elsewhere = {"mu"} if name == "dynamic" else set()  # by the number of tokens, see generate.grid_of
    assert {k for k, p in arguments.items() if p.default is p.empty} == set(needs) | found_elsewhere
    assert set(arguments) == {*needs, *may_have}


@pytest.mark.parametrize("steps", [2, 6, 7, 50, 100])
@pytest.mark.parametrize("fraction", [0.5, 0.58, 0.99, 1.0])
def test_trained_steps_are_counted_as_flow_counts_them(steps: int, fraction: float) -> None:
    rollout = config(f"rollout.steps={steps}", f"rollout.train_fraction={fraction}").rollout
    assert rollout.trained_steps == len(trained_steps(steps, fraction))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["steps=0"], "'steps' is 0, it must be 1 or more"),
        (["rollout.steps=0"], "'rollout.steps' is 0, it must be 1 or more"),
        (
            ["rollout.samples=1"],
            "'rollout.samples' is 1, it must be 2 or more (a group of one has no advantage)",
        ),
        (["rollout.groups=0"], "'rollout.groups' is 0, it must be 1 or more"),
        (["rollout.steps=1"], "train_fraction 0.99 of 1 steps leaves none to train; use 2 or more steps"),
        (
            ["rollout.window={size: 7, hi: 7}"],
            "a window of 7 is larger than the 5 trained of 6 steps; use size 1 to 5",
        ),
        (
            ["rollout.window={size: 2, hi: 6}"],
            "hi 6 lets the window pass the 5 trained of 6 steps; use hi 5 or less",
        ),
        (
            ["rollout.window={size: 3, lo: 1, hi: 3}"],
            "a window of 3 does not fit into steps 1 to 3; use size 1 to 2",
        ),
        (
            ["rollout.window={size: 1, lo: 3, hi: 3}"],
            "the window's lo 3 is not below its hi 3; use lo 0 to 2",
        ),
        (["rollout.law=flow-sd"], "did you mean 'flow-sde'?"),
        (
            ["rollout.law=ode"],
            "law 'ode' has no noise to learn from; use one of flow-sde, dance, cps, consistency",
        ),
        (["rollout.level=0"], "level 0 does not fit law 'flow-sde': use more than 0, at most 2"),
        (
            ["rollout.law=cps", "rollout.level=1.5"],
            "level 1.5 does not fit law 'cps': use more than 0, at most 1",
        ),
        (["rollout.level=2.5"], "'rollout.level' is 2.5, it must be 2 or less"),
        (
            ["rollout.law=cps", "rollout.train_fraction=1"],
            "trains the last step, where law 'cps' has no noise; use 0.99",
        ),
        (["rollout.t_at_one=nex"], "it must be next or a number; did you mean 'next'?"),
        (["rollout.t_at_one=1.0"], "it must be next or less than 1"),
        (
            ["policy.updates=3"],
            "2 groups do not split into 3 equal updates; use updates 2",
        ),
        (
            ["rollout.groups=8", "policy.updates=3"],
            "8 groups do not split into 3 equal updates; use updates 2 or 4",
        ),
        (["reward.ocr=.inf"], "'reward.ocr' is .inf, it must be a finite number"),
        (["policy.kl=-1"], "'policy.kl' is -1, it must be 0 or more"),
        (["size=96"], "'size' is 96, it must be text"),
        (["size=96x"], "size '96x' is not WIDTHxHEIGHT in pixels, such as 512x512"),
        (["size=96*32"], "size '96*32' is not WIDTHxHEIGHT"),
        (["size=0x0"], "'size' is 0, it must be text"),
        (["size='4x32'"], "size '4x32' is out of range"),
        (["device=gpu"], "device 'gpu' is not one of auto, cpu, mps, cuda, cuda:0 and so on"),
        (["reward={ocr: 0, jpeg: 0}"], "every reward has weight 0, so nothing is learned; give one a weight"),
        (
            ["train=full", "lora.path=x"],
            "lora.path is given but train is 'full'; use train=lora, or drop the path",
        ),
        (
            ["rollout.schedule.shift=3"],
            "schedule 'auto' takes no 'shift'; these do: static, sd3-rl, rcm-teacher",
        ),
        (["rollout.schedule.name=static"], "schedule 'static' needs 'shift'; give it, or use 'auto'"),
        (["rollout.schedule={name: power, smin: 0.5, smax: 0.4}"], "smin 0.5 must be below smax 0.4"),
        (
            ["rollout.schedule={name: logit-linear, a: 0}"],
            "for schedule 'logit-linear' it must be more than 0",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_what_would(overrides: list[str], sentence: str) -> None:
    message = refusal(*overrides)
    assert message.startswith(f"override {overrides[-1]!r}: ")
    assert sentence in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.window={size: 5, hi: 5}"],
        ["rollout.window={size: 1, lo: 4, hi: 5}"],
        ["rollout.law=consistency", "rollout.level=0"],
        ["rollout.law=cps", "rollout.level=1"],
        ["rollout.steps=1", "rollout.train_fraction=1"],
        ["rollout.t_at_one=0.5"],
        ["rollout.schedule={name: static, shift: 3}"],
        ["rollout.schedule={name: sd3-rl}"],
        ["policy.updates=1"],
        ["device='cuda:1'"],
        ["reward.jpeg=-0.1"],
        ["report_to=[]"],
        ["rollout.guidance=0"],
    ],
)
def test_values_at_the_edge_of_the_legal_are_taken(overrides: list[str]) -> None:
    config(*overrides)


def test_the_settings_of_a_schedule_are_those_given() -> None:
    assert config("rollout.schedule={name: static, shift: 3}").rollout.schedule.settings == {"shift": 3.0}
    assert ScheduleConfig().settings == {}


def test_dropout_is_refused_where_a_step_is_replayed() -> None:
    with pytest.raises(UsageError, match=r"lora\.dropout.*no ratio would start at 1"):
        config("train=lora", "lora.dropout=0.1")


def test_derived_values() -> None:
    c = config()
    assert c.pixels == Size(96, 32)
    assert config("size=832x480x81").pixels == Size(832, 480, 81)


@pytest.mark.parametrize(
    "size", ["96", "96x32x", "96x32x0", "96x32x4x4", "96x32x10000", "7x32", "-8x32", "8 x 8"]
)
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(UsageError, match="size"):
        config(f"size={size}")


def test_every_resolution_has_the_sides_of_its_aspect_to_a_sixteenth_pixel_grid() -> None:
    for shapes in RESOLUTIONS.values():
        assert list(shapes) == ["1:1", "4:3", "3:4", "16:9", "9:16"]
        for aspect, size in shapes.items():
            across, down = map(int, aspect.split(":"))
            assert size.width % 16 == size.height % 16 == 0
            # 832x480 stands for 853x480, the nearest multiple of 32
            assert size.width / size.height == pytest.approx(across / down, rel=0.03)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().steps = 4  # type: ignore[misc]


def test_every_level_bound_belongs_to_a_law_that_takes_a_level() -> None:
    assert set(LEVELS) == set(LAWS) - {"ode", "consistency"}
