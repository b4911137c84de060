"""Finding, checking and loading a model's folder; every fault is one sentence with a way out."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowkit.errors import UsageError, UserError
from flowkit.models import bundle as bundles
from flowkit.models import describe, load
from tests import tiny

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny FLUX bundle that a test may break."""
    return Path(shutil.copytree(tiny.bundle("flux"), tmp_path / "model"))


def one_sentence(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert "--preset tiny-ocr" in text
    return text


def overwrite(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def cut(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (cut, "truncated"),
    "empty": (lambda path: path.write_bytes(b"") and None, "is empty"),
    "lfs": (overwrite(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "Git LFS"),
    "html": (overwrite(b"<html><body>Access denied</body></html>"), "HTML page"),
    "pickle inside": (overwrite(pickle.dumps({"w": 0}, protocol=2) + b"\0" * 20), "pickle"),
    "missing": (lambda path: path.unlink(), "no weights"),
    "bin only": (lambda path: path.rename(path.with_name("pytorch_model.bin")) and None, "pickle"),
}


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_broken_weights_are_named_before_anything_loads(fault: str, component: str, folder: Path) -> None:
    spoil, said = FAULTS[fault]
    spoil(next((folder / component).glob("*.safetensors")))
    with pytest.raises(UserError, match=said) as caught:
        load(str(folder))
    assert component in one_sentence(caught)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("file", ["model_index.json", "transformer/config.json", "vae/config.json"])
def test_broken_json_is_named(file: str, folder: Path) -> None:
    (folder / file).write_text('{"_class_name": "FluxPipe', encoding="utf-8")
    for use in (load, describe):
        with pytest.raises(UserError, match="not valid JSON") as caught:
            use(str(folder))
        assert file in one_sentence(caught)


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    whole = folder / "transformer" / WEIGHTS
    whole.rename(whole.with_name("part-1.safetensors"))
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "transformer" / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UserError, match=r"part-2\.safetensors does not exist"):
        load(str(folder))


def test_weights_in_shards_load(folder: Path) -> None:
    from diffusers import FluxTransformer2DModel

    before = load(str(folder)).net.state_dict()
    net = FluxTransformer2DModel.from_pretrained(str(folder / "transformer"))
    (folder / "transformer" / WEIGHTS).unlink()
    net.save_pretrained(str(folder / "transformer"), max_shard_size="100KB")
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 1
    after = load(str(folder)).net.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())


@pytest.mark.parametrize(("change", "said"), [("drop", "missing keys"), ("add", "unexpected keys")])
def test_weights_that_are_not_the_networks_are_refused(change: str, said: str, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "transformer" / WEIGHTS
    tensors = load_file(path)
    if change == "drop":
        del tensors["proj_out.bias"]
    else:
        tensors["extra.bias"] = torch.zeros(3)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=said) as caught:
        _ = load(str(folder)).net
    assert ("proj_out.bias" if change == "drop" else "extra.bias") in one_sentence(caught)


def test_weights_of_another_width_are_refused(folder: Path) -> None:
    config = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
    config["joint_attention_dim"] = 48
    (folder / "transformer" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"transformer of .* does not") as caught:
        _ = load(str(folder)).net
    one_sentence(caught)


def test_a_tokenizer_that_is_missing_or_of_unknown_kind_is_named(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index["tokenizer_2"] = ["os", "system"]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UserError, match="wants system as its tokenizer_2"):
        load(str(folder)).encode(["x"])
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(UserError, match="no tokenizer folder") as caught:
        load(str(folder)).encode(["x"])
    one_sentence(caught)


def test_a_pipeline_of_no_known_family_is_named(folder: Path) -> None:
    (folder / "model_index.json").write_text('{"_class_name": "CogViewPipeline"}', encoding="utf-8")
    with pytest.raises(UserError, match="CogViewPipeline; flowkit knows FluxPipeline"):
        load(str(folder))


def test_a_folder_or_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "flux1-dev.safetensors").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "flux1-dev.safetensors"):
        with pytest.raises(UserError, match=r"no model_index\.json") as caught:
            load(str(path))
        one_sentence(caught)
    with pytest.raises(UserError, match="There is no model folder") as caught:
        load(str(tmp_path / "nothing"))
    one_sentence(caught)


def test_a_builtin_is_found_by_name_and_a_typo_gets_a_hint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "ASSETS", folder.parent)
    assert load("builtin:model").name == "builtin:model"
    with pytest.raises(UsageError, match="did you mean builtin:model"):
        load("builtin:modle")
    (folder / "vae" / WEIGHTS).unlink()
    with pytest.raises(UserError, match="reinstall flowkit"):
        load("builtin:model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_stored_in_float16_load_in_the_dtype_asked_for(dtype: str, tmp_path: Path) -> None:
    model = load(str(tiny.write_flux(tmp_path / "half", dtype=torch.float16)), dtype=dtype)
    cond = model.encode(["a"])
    wanted = getattr(torch, dtype)
    assert {p.dtype for p in model.net.parameters()} == {wanted}
    assert {v.dtype for v in cond.tensors.values()} == {wanted}
    assert {p.dtype for p in model.vae.parameters()} == {torch.float32}  # type: ignore[attr-defined]
    assert not any(p.requires_grad for p in model.net.parameters())
    assert not model.net.training


# --- the hub, which these tests never reach -------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Exception], None]:
    """Make every fetch fail in a given way."""
    import huggingface_hub

    def failing(error: Exception) -> None:
        def fetch(*_: object, **__: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)

    return failing


def http_error(name: str) -> Exception:
    """A hub error of this class, without the response that its constructor wants."""
    from huggingface_hub import errors

    kind: type[Exception] = getattr(errors, name)
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("GatedRepoError", "accept its licence"),
        ("RepositoryNotFoundError", "check the spelling"),
        ("LocalEntryNotFoundError", "not on this machine"),
        ("OfflineModeIsEnabled", "not on this machine"),
        ("HfHubHTTPError", "not on this machine"),
    ],
)
def test_weights_that_cannot_be_had_are_one_sentence(kind: str, said: str, hub: Callable[..., None]) -> None:
    hub(http_error(kind))
    with pytest.raises(UserError, match=said) as caught:
        load("black-forest-labs/FLUX.1-dev")
    assert caught.value.code == 1
    assert "black-forest-labs/FLUX.1-dev" in one_sentence(caught)


def test_a_hub_id_loads_from_the_folder_that_the_hub_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def fetch(name: str, *, allow_patterns: list[str], **_: object) -> str:
        assert name == "someone/flux"
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load("someone/flux").family == "flux"
    assert any(p == "transformer/*.safetensors" for p in asked[-1])
    # pickles and the single-file copies at the top of a repository are never asked for
    assert not any(p.startswith("*.") or p.endswith(".bin") for patterns in asked for p in patterns)
    asked.clear()
    describe("someone/flux")
    assert not any("safetensors" in p for patterns in asked for p in patterns)
    (folder / "vae" / WEIGHTS).unlink()
    with pytest.raises(UserError, match="hf download someone/flux"):
        load("someone/flux")
