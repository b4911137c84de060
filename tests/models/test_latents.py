from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from flowkit.errors import UserError
from flowkit.models.latents import Latents, header_of, open_folder, write_shard

SHAPE = (16, 4, 4)
ABOUT = {"family": "flux", "base_model": "b", "base_sha": "s", "recipe": {}}


def values(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(seed))


def opened(folder: Path) -> Latents:
    return open_folder(folder, family="flux", shape=SHAPE)


def pth(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def npy(value: Tensor) -> bytes:
    out = io.BytesIO()
    np.save(out, value.numpy())
    return out.getvalue()


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def test_shards_are_read_in_the_order_of_their_names_a_sample_at_a_time(tmp_path: Path) -> None:
    x, text = values(5), torch.randn(5, 3, 8)
    write_shard(tmp_path / "shard-00001.safetensors", x[3:], ["d", "e"], ABOUT, {"text": text[3:]})
    write_shard(tmp_path / "shard-00000.safetensors", x[:3], ["a", "b", "c"], ABOUT, {"text": text[:3]})
    (tmp_path / ".partial-shard-00002.safetensors").write_bytes(b"half")
    found = opened(tmp_path)
    assert (len(found), found.prompts, found.has_text) == (5, list("abcde"), True)
    assert torch.equal(found[[4, 0, 3]], x[[4, 0, 3]])
    cond = found.cond([1, 4], {"text": torch.ones(1, 3, 8)})
    assert torch.equal(cond.tensors["text"], text[[1, 4]])
    assert cond.negative is not None
    assert cond.negative.tensors["text"].shape == (2, 3, 8)
    assert header_of(tmp_path / "shard-00001.safetensors")["prompts"] == ["d", "e"]


def test_shards_without_encodings_say_so(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", values(2), ["a", "b"], ABOUT)
    assert not opened(tmp_path).has_text


def test_tar_shards_hold_latents_in_three_forms_and_prompts_in_two(tmp_path: Path) -> None:
    x, e = values(3), torch.randn(1, 7, 8)
    tar(
        tmp_path / "a.tar",
        {
            "d/000.latent.pth": pth(x[0][None]),
            "d/000.txt": b"one\n",
            "001.latent.npy": npy(x[1]),
            "001.json": json.dumps({"prompt": "two"}).encode(),
            "002.latent.safetensors": save({"latents": x[2]}),
            "002.prompt.txt": b"three",
            "002.embed.pth": pth(e),
        },
    )
    found = opened(tmp_path)
    assert found.prompts == ["one", "two", "three"]
    assert torch.equal(found[[0, 1, 2]], x)
    shard = found.shards[0]
    assert shard.text(0) is None
    text = shard.text(2)
    assert text is not None
    assert torch.equal(text["text"], e[0])


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({}, "holds no samples"),
        ({"7.txt": b"a"}, "sample 7 has no latent"),
        ({"7.latent.pth": pth(values(1)[0])}, "sample 7 has no prompt"),
        ({"7.latent.pth": pth(values(1)[0]), "7.json": b"{}"}, "sample 7 has no prompt"),
        (
            {"7.latent.pth": pth(values(1)[0, :3]), "7.txt": b"a"},
            r"sample 7 is \[3, 4, 4\].*need \[16, 4, 4\]",
        ),
        ({"7.latent.pth": pth({"a": 1}), "7.txt": b"a"}, "sample 7 is no tensor but a dict"),
        ({"7.latent.pth": b"junk", "7.txt": b"a"}, "of sample 7 cannot be read"),
        ({"7.latent.npy": b"junk", "7.txt": b"a"}, "of sample 7 cannot be read"),
    ],
)
def test_a_broken_tar_shard_is_one_sentence_with_file_and_sample(
    members: dict[str, bytes], sentence: str, tmp_path: Path
) -> None:
    tar(tmp_path / "bad.tar", members)
    with pytest.raises(UserError, match=rf"bad\.tar.*{sentence}"):
        opened(tmp_path)


def test_a_pickle_in_a_tar_shard_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    tar(tmp_path / "bad.tar", {"7.latent.pth": pth(Evil()), "7.txt": b"a"})
    with pytest.raises(UserError, match="of sample 7 cannot be read"):
        opened(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_tar_shard_that_is_cut_off_names_the_sample(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "cut.tar",
        {"0.latent.pth": pth(values(1)[0]), "0.txt": b"a", "1.txt": b"b", "1.latent.pth": pth(values(1)[0])},
    )
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 10240 - 1500])
    with pytest.raises(UserError, match=r"cut\.tar.*(sample 1 is cut off|no whole tar shard)"):
        opened(tmp_path)


def test_a_safetensors_shard_of_another_family_shape_or_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, values(2), ["a", "b"], {**ABOUT, "family": "wan"})
    with pytest.raises(UserError, match=r"a\.safetensors holds latents of family wan; those of flux"):
        opened(tmp_path)
    write_shard(path, values(2)[:, :8], ["a", "b"], ABOUT)
    with pytest.raises(
        UserError, match=r"holds latents \[2, 8, 4, 4\]; this model and size need \[2, 16, 4, 4\]"
    ):
        opened(tmp_path)
    save_file({"latents": values(2)}, path)
    with pytest.raises(UserError, match="is no shard of latents"):
        opened(tmp_path)
    header = {"format": 1, "kind": "latents", **ABOUT, "prompts": ["a"]}
    save_file({"x": values(1)}, path, {"flowkit": json.dumps(header)})
    with pytest.raises(UserError, match="has no tensor `latents`"):
        opened(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"a\.safetensors"):
        opened(tmp_path)


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no latents.*--make-data"):
        opened(tmp_path)
    with pytest.raises(ValueError, match="2 latents but 1 prompts"):
        write_shard(tmp_path / "a.safetensors", values(2), ["a"], ABOUT)
