"""The data of distillation: shards that are there, media encoded once, or latents that the teacher makes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flowkit.assemble.common import cache_folder
from flowkit.config.distill import DistillConfig
from flowkit.data.prompts import read
from flowkit.errors import UserError
from flowkit.generate import Recipe, draw_latents
from flowkit.models import Cond, FlowModel
from flowkit.models.latents import Latents, header_of, open_folder, write_shard
from flowkit.models.text import encode_all
from flowkit.runtime.dist import Dist
from flowkit.score import batches_of, rows_of
from flowkit.types import Prompt

Told = Callable[[int, int], None]  # samples done, of how many


def latents_of(model: FlowModel, cfg: DistillConfig, dist: Dist, told: Told) -> Latents | None:
    """The latents of the config's data, made now where they are to be made and are not there; None for prompts.

    Raises:
        UserError: no shards, broken ones, or shards of another recipe.
    """
    data = cfg.data
    if data.kind == "prompts" or data.path is None:
        return None
    folder = Path(data.path).expanduser()
    if data.kind == "made":
        make(model, cfg, dist, told)
    elif data.kind == "media":
        folder = encode_media(model, cfg, dist, told)
    return open_folder(folder, family=model.family, shape=model.latent_shape(cfg.pixels))


def data_input(cfg: DistillConfig) -> dict[str, str]:
    """Digest of names and sizes of the files of one's own data: a resumed run must find the same.

    Latents that the teacher makes need none: their shards say how they were made.
    """
    if cfg.data.kind not in ("shards", "media") or cfg.data.path is None:
        return {}
    folder = Path(cfg.data.path).expanduser()
    files = sorted((p.name, p.stat().st_size) for p in folder.glob("*") if p.is_file())
    return {"data.path": hashlib.sha256(json.dumps(files).encode()).hexdigest()}


def make(model: FlowModel, cfg: DistillConfig, dist: Dist, told: Told) -> None:
    """Let the teacher draw `data.count` latents of the prompts, in turn, into shards; those that are there stay.

    Sample k is drawn from prompt k mod the number of prompts and a seed of its own, whatever the shard size or
    the number of processes.
    """
    assert cfg.data.path is not None
    assert cfg.data.prompts is not None
    missing = dist.on_main(lambda: missing_of(model, cfg))
    if not missing:
        return
    folder, prompts = Path(cfg.data.path).expanduser(), read(cfg.data.prompts)
    recipe, about = teachers(cfg), made_by(model, cfg)
    conds = table_of(model, [p.text for p in prompts], cfg, dist)
    done, whole = 0, sum(min(cfg.data.shard, cfg.data.count - j * cfg.data.shard) for j in missing)
    for k in missing[dist.rank :: dist.world]:
        samples = range(k * cfg.data.shard, min((k + 1) * cfg.data.shard, cfg.data.count))
        rows = [n % len(prompts) for n in samples]
        parts = []
        for part in (
            range(i, min(i + cfg.data.batch, len(rows))) for i in range(0, len(rows), cfg.data.batch)
        ):
            jobs = [(rows[i], cfg.seed + 1 + samples[i] // len(prompts)) for i in part]
            parts += [x0.cpu() for _, x0 in draw_latents(model, conds, jobs, recipe, cfg.data.batch)]
            done += len(part)
            told(done, whole)
        latents = torch.cat(parts)
        if not latents.isfinite().all():
            bad = int((~latents.flatten(1).isfinite().all(1)).sum())
            raise UserError(
                f"the teacher made {bad} latents of {len(latents)} that are not finite; use dtype=float32"
            )
        write_shard(shard_path(folder, k), latents, [prompts[i].text for i in rows], about)
    dist.gather_objects(None)  # all shards are there from here on


def missing_of(model: FlowModel, cfg: DistillConfig) -> list[int]:
    """Which shards of the teacher's latents are not there yet.

    Raises:
        UserError: one that was made by another recipe or for another model.
    """
    assert cfg.data.path is not None
    folder, about = Path(cfg.data.path).expanduser(), made_by(model, cfg)
    shards = math.ceil(cfg.data.count / cfg.data.shard)
    return [k for k in range(shards) if not there(shard_path(folder, k), about)]


def made_by(model: FlowModel, cfg: DistillConfig) -> dict[str, Any]:
    """What the header of a shard of the teacher's latents says."""
    return about_of(model, {**teachers(cfg).as_dict(), "seed": cfg.seed, "prompts_file": cfg.data.prompts})


