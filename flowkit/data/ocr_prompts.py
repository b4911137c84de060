"""Writes the prompt lists that ship with flowkit: `python -m flowkit.data.ocr_prompts`.

The sentences are of our own making: a scene, and in quotes the words that OCR shall find in it. The quoted
words of a test list stand in no train list, so that a test asks for words that were never trained on.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from flowkit.assets.words import CELLS, draw_prompt, draw_sign, draw_word
from flowkit.config.presets import folder
from flowkit.data.ocr_scenes import LIGHTS, SCENES, STYLES, targets

SEED = 20250607
TRAIN, TEST = 2200, 200
TINY_TRAIN, TINY_TEST = 2000, 200
T = TypeVar("T")


def write(dest: Path) -> list[Path]:
    """Write all four lists into a folder and return the files; the same bytes on every call."""
    train, test = scene_lists()
    tiny_train, tiny_test = tiny_lists()
    files = {
        "ocr-train": ("Words in everyday scenes, to train on.", train),
        "ocr-test": ("Words in everyday scenes, held out: none of the quoted texts is in ocr-train.", test),
        "tiny-ocr-train": ("The sentences that tiny-flux knows, to train on.", tiny_train),
        "tiny-ocr-test": (
            "The sentences that tiny-flux knows, held out: no word is in tiny-ocr-train.",
            tiny_test,
        ),
    }
    dest.mkdir(parents=True, exist_ok=True)
    for name, (about, prompts) in files.items():
        head = f"# {about}\n# Written by `python -m flowkit.data.ocr_prompts`; do not edit.\n"
        (dest / f"{name}.txt").write_bytes((head + "".join(f"{p}\n" for p in prompts)).encode())
    return [dest / f"{name}.txt" for name in files]


def scene_lists(seed: int = SEED) -> tuple[list[str], list[str]]:
    """(train, test): sentences with a quoted text, no sentence twice, no quoted text in both lists."""
    rng = random.Random(seed)
    texts = [(kind, text) for kind, pool in targets().items() for text in pool]
    sentences = [_sentence(rng, kind, text) for kind, text in _shuffled(rng, texts)[: TRAIN + TEST]]
    return sentences[TEST:], sentences[:TEST]


def tiny_lists(seed: int = SEED) -> tuple[list[str], list[str]]:
    """(train, test): sentences of tiny-flux's world, every word once in one of the lists.

    Words that fill the picture are left out: they can stand in one place only, and few steps draw them well.
    """
    rng = np.random.default_rng(seed)
    sentences: dict[str, str] = {}
    while len(sentences) < TINY_TRAIN + TINY_TEST:
        word = draw_word(rng)
        if word not in sentences and len(word) < CELLS:
            sentences[word] = draw_prompt(rng, draw_sign(rng, word))
    prompts = list(sentences.values())
    return prompts[TINY_TEST:], prompts[:TINY_TEST]


def _sentence(rng: random.Random, kind: str, text: str) -> str:
    """A scene of this kind around the quoted text, sometimes with its light, sometimes with its style."""
    sentence = _choice(rng, SCENES[kind]).format(text=f'"{text}"')
    if rng.random() < 0.5:
        sentence += f", {_choice(rng, LIGHTS)}"
    if rng.random() < 0.3:
        sentence += f", {_choice(rng, STYLES)}"
    return sentence[0].upper() + sentence[1:]


def _choice(rng: random.Random, options: Sequence[T]) -> T:
    # Of Python's generator only random() is promised to give the same numbers in every version.
    return options[int(rng.random() * len(options))]


def _shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    keys = [rng.random() for _ in items]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]


def main() -> None:
    """Command line: write the lists into the presets, or elsewhere."""
    parser = argparse.ArgumentParser(description="Write the OCR prompt lists.")
    parser.add_argument("--out", type=Path, default=folder() / "prompts", help="folder to write into")
    for file in write(parser.parse_args().out):
        sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
