from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from flowkit.runtime.dist import launch
from tests import tiny

REPO = Path(__file__).parents[2]

WORKER = """
import json, sys
from pathlib import Path
import torch
from flowkit.jvp import derivative
from flowkit.models import DTYPES, checkpoint_activations, load, sharding
from flowkit.runtime import dist
from flowkit.types import Size

folder, out = sys.argv[1:]
seen = {}
with dist.init("cpu") as d:
    for dtype in ("float32", "bfloat16"):
        whole, model = load(folder, dtype=dtype), load(folder, dtype=dtype)
        sharding.shard(model)
        checkpoint_activations(model)
        held = {str(p.dtype) for p in model.net.parameters()}
        mine = sum(sharding.local(p).numel() for p in model.net.parameters())
        other = sharding.twin(model)
        cond = whole.encode(["a cat", "a dog"])
        g = torch.Generator().manual_seed(0)
        x = torch.randn(2, *whole.latent_shape(Size(32, 32, 5)), generator=g)
        dx = torch.randn(x.shape, generator=g)
        t, dt = torch.tensor([0.3, 0.8]), torch.ones(2)
        with torch.no_grad():
            v, v_sharded, v_twin = (m.velocity(x, t, cond) for m in (whole, model, other))
        # forward differentiation, with one layer after another gathered
        calls = [derivative(lambda x, t, m=m: m.velocity(x, t, cond), (x, t), (dx, dt)) for m in (whole, model)]
        # the weights change behind the network's back, as they do for an average
        tensors = dict(model.net.state_dict())
        with torch.no_grad():
            for p in tensors.values():
                sharding.local(p).mul_(0.5)
            for p in whole.net.parameters():
                p.mul_(0.5)
            sharding.refresh(model.net)
            halved = [m.velocity(x, t, cond) for m in (whole, model)]
        full = sharding.gathered(tensors, keep=d.main)
        own = whole.net.state_dict()
        back = {k: sharding.local(sharding.like(a, tensors[k])) for k, a in full.items()}
        seen[dtype] = {
            "held": sorted(held),
            "share": mine / sum(p.numel() for p in own.values()),
            "value": torch.equal(v, v_sharded),
            "twin": torch.equal(v, v_twin),
            "checkpointed": other.net.is_gradient_checkpointing,
            "trainable twin": any(p.requires_grad for p in other.net.parameters()),
            "derivative": torch.equal(calls[0][1], calls[1][1]),
            "halved": torch.equal(*halved),
            "moved": not torch.equal(halved[0], v),
            "names": len(full),
            "gathered": all(torch.equal(a.to(own[k].dtype), own[k]) for k, a in full.items()),
            "like": all(torch.equal(b, sharding.local(tensors[k])) for k, b in back.items()),
            "class": type(sharding.empty(model.net)).__name__,
            "groups": sorted(n for n, m in model.net.named_modules() if hasattr(m, "reshard")),
        }
    Path(out, f"{d.rank}.json").write_text(json.dumps(seen))
"""


@pytest.mark.slow
def test_a_network_in_two_shards_is_the_whole_one_bit_for_bit_in_float32_and_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]))
    folder = tiny.write_wan(tmp_path / "wan")
    assert launch(2, [sys.executable, "-c", WORKER, str(folder), str(tmp_path)]) == 0
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        for dtype, found in seen.items():
            assert found["held"] == ["torch.float32"]  # whatever the calls are computed in
            assert 0.4 < found["share"] < 0.6
            for name in ("value", "twin", "checkpointed", "derivative", "halved", "moved", "like"):
                assert found[name], (dtype, name)
            assert not found["trainable twin"]
            assert found["class"] == "WanTransformer3DModel"
            assert (found["names"] > 0) == (rank == 0)
            assert found["gathered"]
        assert seen["float32"]["groups"] == ["", "blocks.0", "blocks.1"]
        # what diffusers keeps in float32 is in the groups of the blocks and of the root
        assert {"blocks.0", "blocks.0.attn1", "blocks.0.ffn", "patch_embedding"} <= set(
            seen["bfloat16"]["groups"]
        )
        assert "condition_embedder.time_embedder" not in seen["bfloat16"]["groups"]