def teachers(cfg: DistillConfig) -> Recipe:
    """How the teacher draws the data."""
    t = cfg.teacher
    return Recipe(
        steps=t.steps,
        size=cfg.pixels,
        guidance=t.guidance,
        schedule=t.schedule.name,
        settings=t.schedule.settings,
    )


def encode_media(model: FlowModel, cfg: DistillConfig, dist: Dist, told: Told) -> Path:
    """Encode the pictures or clips of a folder into shards in its `latents-...`; those that are there stay.

    Returns:
        The folder of the shards.
    """
    assert cfg.data.path is not None
    source = Path(cfg.data.path).expanduser()
    rows = rows_of(source, cfg.data.prompts)
    about = about_of(model, {"size": str(cfg.pixels), "files": [row.file for row in rows]})
    folder = source / f"latents-{model.family}-{cfg.pixels}"
    starts = range(0, len(rows), cfg.data.shard)
    missing = dist.on_main(lambda: [k for k in range(len(starts)) if not there(shard_path(folder, k), about)])
    for count, k in enumerate(missing[dist.rank :: dist.world]):
        some = rows[starts[k] : starts[k] + cfg.data.shard]
        parts = []
        for part, pixels in batches_of(source, some, cfg.data.batch):
            if (
                tuple(pixels.shape[-2:]) != (cfg.pixels.height, cfg.pixels.width)
                or pixels.shape[1] != cfg.pixels.frames
            ):
                found = f"{pixels.shape[-1]}x{pixels.shape[-2]}x{pixels.shape[1]}"
                raise UserError(
                    f"{source / part[0].file} is {found}, but size is {cfg.pixels}: scale it first"
                )
            parts.append(model.encode_media(pixels).cpu())
        write_shard(shard_path(folder, k), torch.cat(parts), [row.prompt for row in some], about)
        told(count + 1, len(missing))
    dist.gather_objects(None)
    return folder


def about_of(model: FlowModel, recipe: dict[str, Any]) -> dict[str, Any]:
    """What the header of a shard says of where it is from."""
    return {
        "family": model.family,
        "base_model": model.name,
        "base_sha": model.bundle.fingerprint("transformer"),
        "recipe": json.loads(json.dumps(recipe)),
    }


def there(path: Path, about: dict[str, Any]) -> bool:
    """Whether a shard has been written already, by the same recipe.

    Raises:
        UserError: it was made by another recipe or for another model.
    """
    if not path.exists():
        return False
    header = header_of(path)
    odd = [key for key, value in about.items() if header.get(key) != value]
    if odd:
        raise UserError(
            f"{path} was made with another {' and '.join(odd)}: choose another data.path, or remove the old shards"
        )
    return True


def shard_path(folder: Path, k: int) -> Path:
    """Where shard k lies."""
    return folder / f"shard-{k:05d}.safetensors"


def table_of(
    model: FlowModel, texts: Sequence[str], cfg: DistillConfig, dist: Dist
) -> Callable[[Sequence[int]], Cond]:
    """Conditions by row of `texts`, encoded once for all processes."""
    cache = cache_folder()
    if dist.world > 1:
        dist.on_main(lambda: encode_all(model, texts, cache, cfg.text_batch) and None)
    table = encode_all(model, texts, cache, cfg.text_batch)
    return lambda rows: table[rows].to(dist.device)


def conditions(
    model: FlowModel, data: Latents | None, prompts: Sequence[Prompt], cfg: DistillConfig, dist: Dist
) -> Callable[[Sequence[int]], Cond]:
    """Conditions by row of the data: the encodings that its shards bring, or those of its prompts."""
    if data is None:
        return table_of(model, [p.text for p in prompts], cfg, dist)
    if not data.has_text:
        return table_of(model, data.prompts, cfg, dist)
    empty = table_of(model, [""], cfg, dist)([0])
    negative = None if empty.negative is None else empty.negative.tensors
    return lambda rows: data.cond(rows, negative).to(dist.device)
