"""Randomness by address: the same address gives the same numbers, whatever was drawn before it.

An address is a tuple such as (seed, "rollout", epoch, prompt, sample, step). So nothing depends on the
batch size, the number of processes or a resume, and no generator state is ever saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

# Where the 624 words of the Mersenne Twister lie in `torch.Generator.get_state()`, read as int64.
_WORDS = slice(3, 3 + 624)
_STATE_BYTES = 5056


def address_hash(*address: int | str) -> int:
    """64 bits that name an address; 1 and "1" differ, and so do ("a", "b") and ("ab",)."""
    text = repr(tuple(part if isinstance(part, str) else index(part) for part in address))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*address: int | str) -> torch.Generator:
    """A fresh CPU generator for this address.

    `torch.Generator.manual_seed` keeps the low 32 bits only (seed 5 and seed 5 + 2**32 are one stream),
    which a long run's millions of addresses would make collide by the thousand. So both halves of the
    hash seed a Mersenne Twister and their states are added mod 2: the twister is linear, hence the sum
    is a twister whose stream is the sum mod 2 of the two streams.
    """
    seed = address_hash(*address)
    low, high = seed & 0xFFFFFFFF, seed >> 32
    if low == high:  # the two states would cancel to zero, the one state a twister never leaves
        high ^= 1
    made = torch.Generator().manual_seed(low)
    state, other = made.get_state(), torch.Generator().manual_seed(high).get_state()
    if state.numel() != _STATE_BYTES:
        raise AssertionError(f"torch's generator state has {state.numel()} bytes, not {_STATE_BYTES}")
    state.view(torch.int64)[_WORDS].bitwise_xor_(other.view(torch.int64)[_WORDS])
    return made.set_state(state)


def noise(shape: Sequence[int], *address: int | str) -> Tensor:
    """Standard normal numbers of this address: float32 on the CPU, of this shape (without a batch)."""
    return torch.randn(tuple(shape), generator=generator(*address))
