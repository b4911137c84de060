"""What the derivative of a network costs: value and derivative in one pass over a plain forward.

python benchmarks/jvp_derivative.py [TOKENS]     # prints JSON; the ratio should stay under 2.5

Blocks of Wan 2.1 1.3B (12 heads of 128, feed-forward 8960) in float32, L = 1024 tokens unless told. The plain
forward uses torch's own attention, the derivative flowkit's block by block. Both run in turns, and the ratio is
of neighbours in time. A layer costs two products for one, attention six for two: the ratio nears 3 as L grows.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections.abc import Callable

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from flowkit.jvp import derivative

BLOCKS, ROUNDS = 1, 7
LIMIT = 2.5


@torch.no_grad()
def main() -> None:
    """Time both in turns, so that a drift of the machine meets both alike."""
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    torch.manual_seed(0)
    net = WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, text_dim=64, num_layers=BLOCKS
    ).eval()
    # patches of 2 x 2 pixels, 16 of them high
    x, dx = torch.randn(2, 1, 16, 1, 32, tokens // 8).unbind()
    t, dt = torch.tensor([500.0]), torch.tensor([1.0])
    text = torch.randn(1, 32, 64)

    def forward(x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = net(x, t, text, return_dict=False)[0]
        return out

    backends: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: backends.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flowkit.ops.jvp_attention").addHandler(handler)
    logging.getLogger("flowkit.ops.jvp_attention").setLevel(logging.DEBUG)

    def plain() -> None:
        forward(x, t)

    def dual() -> None:
        derivative(forward, (x, t), (dx, dt))

    def seconds(work: Callable[[], None]) -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    plain()
    dual()  # warm
    pairs = []
    for n in range(ROUNDS):
        if n % 2:
            pairs.append((seconds(plain), seconds(dual)))
        else:
            later = seconds(dual)
            pairs.append((seconds(plain), later))
    middle = statistics.median(d / p for p, d in pairs)
    report = {
        "derivative_over_forward": round(middle, 3),
        "limit": LIMIT,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "forward_s": round(statistics.median(p for p, _ in pairs), 4),
        "derivative_s": round(statistics.median(d for _, d in pairs), 4),
        "rounds": sorted(round(d / p, 3) for p, d in pairs),
        "backends": backends,
    }
    print(json.dumps(report))
    sys.exit(middle > LIMIT)


if __name__ == "__main__":
    main()
