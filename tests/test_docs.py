"""Every command in the README and the docs is run, as typed, in a folder that has what they speak of."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from flowkit.cli.app import main

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "recipes").glob("*.md")),
]
# A training command is run as typed but for its length.
SHORT = [
    "--steps",
    "1",
    "rollout.groups=2",
    "rollout.samples=2",
    "policy.updates=1",
    "eval.limit=2",
    "preview.prompts=1",
]
SHORT_DISTILL = [
    "--steps=1",
    "batch=2",
    "optim.micro=2",
    "data.count=4",
    "data.shard=4",
    "teacher.steps=2",
    "eval.limit=1",
    "eval.steps=[1]",
    "eval.teacher_steps=[]",
    "preview.prompts=1",
]


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```(?:console|bash)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("flowkit ")]


def python(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of pictures, a prompt file, a reward of one's own, and students."""
    folder = tmp_path_factory.mktemp("docs")
    sample = [
        "sample",
        "-p",
        'the word "CAT"',
        "-p",
        'the word "DOG"',
        "--steps",
        "2",
        "--out",
        str(folder / "out"),
    ]
    assert main(sample) == 0
    (folder / "pictures").mkdir()
    for path in (folder / "out").glob("0*.png"):
        shutil.copy(path, folder / "pictures" / path.name)
    (folder / "prompts.txt").write_text('the word "CAT"\nthe word "DOG"\n')
    (folder / "my_rewards.py").write_text("\n".join(python(ROOT / "docs" / "recipes" / "add-a-reward.md")))
    shutil.copy(folder / "out" / "manifest.jsonl", folder / "pictures")
    clips = ["sample", "-p", "a red square moving left", "--model", "builtin:tiny-wan", "--steps", "2"]
    assert main([*clips, "--out", str(folder / "things")]) == 0
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        assert main(["distill", "--preset", "tiny-flux-rcm", *SHORT_DISTILL]) == 0
        shutil.copytree(folder / "runs" / "tiny-flux-rcm", folder / "runs" / "tiny-student-ocr")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(p, c, id=f"{p.stem}: {c}") for p in PAGES for c in dict.fromkeys(commands(p))],
)
def test_a_command_of_the_docs_works_as_typed(
    page: Path, command: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    shutil.copytree(place, here)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    for path in here.rglob("scores.jsonl"):
        path.unlink()
    arguments = shlex.split(command, comments=True)[1:]
    if not {"--dry-run", "--print-config", "--plot-times"} & set(arguments):
        arguments += {"grpo": SHORT, "distill": SHORT_DISTILL}.get(arguments[0], [])
    if arguments[0] == "sample" and "things" in arguments:
        shutil.rmtree(here / "things")
    if arguments[0] == "grpo" and "tiny-student-ocr" in arguments:
        shutil.rmtree(here / "runs" / "tiny-student-ocr")
    if "--prompts" in arguments and arguments[0] == "reward":
        (here / "pictures" / "manifest.jsonl").unlink()
    assert main(arguments) == 0


@pytest.mark.parametrize("name", ["add-a-law", "add-a-model-family", "read-an-algorithm"])
def test_the_code_of_a_recipe_runs_and_fits_forty_lines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowkit import models
    from flowkit.flow import laws

    monkeypatch.setattr(laws, "LAWS", dict(laws.LAWS))
    monkeypatch.setattr(models, "FAMILIES", dict(models.FAMILIES))
    page = ROOT / "docs" / "recipes" / f"{name}.md"
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 40
    names: dict[str, object] = {}
    for block in python(page):
        exec(block, names)
    if name == "add-a-law":
        import torch

        x = torch.randn(3, 2, dtype=torch.float64)
        mean, std = names["fading"](x, x, 0.5, 0.25, 0.0)  # type: ignore[operator]
        torch.testing.assert_close(mean, x - 0.25 * x, rtol=0, atol=0)
        assert float(std.max()) == 0
