"""`flowkit distill --dry-run`: everything that can be checked and said without loading weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from flowkit.assemble.distill import fd_step
from flowkit.assemble.plan import described, grid
from flowkit.assemble.shards import check_shards
from flowkit.config.distill import NEED_DATA, DistillConfig
from flowkit.data.prompts import read
from flowkit.flow.schedule import student
from flowkit.flow.student import student_thetas
from flowkit.models import describe
from flowkit.models.description import Description
from flowkit.models.latents import header_of
from flowkit.rewards import check, load
from flowkit.runtime.device import memory_estimate
from flowkit.runtime.log import check as check_trackers

COUNTS = (8, 16, 32, 64)  # processes that a plan with shards compares


def plan(cfg: DistillConfig, processes: int) -> dict[str, Any]:
    """What the run would do: data, stages, turns, times, memory.

    Raises:
        UsageError: prompts, rewards, trackers, size or a step of the differences that cannot work.
        UserError: a model that neither this machine nor flowkit's own table knows, or broken shards.
    """
    check_trackers(cfg.report_to)
    asked = read(cfg.eval.prompts)[: cfg.eval.limit] if cfg.eval.prompts else []
    prompts = read(cfg.data.prompts) if cfg.data.prompts and cfg.data.kind != "media" else []
    check([load(name) for name in cfg.reward], asked)
    step = fd_step(cfg)
    if processes > 1:  # with one, the plan says how many it takes
        check_shards(cfg, processes)
    model = describe(cfg.model)
    model.shape.check_size(cfg.pixels)
    share = math.ceil(cfg.batch / processes)
    return {
        "model": described(cfg.model, model),
        "data": {**data(cfg), "prompts": len(prompts)},
        "stages": stages(cfg),
        "student": {
            "thetas": [
                round(t, 6)
                for t in student_thetas(cfg.student.steps, cfg.student.sigma_max, cfg.student.thetas).tolist()
            ],
            "times": [
                round(t, 6)
                for t in student(cfg.student.steps, cfg.student.sigma_max, cfg.student.thetas).tolist()
            ],
        },
        "teacher": {
            "guidance": cfg.teacher.guidance,
            "schedule": [
                round(t, 6) for t in grid(model, cfg.teacher.steps, cfg.pixels, cfg.teacher.schedule)
            ],
        },
        "derivative": {"fd_type": cfg.scm.fd_type, "fd_step": step if cfg.scm.fd_type else None},
        "iteration": {
            "processes": processes,
            "batch": cfg.batch,
            "samples_per_process": share,
            "calls_of_micro": math.ceil(share / cfg.optim.micro),
        },
        "memory_bytes": memory(model, cfg, processes),
        "shards": shards(model, cfg, processes),
        "out": {"folder": cfg.out, "exists": Path(cfg.out).exists()},
    }


def data(cfg: DistillConfig) -> dict[str, Any]:
    """What the data is and how much of it is there."""
    found: dict[str, Any] = {"kind": cfg.data.kind, "path": cfg.data.path}
    if cfg.data.kind == "made" and cfg.data.path is not None:
        shards = sorted(Path(cfg.data.path).expanduser().glob("shard-*.safetensors"))
        found |= {"latents": cfg.data.count, "made": sum(len(header_of(path)["prompts"]) for path in shards)}
    return found


def stages(cfg: DistillConfig) -> list[dict[str, Any]]:
    """Each stage: its iterations, and the turns of the student and of the critic among them."""
    return [
        {
            "loss": loss,
            "iterations": student + critic,
            "student": student,
            "critic": critic,
            "needs_data": loss in NEED_DATA,
        }
        for loss, student, critic in cfg.turns
    ]


def memory(model: Description, cfg: DistillConfig, processes: int) -> dict[str, int]:
    """Estimated bytes of one process, which holds all networks whole, or its shard of each."""
    config = model.configs["transformer"]
    layers = sum(int(config.get(key, 0)) for key in ("num_layers", "num_single_layers"))
    weights, full = model.parameters["transformer"], cfg.train == "full"
    trainable = weights if full else model.lora_parameters(cfg.lora.rank, cfg.lora.targets)
    dtype_bytes = 4 if cfg.dtype == "float32" else 2
    latent = 1
    for n in model.shape.latent_shape(cfg.pixels):
        latent *= n
    found = memory_estimate(
        weights=weights,
        trainable=trainable,
        full=full,
        dtype_bytes=dtype_bytes,
        layers=layers,
        width=int(config["num_attention_heads"]) * int(config["attention_head_dim"]),
        tokens=model.shape.tokens(cfg.pixels) + model.text_tokens,
        micro=cfg.optim.micro,
        gradient_checkpointing=cfg.gradient_checkpointing,
        latent=latent,
        images=cfg.optim.micro,
        states=4,
        other_weights=sum(n for name, n in model.parameters.items() if name != "transformer"),
    )
    del found["total"], found["reference"]
    # the fake score is trained as the student is, without an average; of three networks each has its own weights
    found["critic"] = 4 * 4 * trainable
    if full:
        found["teacher"] = weights * dtype_bytes
    elif cfg.networks == "three":
        found["teacher"] = found["weights"]
        found["critic"] += found["weights"]
    if cfg.shard:
        found["teacher"] = 4 * weights  # float32, as the two others
        for part in ("trained", "gradients", "optimizer", "ema", "critic", "teacher"):
            found[part] = math.ceil(found[part] / processes)
        # a block at work, the next on its way, and the gradients of one, in the dtype of the calls
        found["gathered"] = 3 * (weights // layers) * dtype_bytes
    if cfg.optim.offload:  # the moments of the one that waits are on the CPU
        found["optimizer"] //= 2
        found["critic"] -= 2 * 4 * trainable // 2
    return {**found, "total": sum(found.values())}


def shards(model: Description, cfg: DistillConfig, processes: int) -> dict[str, Any] | None:
    """Memory by number of processes, and what the machine of the first needs to write a checkpoint; None without."""
    if not cfg.shard:
        return None
    counts = sorted({processes, *COUNTS})
    return {
        "processes": processes,
        "memory_bytes": {str(n): memory(model, cfg, n)["total"] for n in counts},
        # weights, their average and moments of the student, weights and moments of the critic, float32
        "checkpoint_bytes": (4 + 3) * 4 * model.parameters["transformer"],
    }


def told(found: dict[str, Any], *, as_json: bool) -> str:
    """The plan as JSON, or as lines for a person."""
    if as_json:
        return json.dumps(found) + "\n"
    model, bytes_, data_, it = found["model"], found["memory_bytes"], found["data"], found["iteration"]
    kinds = {
        "made": f"{data_.get('made', 0)} of {data_.get('latents', 0)} latents of the teacher are in {data_['path']}",
        "shards": f"shards in {data_['path']}",
        "media": f"media in {data_['path']}, encoded once",
        "prompts": "prompts alone",
    }
    teacher, derivative = found["teacher"], found["derivative"]
    how = {0: "exact", 1: "exact in x, a difference in time", 2: "a difference in x and time"}
    step = f", step {derivative['fd_step']:.2g} rad" if derivative["fd_step"] else ""
    lines = [
        f"model     {model['told']}",
        f"data      {kinds[data_['kind']]}" + (f"; {data_['prompts']} prompts" if data_["prompts"] else ""),
        *(
            f"stage     {s['loss']}: {s['iterations']} iterations, {s['student']} of the student, "
            f"{s['critic']} of the critic"
            for s in found["stages"]
        ),
        f"teacher   guidance {teacher['guidance']:g}, {len(teacher['schedule']) - 1} steps from "
        f"{teacher['schedule'][0]:.4g} to {teacher['schedule'][-2]:.4g}, then 0",
        f"student   angles {' '.join(f'{t:.4g}' for t in found['student']['thetas'])} "
        f"(times {' '.join(f'{t:.4g}' for t in found['student']['times'])})",
        f"tangent   fd_type {derivative['fd_type']}: {how[derivative['fd_type']]}{step}",
        f"iteration {it['batch']} samples, {it['samples_per_process']} a process in {it['calls_of_micro']} parts",
        f"shards    {told_shards(found['shards'], it['processes'])}",
        f"memory    {bytes_['total'] / 2**30:.3g} GiB a process: "
        + ", ".join(f"{name} {n / 2**30:.2g}" for name, n in bytes_.items() if n and name != "total"),
        f"run       {found['out']['folder']}"
        + (" (exists: goes on from it)" if found["out"]["exists"] else " (new)"),
    ]
    return "\n".join(lines) + "\n"


def told_shards(found: dict[str, Any] | None, processes: int) -> str:
    """How the weights are split, for a person."""
    if found is None:
        return f"none: each of {processes} process(es) holds all networks whole"
    each = ", ".join(f"{n}: {b / 2**30:.3g}" for n, b in found["memory_bytes"].items())
    return (
        f"weights, gradients and moments over {processes} process(es), more by --processes or torchrun; GiB a process "
        f"with {each}; a checkpoint is gathered in {found['checkpoint_bytes'] / 2**30:.3g} GiB of memory "
        "of the first one's machine"
    )
