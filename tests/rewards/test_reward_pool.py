from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch

from flowkit.errors import UsageError, UserError
from flowkit.rewards.pool import UNFIT, RewardPool, reasons_of, refuse_failed
from flowkit.types import Media, Prompt

FAULTY = "tests.rewards.faulty:"


def media(count: int) -> Media:
    return Media(torch.rand(count, 1, 3, 8, 8, generator=torch.Generator().manual_seed(1)))


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(text, i) for i, text in enumerate(texts)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], seconds: float = 60.0) -> list[int]:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def test_scores_come_back_in_the_order_of_the_pictures_from_any_number_of_calls() -> None:
    with RewardPool({FAULTY + "numbers": 1.0}, workers=0, batch=2) as pool:
        scores = pool.submit(media(5), prompts(*"abcde")).result()
    assert scores[FAULTY + "numbers"].values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert pool.failures.pictures == 5


def test_pictures_are_scored_as_a_png_would_store_them() -> None:
    pixels = torch.full((1, 1, 3, 2, 2), 100.4 / 255)
    with RewardPool({FAULTY + "redness": 1.0}, workers=0) as pool:
        value = pool.submit(Media(pixels), prompts("a")).result()[FAULTY + "redness"].values
    torch.testing.assert_close(value, torch.tensor([100 / 255]), rtol=1e-6, atol=0)


def test_one_bad_picture_gives_nan_for_itself_and_for_no_other(caplog: pytest.LogCaptureFixture) -> None:
    name = FAULTY + "stumbles"
    with RewardPool({name: 1.0}, workers=0) as pool, caplog.at_level(logging.WARNING):
        scores = pool.submit(media(3), prompts("a", "bad", "c")).result()[name]
        pool.submit(media(1), prompts("bad")).result()
    assert scores.values[[0, 2]].tolist() == [0.0, 2.0]
    assert scores.values[1].isnan()
    assert scores.details == [{}, {"error": "ZeroDivisionError: no ink"}, {}]
    assert (pool.failures.failed, pool.failures.unfit) == (2, 0)
    assert dict(pool.failures.reasons) == {f"{name}: ZeroDivisionError: no ink": 2}
    assert [r.message for r in caplog.records] == [
        f"a picture could not be scored ({name}: ZeroDivisionError: no ink)"
    ]


def test_infinite_scores_and_details_that_json_cannot_hold_are_failures() -> None:
    with RewardPool({FAULTY + "gives_nan": 1.0, FAULTY + "odd_details": 1.0}, workers=0) as pool:
        scores = pool.submit(media(2), prompts("a", "bad")).result()
    assert scores[FAULTY + "gives_nan"].values.isnan().tolist() == [False, True]
    assert scores[FAULTY + "gives_nan"].details[1] == {"error": "the reward gave inf"}
    assert scores[FAULTY + "odd_details"].values.isnan().all()
    assert "not JSON serializable" in scores[FAULTY + "odd_details"].details[0]["error"]
    assert pool.failures.failed == 2  # pictures, not scores


def test_black_and_nan_pictures_are_counted_apart_and_never_scored() -> None:
    given = media(4)
    given.pixels[0] = 0
    given.pixels[1, 0, 0, 0, 0] = math.nan
    given.pixels[2] = 0.001  # black in the file that it would become
    with RewardPool({FAULTY + "numbers": 1.0}, workers=0) as pool:
        scores = pool.submit(given, prompts(*"abcd")).result()[FAULTY + "numbers"]
        nothing = pool.submit(given[:2], prompts(*"ab")).result()[FAULTY + "numbers"]
    assert scores.values.isnan().tolist() == [True, True, True, False]
    assert scores.values[3] == 3.0
    assert scores.details[:3] == [{"error": UNFIT}] * 3
    assert nothing.values.isnan().all()
    assert (pool.failures.unfit, pool.failures.failed) == (5, 0)


