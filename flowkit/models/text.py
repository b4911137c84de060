"""Encodings of a run's prompts, made once, kept on disk, the encoders freed after."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowkit.errors import UserError
from flowkit.models import Cond, FlowModel, files

logger = logging.getLogger(__name__)
_NEGATIVE = "negative."


@dataclass(frozen=True)
class TextTable:
    """Row i is the encoding of prompt i; equal texts share one. On the CPU, memory-mapped when from disk.

    Attributes:
        chunks: encodings of the distinct texts, some rows each.
        rows: for each prompt (chunk, row in it).
        negative: the empty prompt's encoding, one row, where the family needs it.
    """

    chunks: list[dict[str, Tensor]]
    rows: list[tuple[int, int]]
    negative: dict[str, Tensor] | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: Sequence[int]) -> Cond:
        """Encodings of these prompts, [len(indices), ...], with their negative."""
        places = [self.rows[i] for i in indices]
        names = self.chunks[0].keys()
        tensors = {k: torch.stack([self.chunks[c][k][r] for c, r in places]) for k in names}
        if self.negative is None:
            return Cond(tensors)
        return Cond(tensors, Cond({k: v.expand(len(places), *v.shape[1:]) for k, v in self.negative.items()}))


def encode_all(
    model: FlowModel, prompts: Sequence[str], cache: Path | None = None, batch: int = 16
) -> TextTable:
    """Encode every distinct prompt once, `batch` at a time, and free the text encoders.

    Args:
        model: encodes.
        prompts: of the whole run.
        cache: folder for the encodings, one file a batch, keyed by the encoders' content, dtype, lengths and
            the texts; what is there is not encoded again.
        batch: texts to a call.

    Raises:
        ValueError: no prompts.
        UserError: the cache folder cannot be written.
    """
    if not prompts:
        raise ValueError("encode_all needs at least one prompt")
    texts = list(dict.fromkeys(prompts))
    key = model.text_key()
    chunks, negative = [], None
    for start in range(0, len(texts), batch):
        tensors = _encode(model, texts[start : start + batch], key, cache)
        negative = {
            k.removeprefix(_NEGATIVE): v for k, v in tensors.items() if k.startswith(_NEGATIVE)
        } or None
        chunks.append({k: v for k, v in tensors.items() if not k.startswith(_NEGATIVE)})
    model.free_text()
    place = {text: divmod(i, batch) for i, text in enumerate(texts)}
    return TextTable(chunks, [place[p] for p in prompts], negative)


def _encode(model: FlowModel, texts: list[str], key: str, cache: Path | None) -> dict[str, Tensor]:
    """Tensors of one chunk, the negative's single row under a prefix; from the cache where it has them."""
    digest = hashlib.sha256(json.dumps([key, texts]).encode()).hexdigest()
    path = None if cache is None else cache / f"text-{digest[:32]}.safetensors"
    if path is not None and path.exists():
        try:
            return files.read_safetensors(path)[0]
        except UserError as error:
            logger.warning("%s Encoding these prompts again.", error)
    cond = model.encode(texts).to("cpu")
    tensors = dict(cond.tensors)
    if cond.negative is not None:
        tensors |= {_NEGATIVE + k: v[:1].clone() for k, v in cond.negative.tensors.items()}
    if path is None:
        return tensors
    files.write_safetensors(path, tensors, {"format": "pt"})
    return files.read_safetensors(path)[0]
