"""`--dry-run`: everything that can be checked and said without loading weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowkit.assemble.common import prompt_files
from flowkit.config.schema import GrpoConfig
from flowkit.config.sections import ScheduleConfig
from flowkit.data.prompts import lint
from flowkit.flow.schedule import SCHEDULES, mu_of
from flowkit.flow.windows import trained_steps
from flowkit.models import describe
from flowkit.models.description import Description
from flowkit.models.weights import check_lora
from flowkit.rewards import check, load
from flowkit.runtime.device import memory_estimate
from flowkit.runtime.log import check as check_trackers
from flowkit.types import Size


def plan(cfg: GrpoConfig, processes: int) -> dict[str, Any]:
    """What the run would do: prompts, schedule, arithmetic of groups and processes, memory.

    Raises:
        UsageError: prompts, rewards, trackers, size or targets that cannot work.
        UserError: a model that neither this machine nor flowkit's own table knows, a LoRA that is not there,
            broken or of another family.
    """
    check_trackers(cfg.report_to)
    train, test = prompt_files(cfg)
    rewards = [load(name) for name in cfg.reward]
    check(rewards, [*train, *test])
    model = describe(cfg.model)
    model.shape.check_size(cfg.pixels)
    if cfg.train == "lora" and cfg.lora.path is not None:
        check_lora(cfg.lora.path, model.family, model.name)
    return {
        "model": described(cfg.model, model),
        "prompts": {"train": len(train), "test": len(test), "remarks": [*lint(train), *lint(test)]},
        "reward": cfg.reward,
        "schedule": [round(t, 6) for t in grid(model, cfg.rollout.steps, cfg.pixels, cfg.rollout.schedule)],
        "round": arithmetic(cfg, processes),
        "memory_bytes": memory(model, cfg, processes),
        "out": {"folder": cfg.out, "exists": Path(cfg.out).exists()},
    }


def described(name: str, model: Description) -> dict[str, Any]:
    """What a model is: as values, and `told` for a person."""
    billions = model.parameters["transformer"] / 1e9
    size = f"{billions:.3g} B" if billions >= 0.1 else f"{1e3 * billions:.3g} M"
    here = "weights are here" if model.folder is not None else "weights are not on this machine"
    return {
        "name": name,
        "family": model.family,
        "weights_here": model.folder is not None,
        "parameters": model.parameters,
        "told": f"{name} ({model.family}, {size} parameters; {here})",
    }


def grid(model: Description, steps: int, size: Size, schedule: ScheduleConfig) -> list[float]:
    """The grid of times that a schedule block means for a model."""
    settings = dict(schedule.settings)
    if schedule.name == "auto":
        return [float(t) for t in model.shape.schedule(steps, size)]
    if schedule.name == "dynamic":
        settings.setdefault("mu", mu_of(model.shape.tokens(size)))
    return [float(t) for t in SCHEDULES[schedule.name](steps, **settings)]


def arithmetic(cfg: GrpoConfig, processes: int) -> dict[str, Any]:
    """Pictures, chunks and network calls of one round, in all and per process."""
    r, p = cfg.rollout, cfg.policy
    images = r.groups * r.samples
    per_update = r.groups // p.updates * r.samples
    chunks = -(-per_update // cfg.optim.micro)
    length = r.window.size if r.window else len(trained_steps(r.steps, r.train_fraction))
    found: dict[str, Any] = {
        "processes": processes,
        "pictures": images,
        "optimizer_steps": p.updates * p.epochs,
        "pictures_per_optimizer_step": per_update,
        "chunks_per_optimizer_step": chunks,
        "trained_steps_per_trajectory": length,
        "rollout_calls_of_micro": p.updates * chunks * r.steps,
        "forward_backward_calls_of_micro": p.updates * chunks * length * p.epochs,
    }
    if chunks % processes:
        legal = [m for m in range(1, per_update + 1) if -(-per_update // m) % processes == 0]
        near = min(legal, key=lambda m: abs(m - cfg.optim.micro), default=None)
        found["uneven"] = (
            f"{chunks} chunks an optimizer step do not share out evenly over {processes} processes"
            + (f"; optim.micro={near} does" if near else "; use fewer processes")
        )
    return found


def memory(model: Description, cfg: GrpoConfig, processes: int) -> dict[str, int]:
    """Estimated bytes of one process, see `memory_estimate`."""
    config = model.configs["transformer"]
    layers = sum(int(config.get(key, 0)) for key in ("num_layers", "num_single_layers"))
    weights = model.parameters["transformer"]
    full = cfg.train == "full"
    r = cfg.rollout
    latent = 1
    for n in model.shape.latent_shape(cfg.pixels):
        latent *= n
    length = r.window.size if r.window else len(trained_steps(r.steps, r.train_fraction))
    return memory_estimate(
        weights=weights,
        trainable=weights if full else model.lora_parameters(cfg.lora.rank, cfg.lora.targets),
        full=full,
        dtype_bytes=4 if cfg.dtype == "float32" else 2,
        layers=layers,
        width=int(config["num_attention_heads"]) * int(config["attention_head_dim"]),
        tokens=model.shape.tokens(cfg.pixels) + model.text_tokens,
        micro=cfg.optim.micro * (1 if model.guidance_embedded or r.guidance == 1 else 2),  # rows of one call
        gradient_checkpointing=cfg.gradient_checkpointing,
        latent=latent,
        images=-(-r.groups * r.samples // processes),
        states=length + 1,
        other_weights=sum(n for name, n in model.parameters.items() if name != "transformer"),
        reference=full and cfg.policy.kl > 0,
    )


def told(found: dict[str, Any], *, as_json: bool) -> str:
    """The plan as JSON, or as lines for a person."""
    if as_json:
        return json.dumps(found) + "\n"
    model, r, bytes_ = found["model"], found["round"], found["memory_bytes"]
    lines = [
        f"model     {model['told']}",
        f"prompts   {found['prompts']['train']} to train on, {found['prompts']['test']} held out",
        f"reward    {', '.join(f'{name} x {weight:g}' for name, weight in found['reward'].items())}",
        f"schedule  {' '.join(f'{t:.4g}' for t in found['schedule'])}",
        f"round     {r['pictures']} pictures, {r['optimizer_steps']} optimizer steps of "
        f"{r['pictures_per_optimizer_step']} pictures x {r['trained_steps_per_trajectory']} trained steps",
        f"calls     {r['rollout_calls_of_micro']} to roll out, {r['forward_backward_calls_of_micro']} forward and "
        f"backward, shared by {r['processes']} process(es)",
        f"memory    {bytes_['total'] / 2**30:.3g} GiB a process: "
        + ", ".join(f"{name} {n / 2**30:.2g}" for name, n in bytes_.items() if n and name != "total"),
        f"run       {found['out']['folder']}"
        + (" (exists: goes on from it)" if found["out"]["exists"] else " (new)"),
    ]
    if remarks := found["prompts"]["remarks"]:
        lines.append(f"note      {remarks[0]}" + (f" (and {len(remarks) - 1} more)" if remarks[1:] else ""))
    if "uneven" in r:
        lines.append(f"note      {r['uneven']}")
    return "\n".join(lines) + "\n"