def test_more_than_the_allowed_share_of_failures_stops_with_the_reason() -> None:
    name = FAULTY + "stumbles"
    with RewardPool({name: 1.0}, workers=0) as pool:
        one = pool.submit(media(4), prompts("bad", "b", "c", "d")).result()
        two = pool.submit(media(4), prompts("bad", "b", "bad", "d")).result()
    refuse_failed("round 3", 1, 4, 0.25, reasons_of(one))
    with pytest.raises(UserError, match=r"round 3: 2 of 4 .* share of 0.25 .*2 x .*stumbles.*no ink"):
        refuse_failed("round 3", 2, 4, 0.25, reasons_of(two))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_reward_prints_stays_out_of_the_results(
    workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with RewardPool({FAULTY + "talks": 1.0}, workers=workers) as pool:
        pool.submit(media(1), prompts("a")).result()
    out, errors = capfd.readouterr()
    assert (out, "a reward talks" in errors) == ("", True)


def test_a_nan_in_the_details_is_a_fault_of_the_reward() -> None:
    name = FAULTY + "vague"
    with RewardPool({name: 1.0}, workers=0) as pool:
        scores = pool.submit(media(1), prompts("a")).result()[name]
    assert scores.values.isnan().all()
    assert "not JSON compliant" in scores.details[0]["error"]


def test_a_user_error_of_a_reward_stops_the_run_as_it_stands() -> None:
    with (
        RewardPool({FAULTY + "gives_up": 1.0}, workers=0) as pool,
        pytest.raises(UserError, match=r"^the reward server is down: start it$"),
    ):
        pool.submit(media(2), prompts("a", "b")).result()


def test_the_pool_lets_rewards_refuse_prompts_before_the_run() -> None:
    with RewardPool({"ocr": 1.0, "jpeg": 0.1}, workers=0) as pool:
        pool.check(prompts('the word "CAT"'))
        with pytest.raises(UsageError, match="1 of 1 prompts"):
            pool.check(prompts("no word"))


@pytest.mark.parametrize(
    ("weights", "said"),
    [({}, "no reward is named"), ({"ocr": math.inf}, "the weight inf"), ({"orc": 1.0}, "did you mean 'ocr'")],
)
def test_wrong_rewards_are_refused_before_any_process_starts(weights: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RewardPool(weights, workers=1)


def test_workers_give_what_this_process_gives_each_with_one_thread() -> None:
    names = {FAULTY + "redness": 1.0, "jpeg": 1.0, FAULTY + "threads": 1.0}
    asked = prompts(*[str(os.getpid())] * 7)
    with RewardPool(names, workers=0) as here:
        expected = here.submit(media(7), asked).result()
    with RewardPool(names, workers=2, batch=2) as pool:
        first, second = (pool.submit(media(7), asked) for _ in range(2))
        for scores in (first.result(), second.result()):
            for name in (FAULTY + "redness", "jpeg"):
                assert torch.equal(scores[name].values, expected[name].values)
                assert scores[name].details == expected[name].details
            assert scores[FAULTY + "threads"].values.tolist() == [1.0] * 7


def test_a_worker_that_is_killed_is_started_again_once_and_then_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RewardPool({FAULTY + "dies": 1.0}, workers=1) as pool, caplog.at_level(logging.WARNING):
        scores = pool.submit(media(2), [Prompt(str(tmp_path / "once"))] * 2).result()
        assert scores[FAULTY + "dies"].values.tolist() == [1.0, 1.0]
        assert pool.failures.restarts == 1
        assert caplog.messages == ["a reward worker died by signal 9; it is started again"]
        with pytest.raises(UserError, match="died by signal 9, and so did the one started in its place"):
            pool.submit(media(1), prompts("every time")).result()
        pid = pool._serving[0].process.pid
    assert pid is not None
    assert not alive(pid)


def test_a_user_error_crosses_the_process_with_its_exit_code_and_close_cancels_the_rest() -> None:
    pool = RewardPool({FAULTY + "gives_up": 1.0, FAULTY + "sleeps": 1.0}, workers=1)
    with pytest.raises(UserError, match=r"^the reward server is down: start it$"):
        pool.submit(media(1), prompts("a")).result()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(media(1), prompts("a"))


def test_close_ends_a_worker_in_the_middle_of_a_job_and_cancels_what_waits() -> None:
    pool = RewardPool({FAULTY + "sleeps": 1.0}, workers=1, batch=1)
    running, waiting = (pool.submit(media(1), prompts("sleep")) for _ in range(2))
    pid = pool._serving[0].process.pid
    assert pid is not None
    pool.close()
    assert wait_until_gone([pid]) == []
    for future in (running, waiting):
        with pytest.raises(CancelledError):
            future.result(timeout=5)


SCRIPT = """
import signal
import torch  # the workers import it from here, before flowkit can limit its threads by the environment
from flowkit.rewards import total
from flowkit.rewards.pool import RewardPool
from flowkit.types import Media, Prompt

NAMES = {"tests.rewards.faulty:threads": 1.0, "tests.rewards.faulty:sleeps": 0.0}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or what started it in the background has it ignored
    with RewardPool(NAMES, workers=2, batch=1) as pool:
        one = Media(torch.ones(1, 1, 3, 4, 4))
        single = total(pool.submit(one, [Prompt("")]).result(), NAMES).item()
        futures = [pool.submit(one, [Prompt("sleep")]) for _ in range(2)]
        print(single, *[worker.process.pid for worker in pool._serving], flush=True)
        futures[0].result()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_an_interrupted_or_killed_run(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": os.getcwd()},
        start_new_session=True,
    ) as run:
        try:
            assert run.stdout is not None
            single, *rest = run.stdout.readline().split()
            pids = [int(pid) for pid in rest]
            if number is signal.SIGINT:
                os.killpg(run.pid, number)  # as a terminal does: the workers get it too
            else:
                run.send_signal(number)
            _, errors = run.communicate(timeout=120)
        finally:
            run.kill()
    assert (single, len(pids)) == ("1.0", 2)
    assert wait_until_gone(pids) == []
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in errors
