"""Several processes act as one; the launcher ends as a whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flowkit.errors import UsageError, UserError
from flowkit.runtime import dist
from flowkit.runtime.dist import Dist, init, launch

WORKER = """
import json, sys
from pathlib import Path
import torch
from flowkit.errors import UserError
from flowkit.runtime import dist

seen = {}
with dist.init("cpu") as d:
    count = 0
    real = dist.td.all_reduce
    def counted(*args, **kw):
        global count; count += 1
        return real(*args, **kw)
    dist.td.all_reduce = counted
    double = torch.ones(2, dtype=torch.float64)
    tensors = [torch.full((3, 2), d.rank + 1.0).T, torch.tensor(10.0 * d.rank), double]
    d.all_reduce_sum_(tensors)
    seen["reduced"], seen["collectives"] = [t.tolist() for t in tensors], count
    dist._BUCKET = 4
    many = [torch.full((3,), float(d.rank + k)) for k in range(3)]
    d.all_reduce_sum_(many)
    seen["bucketed"] = [t.tolist() for t in many]
    seen["gathered"] = d.gather_objects({"rank": d.rank, "name": "x" * d.rank})
    seen["flags"] = d.all_max([d.rank, 5 - d.rank])
    ran = []
    seen["main"] = d.on_main(lambda: ran.append(1) or "from 0")
    seen["ran"] = len(ran)
    def fail():
        raise UserError("disk full")
    try:
        d.on_main(fail)
    except UserError as error:
        seen["error"] = str(error)
    def crash():
        raise ValueError("no such thing")
    try:
        d.on_main(crash)
    except (UserError, ValueError) as error:
        seen["crash"], seen["told"] = repr(error), getattr(error, "told_by_main", None)
    try:
        d.all_or_none(UserError("reward broke") if d.rank == 1 else None)
    except UserError as error:
        seen["one"] = [str(error), error.told_by_main]
    d.all_or_none(None)
    seen["rank"], seen["main_flag"] = [d.rank, d.local_rank, d.world], d.main
Path(sys.argv[1], f"{seen['rank'][0]}.json").write_text(json.dumps(seen))
"""


def test_two_processes_act_as_one(tmp_path: Path) -> None:
    assert launch(2, [sys.executable, "-c", WORKER, str(tmp_path)]) == 0
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, seen in enumerate(both):
        assert seen["rank"] == [rank, rank, 2]
        assert seen["main_flag"] == (rank == 0)
        assert seen["reduced"] == [[[3.0] * 3] * 2, 10.0, [2.0, 2.0]]
        assert seen["collectives"] == 2  # one for each dtype, not one for each tensor
        assert seen["bucketed"] == [[1.0] * 3, [3.0] * 3, [5.0] * 3]
        assert seen["gathered"] == [{"rank": 0, "name": ""}, {"rank": 1, "name": "x"}]
        assert seen["flags"] == [1, 5]
        assert seen["main"] == "from 0"
        assert seen["ran"] == (1 if rank == 0 else 0)
        assert seen["error"] == "disk full"
        assert "no such thing" in seen["crash"]
        assert seen["told"] == (None if rank == 0 else True)  # the failing process has its own traceback
        assert seen["one"] == ["reward broke", rank == 1]


def test_a_lone_process_needs_no_collective() -> None:
    with init("cpu") as alone:
        assert (alone, alone.main) == (Dist(), True)
        tensor = torch.ones(2)
        alone.all_reduce_sum_([tensor])
        alone.all_max([0])
        assert tensor.tolist() == [1.0, 1.0]
        assert alone.gather_objects("a") == ["a"]
        assert alone.all_max([3, 1]) == [3, 1]
        assert alone.on_main(lambda: 7) == 7


def test_a_lone_world_of_one_rank_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with init("cpu") as alone:
        assert alone == Dist()


def test_an_incomplete_environment_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="WORLD_SIZE is 2 but RANK, MASTER_ADDR, MASTER_PORT"), init("cpu"):
        pass


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            (3, 4, 1),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, (3, 4, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 3)),
    ],
)
def test_ranks_are_read_as_torchrun_and_mpirun_set_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int, int, int]
) -> None:
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert dist._environment() == expected


def test_one_process_of_an_accelerate_launch_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(UsageError, match="--processes N or torchrun"), init("cpu"):
        pass


def test_user_errors_survive_the_way_between_ranks() -> None:
    import pickle

    back = pickle.loads(pickle.dumps(UsageError("no such key")))
    assert (type(back), str(back), back.code) == (UsageError, "no such key", 2)
    assert isinstance(back, UserError)


def shell(script: str) -> list[str]:
    return ["bash", "-c", script]


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 2", 2), ("exit $((RANK * 3))", 3), ("[ $RANK = 1 ] && kill -9 $$; exit 0", 137)],
)
def test_the_exit_code_is_the_first_failure(script: str, code: int) -> None:
    assert launch(2, shell(script)) == code


def test_when_one_dies_the_rest_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "_GRACE", 0.1)
    start = time.monotonic()
    stubborn = "if [ $RANK = 0 ]; then exit 4; fi; trap '' TERM; exec sleep 300"
    assert launch(2, shell(stubborn)) == 4
    assert time.monotonic() - start < 100


def test_the_others_may_finish_what_they_do(tmp_path: Path) -> None:
    assert launch(2, shell(f"if [ $RANK = 0 ]; then exit 4; fi; sleep .3; touch {tmp_path}/done")) == 4
    assert (tmp_path / "done").exists()


def test_a_process_does_not_get_the_terminals_signals_besides_the_launchers() -> None:
    # Twice the same signal would drop the step that an orderly stop finishes.
    assert launch(1, [sys.executable, "-c", "import os; assert os.getsid(0) == os.getpid()"]) == 0


LAUNCHER = """
import sys
from flowkit.runtime import dist
dist._GRACE = 0.1
sys.exit(dist.launch(2, ["bash", "-c", sys.argv[1]]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_process_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    # Rank 0 takes longer than the grace given after a failure: an orderly stop is no failure.
    got = f"{tmp_path}/got$RANK"
    script = (
        f"trap 'echo got >> {got}' INT TERM; touch {tmp_path}/ready$RANK;"
        f"until [ -e {got} ]; do sleep .02; done; [ $RANK = 1 ] || sleep .5; sleep .1; exit {code}"
    )
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, script], start_new_session=True) as process:
        while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        os.killpg(process.pid, number)  # as a terminal does
        assert process.wait(200) == code
    assert [(tmp_path / f"got{rank}").read_text() for rank in (0, 1)] == ["got\n", "got\n"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    on_term = f"touch {tmp_path}/ended$RANK; kill %1; exit 143"
    script = f"trap '{on_term}' TERM; sleep 300 & touch {tmp_path}/ready$RANK; wait"
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, script]) as process:
        while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        process.kill()
        process.wait()
    for _ in range(2000):
        if all((tmp_path / f"ended{rank}").exists() for rank in (0, 1)):
            return
        time.sleep(0.05)
    raise AssertionError("a rank outlived its launcher")
