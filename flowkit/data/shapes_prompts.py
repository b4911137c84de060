"""The prompts of tiny-wan's world: `python -m flowkit.data.shapes_prompts` writes presets/prompts/shapes-*.txt.

There are 3 shapes x 6 colours x 4 directions = 72 full prompts, and 67 that leave a part or two open. The test list
holds half of the full ones, every second cell of the table; the train list all others. The embedded model was trained
on all of them: what is held out is for runs that train on the train list.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

from flowkit.assets.shapes import COLOURS, DIRECTIONS, SHAPES
from flowkit.config.presets import folder


def lists() -> tuple[list[str], list[str]]:
    """(train, test) in the order of the table."""
    train: list[str] = []
    test: list[str] = []
    parts = (("thing", *SHAPES), ("", *COLOURS), ("", *DIRECTIONS))
    for (i, shape), (j, colour), (k, direction) in product(*(list(enumerate(part)) for part in parts)):
        if i == j == k == 0:
            continue  # it asks for nothing
        text = " ".join(f"a {colour} {shape} moving {direction}".split())
        (test if i and j and k and (i + j + k) % 2 == 0 else train).append(text)
    return train, test


def write(into: Path) -> list[Path]:
    """Write both lists into a folder; returns the files."""
    files = []
    for name, prompts in zip(("train", "test"), lists(), strict=True):
        file = into / f"shapes-{name}.txt"
        file.write_text("\n".join(prompts) + "\n", encoding="utf-8", newline="\n")
        files.append(file)
    return files


def main() -> None:
    """Command line: write the lists into the presets, or elsewhere."""
    parser = argparse.ArgumentParser(description="Write the prompt lists of moving things.")
    parser.add_argument("--out", type=Path, default=folder() / "prompts", help="folder to write into")
    for file in write(parser.parse_args().out):
        sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
