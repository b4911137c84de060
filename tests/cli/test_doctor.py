from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from flowkit.cli import doctor
from flowkit.cli.app import main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache of two models, one of which never arrived."""
    (tmp_path / "models--org--whole" / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "models--org--whole" / "snapshots" / "abc" / "model_index.json").write_text("{}")
    (tmp_path / "models--org--started" / "blobs").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_json_is_one_document_with_versions_devices_cache_and_disk(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert said.err == ""
    assert report["packages"]["torch"] == version("torch")
    assert report["devices"][0]["name"] == "cpu"
    assert report["devices"][0]["threads"] >= 1
    assert report["cache"] == {
        "folder": str(cache),
        "models": ["org/whole"],
        "offline": report["cache"]["offline"],
    }
    assert {row["what"] for row in report["disk"]} == {"current folder", "model cache"}
    assert all(0 <= row["free_gib"] <= row["total_gib"] for row in report["disk"])
    assert report["problems"] == []


def test_the_text_names_each_optional_package_and_what_it_would_switch_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        doctor, "OPTIONAL", (("no-such-package", "reward x", "pip install x"), *doctor.OPTIONAL)
    )
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"no-such-package +missing +would switch on reward x: pip install x\n", out)
    for name, _, _ in doctor.OPTIONAL:
        assert name in out


def test_a_missing_required_package_is_a_problem_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", ("torch", "no-such-package"))
    assert main(["doctor"]) == 1
    assert (
        "Problem: no-such-package is not installed; run pip install no-such-package"
        in capsys.readouterr().out
    )


def test_a_torch_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[dict[str, object]]:
        raise ImportError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "_devices", fail)
    report = doctor.examine()
    assert report["devices"] == []
    assert report["problems"] == [
        "torch can't be imported (libcudart.so: cannot open shared object file); reinstall it"
    ]


@pytest.mark.parametrize(
    ("set_to", "folder"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/d"}, "/d/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hub_library_looks(
    monkeypatch: pytest.MonkeyPatch, set_to: dict[str, str], folder: str
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert doctor.hub_cache() == Path(folder)


def test_a_cache_that_does_not_exist_yet_is_measured_where_it_would_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    report = doctor.examine()
    assert report["cache"]["models"] == []
    assert str(tmp_path) in {row["folder"] for row in report["disk"]}


def test_every_package_that_the_code_names_as_required_is_installed_here() -> None:
    assert all(version(name) for name in doctor.REQUIRED)
