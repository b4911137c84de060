"""Latents on disk, for distillation: shards that are whole or absent, read a sample at a time.

Two forms. A safetensors shard holds `latents` [N, ...] as the flow sees them, the prompts in its header, and
may hold encodings of the text (`text.NAME` [N, ...]); it is what flowkit writes. A tar shard in WebDataset's
manner holds, for each sample KEY, `KEY.latent.pth` (or `.npy`, or `.safetensors` with `latents`) and
`KEY.txt` or `KEY.json` (with `prompt`), and may hold `KEY.embed.pth`; tensors in `.pth` are read without
unpickling code.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flowkit.errors import UserError
from flowkit.models import Cond, files

TEXT = "text."
_LATENT = (".latent.pth", ".latents.pth", ".latent.npy", ".latent.safetensors")
_EMBED = (".embed.pth",)


class Shard(Protocol):
    """Some samples of one file."""

    path: Path
    prompts: Sequence[str]

    def latent(self, k: int) -> Tensor:
        """Sample k."""
        ...

    def text(self, k: int) -> dict[str, Tensor] | None:
        """The encodings of its prompt, if the shard holds them."""
        ...


@dataclass(frozen=True)
class Latents:
    """All samples of a folder of shards, in the order of the file names.

    Attributes:
        shards: the files.
        places: for each sample (shard, number in it).
    """

    shards: Sequence[Shard]
    places: Sequence[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.places)

    @property
    def prompts(self) -> list[str]:
        """The prompt of each sample."""
        return [self.shards[s].prompts[k] for s, k in self.places]

    @property
    def has_text(self) -> bool:
        """Whether every shard brings the encodings of its prompts."""
        return all(shard.text(0) is not None for shard in self.shards)

    def __getitem__(self, rows: Sequence[int]) -> Tensor:
        """Latents [len(rows), ...] float32 of these samples."""
        return torch.stack([self.shards[s].latent(k).float() for s, k in (self.places[i] for i in rows)])

    def cond(self, rows: Sequence[int], negative: Mapping[str, Tensor] | None) -> Cond:
        """Encodings that the shards hold for these samples; `negative` is that of the empty prompt, one row."""
        found = [self.shards[s].text(k) or {} for s, k in (self.places[i] for i in rows)]
        tensors = {name: torch.stack([text[name] for text in found]) for name in found[0]}
        if negative is None:
            return Cond(tensors)
        return Cond(tensors, Cond({n: v.expand(len(rows), *v.shape[1:]) for n, v in negative.items()}))


def write_shard(
    path: Path,
    latents: Tensor,
    prompts: Sequence[str],
    about: Mapping[str, Any],
    text: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a safetensors shard, whole or not at all.

    Args:
        path: ends in .safetensors.
        latents: [N, ...] as the flow sees them.
        prompts: N of them.
        about: family, base model and recipe, for the header.
        text: encodings by name, [N, ...] each.
    """
    if len(latents) != len(prompts):
        raise ValueError(f"{len(latents)} latents but {len(prompts)} prompts")
    header = {"format": 1, "kind": "latents", **about, "prompts": list(prompts)}
    tensors = {"latents": latents, **{TEXT + name: value for name, value in (text or {}).items()}}
    files.write_safetensors(path, tensors, {"format": "pt", "flowkit": json.dumps(header, sort_keys=True)})


def open_folder(folder: Path, *, family: str, shape: tuple[int, ...]) -> Latents:
    """All shards of a folder, each checked: its family, its keys, the shape of every latent.

    Args:
        folder: holds .safetensors or .tar files.
        family: of the model; a shard of flowkit's own says what it is for.
        shape: of one latent.

    Raises:
        UserError: no shard, a broken or truncated one, a sample without latent or prompt, another shape; it
            names the file and the sample.
    """
    paths = sorted(p for p in folder.glob("*") if p.suffix in (".safetensors", ".tar") and p.name[0] != ".")
    if not paths:
        raise UserError(
            f"{folder} holds no latents (.safetensors or .tar shards); make some with --make-data."
        )
    shards: list[Shard] = [
        _Tar(path, shape) if path.suffix == ".tar" else _Safetensors(path, family, shape) for path in paths
    ]
    return Latents(shards, [(s, k) for s, shard in enumerate(shards) for k in range(len(shard.prompts))])


