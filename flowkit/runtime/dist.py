"""Several processes that act as one: the few collectives a trainer needs, and their launcher.

Everything is the identity on one process. Ranks are found in the environment that torchrun,
`accelerate launch` and `launch` set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or mpirun.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as td
from torch import Tensor

from flowkit.errors import UsageError, UserError
from flowkit.runtime.device import pick

T = TypeVar("T")
_BUCKET = 64 * 2**20  # elements; a LoRA fits one bucket, full weights are sent in slices of 256 MiB
_GRACE = 5.0  # seconds that the others get to end by themselves, and again after SIGTERM


@dataclass(frozen=True)
class Dist:
    """A process among its peers; `Dist()` is a lone process on the CPU.

    Attributes:
        rank: number of this process, from 0.
        world: how many processes there are.
        local_rank: number of this process on its machine.
        device: where this process computes.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def main(self) -> bool:
        """Whether this is the one process that writes files and talks."""
        return self.rank == 0

    def all_reduce_sum_(self, tensors: Sequence[Tensor]) -> None:
        """Adds each tensor over the ranks, in place; one collective per dtype, device and 64 M elements.

        Every rank gives the same shapes in the same order. The result is the same on every rank.
        """
        if self.world == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            td.all_reduce(flat)
            for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def gather_objects(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on every rank; each is pickled, so keep them small."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        td.all_gather_object(gathered, value)
        return cast("list[T]", gathered)

    def all_max(self, values: Sequence[int]) -> list[int]:
        """The largest of each number over the ranks: a flag raised on any rank is seen by all at once."""
        if self.world == 1:
            return list(values)
        highest = torch.tensor(values, dtype=torch.int64)
        td.all_reduce(highest, op=td.ReduceOp.MAX)
        return [int(value) for value in highest]

    def on_main(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 alone; its result comes to every rank, and so does its failure, as a UserError."""
        if self.world == 1:
            return work()
        box: list[Any] = [None]
        if self.main:
            try:
                box = [work()]
            except Exception as error:
                told = error if isinstance(error, UserError) else UserError(f"process 0 failed: {error!r}")
                td.broadcast_object_list([told], src=0)
                raise
        td.broadcast_object_list(box, src=0)
        if isinstance(box[0], UserError):
            box[0].told_by_main = True
            raise box[0]
        return cast("T", box[0])

    def all_or_none(self, error: UserError | None) -> None:
        """Raises on every rank the first error that any rank has; None on all ranks passes."""
        found = [e for e in self.gather_objects(error) if e is not None]
        if found:
            first = found[0]
            first.told_by_main = self.rank != 0  # where the first process raises it, too
            raise first


@contextmanager
def init(device: str = "auto") -> Iterator[Dist]:
    """Joins the processes that the environment tells of, and leaves them at the end.

    Args:
        device: as for `device.pick`; 'cuda' and 'auto' give every rank of a machine its own card.

    Raises:
        UsageError: the environment is incomplete or there are more ranks than cards.
    """
    rank, world, local_rank = _environment()
    here = pick(device)
    if world == 1:
        yield Dist(device=here)
        return
    if here.type == "cuda":
        if here == torch.device("cuda"):
            if local_rank >= torch.cuda.device_count():
                raise UsageError(f"rank {rank} has no card: {torch.cuda.device_count()} on this machine")
            here = torch.device("cuda", local_rank)
        torch.cuda.set_device(here)
    elif here.type != "cpu":
        raise UsageError(f"several processes run on cuda or cpu, not on {here.type}; give --device cpu")
    # Small objects and flags go over gloo on the host in either case.
    backend = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo"
    td.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(hours=1))
    try:
        yield Dist(rank, world, local_rank, here)
    finally:
        td.destroy_process_group()


def launch(processes: int, command: Sequence[str]) -> int:
    """Runs a command in several processes of this machine that `init` joins; the exit code of the whole.

    SIGINT and SIGTERM are handed to every process once. When one fails, the others get a few seconds to
    end by themselves and are then ended. The code is the first failure's (128 + n for signal n), else the
    first that is not 0 (130 and 143 of an orderly stop), else 0.
    """
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // processes))
    children: list[subprocess.Popen[bytes]] = []

    def forward(signum: int, _: FrameType | None) -> None:
        for child in children:
            child.send_signal(signum)

    handlers = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": threads}
            # In a session of its own a child does not get the terminal's Ctrl-C a second time.
            child = subprocess.Popen(
                list(command),
                env={**os.environ, **shared, **own},
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
            children.append(child)
        return _wait(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    codes: dict[int, int] = {}  # by rank, in the order of ending
    failures: list[int] = []
    pending = [(_GRACE, signal.SIGTERM), (2 * _GRACE, signal.SIGKILL)]
    failed_at = 0.0
    while len(codes) < len(children):
        for rank, child in enumerate(children):
            if rank in codes or (code := child.poll()) is None:
                continue
            codes[rank] = 128 - code if code < 0 else code
            if code not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
                failures.append(codes[rank])
                failed_at = failed_at or time.monotonic()
        if failures and pending and time.monotonic() > failed_at + pending[0][0]:
            _, number = pending.pop(0)
            for child in children:
                child.send_signal(number)  # no effect on those that have ended
        time.sleep(0.02)
    return next(iter([*failures, *(code for code in codes.values() if code)]), 0)


def _environment() -> tuple[int, int, int]:
    """Rank, number of processes and rank on this machine, as torchrun or mpirun set them."""

    def first(*names: str) -> str | None:
        return next((os.environ[name] for name in names if name in os.environ), None)

    world = first("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    rank = first("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    local = first("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    if world is None and "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ:
        # On the CPU and without mpirun, `accelerate launch --num_processes N` starts one process, not N.
        raise UsageError(
            "accelerate started one process of several; start them with --processes N or torchrun"
        )
    if world is None or world == "1":
        return 0, 1, 0
    here = {"RANK": rank, "MASTER_ADDR": first("MASTER_ADDR"), "MASTER_PORT": first("MASTER_PORT")}
    if missing := [name for name, value in here.items() if value is None]:
        raise UsageError(f"WORLD_SIZE is {world} but {', '.join(missing)} is not set; start with torchrun")
    return int(rank or 0), int(world), int(local or rank or 0)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in alike.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in group:
            if bucket and size + tensor.numel() > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        yield bucket


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _die_with_parent() -> None:
    """Asks Linux to end this process in order when its launcher is killed, so that no rank is orphaned."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
