"""What a training run carries from step to step, and how it is kept on disk and found again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowkit.errors import UserError
from flowkit.flow.ema import Ema
from flowkit.flow.policy import RunningStats
from flowkit.models import sharding
from flowkit.models.files import read_safetensors
from flowkit.runtime.dist import Dist
from flowkit.runtime.files import write_text

RAW = "raw"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of one parameter


@dataclass(frozen=True)
class Weights:
    """The trained parameters and how they are written to, and read from, a folder in the users' format."""

    params: dict[str, torch.nn.Parameter]
    write: Callable[..., None]  # folder, 'raw' or 'ema', step, and where they are in shards what was gathered
    read: Callable[[Path], None]
    shards: Shards | None = None


@dataclass(frozen=True)
class Shards:
    """What weights need besides where every process holds a part of each.

    Attributes:
        tensors: what their file holds, by name.
        changed: told when the shards were exchanged outside of training.
        world: processes.
        keep: whether this process keeps what is gathered, and writes.
    """

    tensors: Callable[[], Mapping[str, Tensor]]
    changed: Callable[[], None]
    world: int
    keep: bool

    def gathered(self) -> dict[str, Tensor]:
        """The whole tensors on the process that keeps them; called on all."""
        return sharding.gathered(self.tensors(), keep=self.keep)


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then constant, or down to 0 at update `total`.

    >>> [LearningRate(1.0, warmup=2, decay="linear", total=6).at(u) for u in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    peak: float
    warmup: int = 0
    decay: Literal["none", "linear", "cosine"] = "none"
    total: int = 0

    def at(self, update: int) -> float:
        """Rate of the update of this index, from 0 on."""
        rising = min(1.0, (update + 1) / max(self.warmup, 1))
        left = 1 - min(1.0, max(0, update - self.warmup) / max(self.total - self.warmup, 1))
        match self.decay:
            case "none":
                falling = 1.0
            case "linear":
                falling = left
            case "cosine":
                falling = 0.5 - 0.5 * math.cos(math.pi * left)
        return self.peak * rising * falling


@dataclass
class TrainState:
    """Trained weights, their average, the optimizer, and where the run stands.

    A checkpoint folder holds the averaged weights (what people use), `raw/` with the trained ones,
    `optimizer.safetensors` and `state.json`; without an average, the trained ones take its place.

    Attributes:
        step: finished iterations of the trainer.
        updates: finished optimizer steps.
        history: running reward statistics per prompt.
        gathered: between `collect` and `save`, what is in shards.
    """

    weights: Weights
    optimizer: torch.optim.AdamW
    ema: Ema | None
    rate: LearningRate
    grad_clip: float
    step: int = 0
    updates: int = 0
    history: RunningStats = field(default_factory=RunningStats)
    gathered: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def new(
        cls,
        weights: Weights,
        *,
        rate: LearningRate,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_clip: float,
        ema_decay: float | Callable[[int], float] | None,
        ema_interval: int = 1,
    ) -> TrainState:
        """A run before its first step."""
        optimizer = torch.optim.AdamW(
            list(weights.params.values()), lr=rate.peak, betas=betas, eps=eps, weight_decay=weight_decay
        )
        ema = None if ema_decay is None else Ema(weights.params, ema_decay, ema_interval)
        return cls(weights, optimizer, ema, rate, grad_clip)

    @property
    def params(self) -> dict[str, torch.nn.Parameter]:
        """Name -> trained parameter."""
        return self.weights.params

    def update(self) -> Tensor:
        """One optimizer step from the gradients at hand; returns their norm before clipping, 0-dim."""
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), self.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate.at(self.updates)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.updates)
        self.updates += 1
        return sharding.whole(norm.detach())

    def reduce(self, dist: Dist) -> None:
        """Sum the gradients over the processes, where the backward pass has not done so already."""
        shards, grads = self.weights.shards, self.gradients()
        if shards is None:
            dist.all_reduce_sum_(grads)
            return
        for grad in grads:
            sharding.local(grad).mul_(shards.world)  # FSDP2 leaves their mean

    def gradients(self) -> list[Tensor]:
        """The gradients of all parameters; zeros for one that took none, so that all processes sum the same."""
        for p in self.params.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return [p.grad for p in self.params.values() if p.grad is not None]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are their average; without one, they stay as they are."""
        changed = self.weights.shards.changed if self.weights.shards is not None else lambda: None
        try:
            with self.ema.swap() if self.ema is not None else nullcontext():
                changed()
                yield
        finally:
            changed()

    def park(self, device: torch.device | str) -> None:
        """Move the optimizer's moments: to the CPU while another optimizer is at work, and back before `update`."""
        for moments in self.optimizer.state.values():
            for key, value in moments.items():
                if key != "step":
                    moments[key] = value.to(device, non_blocking=True)

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state as its file names it."""
        return {
            f"{key}/{name}": value.detach()
            for name, p in self.params.items()
            for key, value in self.optimizer.state[p].items()
        }

    def collect(self) -> None:
        """Before `save` on one process: on all of them, gather what is in shards."""
        shards = self.weights.shards
        if shards is None:
            return
        if self.ema is not None:
            with self.ema.swap():
                self.gathered["ema"] = shards.gathered()
        self.gathered["raw"] = shards.gathered()
        self.gathered["moments"] = sharding.gathered(self.moments(), keep=shards.keep)

    def save(self, folder: Path) -> None:
        """Write a checkpoint into an existing, empty folder."""
        if self.ema is not None:
            with self.ema.swap() if self.weights.shards is None else nullcontext():
                self._write(folder, "ema")
            (folder / RAW).mkdir()
            self._write(folder / RAW, "raw")
        else:
            self._write(folder, "raw")
        moments = self.gathered.pop("moments", None) or {
            name: value.contiguous().clone() for name, value in self.moments().items()
        }
        save_file(moments, folder / "optimizer.safetensors", metadata={"format": "pt"})
        state = {"step": self.step, "updates": self.updates, "history": self.history.state()}
        write_text(folder / "state.json", json.dumps(state, indent=1))

    def _write(self, folder: Path, weights: str) -> None:
        if self.weights.shards is None:
            self.weights.write(folder, weights, self.step)
        else:
            self.weights.write(folder, weights, self.step, self.gathered.pop(weights))

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint, bit for bit.

        Raises:
            UserError: the checkpoint is of another set of parameters or incomplete.
        """
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            # before the first update Adam has no state, and the file no tensor
            moments = read_safetensors(folder / "optimizer.safetensors")[0] if state["updates"] else {}
        except (OSError, ValueError, UserError) as error:
            raise UserError(
                f"{folder} is not a whole checkpoint ({error}): resume from an older one"
            ) from None
        self.weights.read(folder)
        if self.ema is not None:
            self.ema.load({name: p.detach().clone() for name, p in self.params.items()})
            self.weights.read(folder / RAW)
        self.updates = state["updates"]
        for name, p in self.params.items():
            try:
                found = {key: moments[f"{key}/{name}"] for key in MOMENTS} if self.updates else {}
            except KeyError:
                raise UserError(
                    f"{folder} has no optimizer state of {name}: resume from an older one"
                ) from None
            if found:
                self.optimizer.state[p] = {
                    k: v.to("cpu") if k == "step" else sharding.like(v, p) for k, v in found.items()
                }
        self.step, self.history = state["step"], RunningStats.load(state["history"])


@dataclass
class DistillState:
    """A student and its critic, who take turns; each with its optimizer.

    A checkpoint folder is the student's, with the critic's under `fake/`.

    Attributes:
        student: the weights that people use, with their average.
        fake: the fake score; it has no average.
        offload: keep the moments of the one that waits on the CPU.
        step: finished iterations, of either.
    """

    student: TrainState
    fake: TrainState
    offload: bool = False
    step: int = 0

    def begin(self, side: TrainState) -> None:
        """Make this one's moments ready, and park the other's."""
        if self.offload:
            other = self.fake if side is self.student else self.student
            other.park("cpu")
            side.park(next(iter(side.params.values())).device)

    def collect(self) -> None:
        """Before `save` on one process: on all of them, gather what is in shards."""
        self.student.collect()
        self.fake.collect()

    def save(self, folder: Path) -> None:
        """Write a checkpoint into an existing, empty folder."""
        self.student.step = self.fake.step = self.step
        self.student.save(folder)
        (folder / "fake").mkdir()
        self.fake.save(folder / "fake")

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint, bit for bit; UserError as `TrainState.load`."""
        self.student.load(folder)
        self.fake.load(folder / "fake")
        self.step = self.student.step
