"""Where to compute, and how much memory it will take."""

from __future__ import annotations

import torch

from flowkit.errors import UsageError


def pick(name: str) -> torch.device:
    """The device of a name: auto (the best there is), cpu, cuda, cuda:N or mps.

    Raises:
        UsageError: no such name, or the machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (number and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"no device is called {name!r}: use auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            raise UsageError(f"device {name}: torch sees {count} CUDA devices here; use --device auto")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device mps: torch sees no Apple GPU here; use --device auto")
    return torch.device(name)


def memory_estimate(
    *,
    weights: int,
    trainable: int,
    full: bool,
    dtype_bytes: int,
    layers: int,
    width: int,
    tokens: int,
    micro: int,
    gradient_checkpointing: bool,
    latent: int,
    images: int,
    states: int,
    other_weights: int = 0,
    reference: bool = False,
) -> dict[str, int]:
    """Bytes that one process of a training run needs, by part, and their 'total'; good to about a third.

    - weights: `weights` numbers of the network, in its dtype; none where all of them are trained
    - trained: `trainable` numbers in float32, as are 'gradients' and 'ema'; 'optimizer' (AdamW) is twice that
    - reference: a frozen copy, only where all weights are trained and a KL term needs one
    - encoders: `other_weights` numbers of text encoders and decoder, in the same dtype
    - latents: `images` trajectories of `states` latents of `latent` numbers, float32
    - activations: 17 numbers per layer, token and channel kept for the backward pass (34 bytes in 16 bits:
      Korthikanti et al., arXiv:2205.05198, equation 1, without the attention matrix, which flash attention
      does not keep); with checkpointing one per layer, and 17 for the one layer that is being redone

    Args:
        weights: numbers in the network.
        trainable: numbers that are trained.
        full: whether these are the network's own rather than an adapter's.
        dtype_bytes: bytes of a number of the network: 2 for bfloat16, 4 for float32.
        layers: transformer blocks.
        width: channels of a token.
        tokens: tokens of one picture, text and picture together.
        micro: pictures per forward and backward pass.
        gradient_checkpointing: whether activations are redone in the backward pass.
        latent: numbers in one latent.
        images: pictures per round of rollouts on this process.
        states: latents kept of each trajectory.
        other_weights: numbers in text encoders and decoder.
        reference: whether a reference policy is needed.
    """
    float32 = 4
    kept = layers + 17 if gradient_checkpointing else layers * 17
    parts = {
        "weights": 0 if full else weights * dtype_bytes,
        "trained": trainable * float32,
        "gradients": trainable * float32,
        "optimizer": 2 * trainable * float32,
        "ema": trainable * float32,
        "reference": weights * dtype_bytes if full and reference else 0,
        "encoders": other_weights * dtype_bytes,
        "latents": images * states * latent * float32,
        "activations": kept * micro * tokens * width * dtype_bytes,
    }
    return {**parts, "total": sum(parts.values())}