def header_of(path: Path) -> dict[str, Any]:
    """What a shard of flowkit's own says of itself.

    Raises:
        UserError: a broken file, or one of another kind.
    """
    metadata = files.read_header(path).get("__metadata__", {})
    try:
        header: dict[str, Any] = json.loads(metadata["flowkit"])
        if header["kind"] != "latents" or not isinstance(header["prompts"], list):
            raise ValueError
    except (KeyError, ValueError, TypeError):
        raise UserError(f"{path} is no shard of latents: its header does not say prompts.") from None
    return header


class _Safetensors:
    """A shard of flowkit's own, memory-mapped."""

    def __init__(self, path: Path, family: str, shape: tuple[int, ...]) -> None:
        self.path = path
        header = header_of(path)
        self.prompts: Sequence[str] = header["prompts"]
        if header.get("family") != family:
            raise UserError(
                f"{path} holds latents of family {header.get('family')}; those of {family} are needed."
            )
        tensors, _ = files.read_safetensors(path)
        if "latents" not in tensors:
            raise UserError(f"{path} has no tensor `latents`; make it again with --make-data.")
        self._latents = tensors.pop("latents")
        expected = (len(self.prompts), *shape)
        if tuple(self._latents.shape) != expected:
            raise UserError(
                f"{path} holds latents {list(self._latents.shape)}; this model and size need {list(expected)}."
            )
        self._text = {k.removeprefix(TEXT): v for k, v in tensors.items() if k.startswith(TEXT)}

    def latent(self, k: int) -> Tensor:
        return self._latents[k]

    def text(self, k: int) -> dict[str, Tensor] | None:
        return {name: value[k] for name, value in self._text.items()} or None


class _Tar:
    """A WebDataset shard: the index is read at once, a sample when it is asked for."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path, self.shape = path, shape
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    if member.isfile():
                        key, dot, end = member.name.rpartition("/")[2].partition(".")
                        samples.setdefault(key, {})[dot + end] = (member.offset_data, member.size)
        except (tarfile.TarError, OSError) as error:
            raise UserError(f"{path} is no whole tar shard ({error}); copy or download it again.") from None
        if not samples:
            raise UserError(f"{path} holds no samples; copy or download it again.")
        size = path.stat().st_size
        self._samples = sorted(samples.items())
        self.prompts: Sequence[str] = []
        prompts = []
        for key, parts in self._samples:
            if any(start + length > size for start, length in parts.values()):
                raise UserError(f"{path}: sample {key} is cut off; copy or download the shard again.")
            if not any(end in parts for end in _LATENT):
                raise UserError(f"{path}: sample {key} has no latent ({' or '.join(_LATENT)}).")
            prompts.append(self._prompt(key, parts))
        self.prompts = prompts
        self.latent(0)

    def latent(self, k: int) -> Tensor:
        key, parts = self._samples[k]
        end = next(e for e in _LATENT if e in parts)
        value = self._tensor(key, end, parts[end])
        if value.shape[:1] == (1,) and value.ndim == len(self.shape) + 1:
            value = value[0]
        if tuple(value.shape) != self.shape:
            raise UserError(
                f"{self.path}: the latent of sample {key} is {list(value.shape)}; this model and size need "
                f"{list(self.shape)}."
            )
        return value

    def text(self, k: int) -> dict[str, Tensor] | None:
        key, parts = self._samples[k]
        end = next((e for e in _EMBED if e in parts), None)
        if end is None:
            return None
        value = self._tensor(key, end, parts[end])
        return {"text": value[0] if value.ndim == 3 else value}

    def _read(self, place: tuple[int, int]) -> bytes:
        with self.path.open("rb") as file:
            file.seek(place[0])
            return file.read(place[1])

    def _tensor(self, key: str, end: str, place: tuple[int, int]) -> Tensor:
        data = self._read(place)
        try:
            if end.endswith(".npy"):
                import numpy as np

                value: Any = torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
            elif end.endswith(".safetensors"):
                from safetensors.torch import load

                value = load(data)["latents"]
            else:
                value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except Exception as error:  # torch, numpy and safetensors each have their own types for a broken file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{self.path}: {end} of sample {key} cannot be read ({reason}).") from None
        if not isinstance(value, Tensor):
            raise UserError(f"{self.path}: {end} of sample {key} is no tensor but a {type(value).__name__}.")
        return value

    def _prompt(self, key: str, parts: Mapping[str, tuple[int, int]]) -> str:
        try:
            if ".json" in parts:
                return str(json.loads(self._read(parts[".json"]))["prompt"])
            end = next(e for e in (".txt", ".prompt.txt") if e in parts)
            return self._read(parts[end]).decode("utf-8").strip()
        except (StopIteration, ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.path}: sample {key} has no prompt (.txt, or .json with prompt)."
            ) from None
