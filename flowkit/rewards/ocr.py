"""OCR as a reward: what a picture says against what the prompt asked it to say.

The score is 1 - distance / length, clipped to [0, 1]: the Levenshtein distance between the text read and the
target, both in NFC, case folded and without spaces, over the length of the target. Extra text counts against
the picture (the published reward gives 1.0 to any picture that contains the target).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flowkit.errors import UsageError
from flowkit.rewards import require
from flowkit.types import Media, Prompt, Scores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LINE_HEIGHT, LINE_ASPECT = 64, 2.0  # a picture no higher and at least this wide for its height is one line
BATCH = 16  # crops in one call of the recogniser: measured flat from 8 to 32
LONG_SIDE = 960  # larger pictures are shrunk for detection; RapidOCR's own rule blows 512 px up to 736, which
# took twice the time and read fewer words (75 % against 100 % of 20-pixel words on busy grounds)
QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]')


class Ocr:
    """Reads every picture (RapidOCR, its models in the wheel) and compares with the prompt's target.

    Small single-line pictures go straight to the recogniser; others through detection first, all lines
    joined in reading order. Details say `read`, `target`, `exact`, `mode` (line or detect) and `confidence`.
    A clip scores the mean of its frames; it is exact if every frame is, and `read` has an entry a frame.
    """

    def __init__(self) -> None:
        require("ocr", "ocr", ("rapidocr", "onnxruntime", "rapidfuzz"))

    @cached_property
    def reader(self) -> Reader:
        """The two networks, loaded at the first picture: a process that only checks prompts needs none."""
        return Reader()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """UsageError naming the first few prompts that say no text to look for, and how many there are."""
        bad = [prompt for prompt in prompts if not target_of(prompt)]
        if bad:
            places = ", ".join(p.where or f"prompt {p.index}" for p in bad[:3])
            raise UsageError(
                f"{len(bad)} of {len(prompts)} prompts have no text for reward 'ocr' to look for "
                f"({places}{', ...' if len(bad) > 3 else ''}): put the words in "
                'double quotes ("..." or “...”, closed), or give the jsonl line a "target"'
            )

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Scores:
        """Scores in [0, 1]; nan where the prompt has no text to look for."""
        import torch

        frames = media.pixels.shape[1]
        pictures = (media.pixels.flatten(0, 1) * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
        readings = self.reader.read(list(pictures[..., ::-1]))  # RapidOCR takes BGR, as OpenCV does
        judged = [_judge(reading, prompts[i // frames]) for i, reading in enumerate(readings)]
        details = [_joined(judged[i : i + frames]) for i in range(0, len(judged), frames)]
        return Scores(torch.tensor([detail.pop("score") for detail in details]), details)


def quoted(text: str) -> str | None:
    """The quoted parts of a sentence joined in order, or None if there are none or a quote is not closed.

    >>> quoted('a shop sign “OPEN” above "all day"')
    'OPEN all day'
    >>> quoted('a 5" ruler with "CAT" on it') is None
    True
    """
    if text.count('"') % 2:  # guessing which of them open would give a wrong target in silence
        return None
    parts = [next(part for part in match.groups() if part is not None) for match in QUOTED.finditer(text)]
    return " ".join(parts) if parts else None


def target_of(prompt: Prompt) -> str:
    """The text that a picture of this prompt should show: its `target`, else the quoted text, else ''."""
    text = prompt.target if prompt.target is not None else quoted(prompt.text)
    return text if text is not None and normal(text) else ""


def normal(text: str) -> str:
    r"""Text as it is compared: NFC, case folded, without any white space.

    >>> normal("Cafe\u0301 Noir") == normal("CAFÉNOIR")
    True
    """
    return "".join(unicodedata.normalize("NFC", text.casefold()).split())


def similarity(read: str, target: str) -> float:
    """1 - Levenshtein distance / length of the target, in [0, 1], of the normal forms; target not empty."""
    from rapidfuzz.distance import Levenshtein

    read, target = normal(read), normal(target)
    return max(0.0, 1.0 - Levenshtein.distance(read, target) / len(target))


def _judge(reading: dict[str, Any], prompt: Prompt) -> dict[str, Any]:
    target = target_of(prompt)
    if not target:
        return reading | {"score": math.nan, "error": "the prompt has no text to look for"}
    read = reading["read"]
    score = similarity(read, target)
    return reading | {"score": score, "target": target, "exact": normal(read) == normal(target)}


def _joined(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """The details of a clip from those of its frames."""
    if len(frames) == 1:
        return frames[0]
    joined = frames[0] | {
        "score": math.fsum(frame["score"] for frame in frames) / len(frames),
        "read": [frame["read"] for frame in frames],
        "confidence": round(math.fsum(frame["confidence"] for frame in frames) / len(frames), 4),
    }
    return joined | ({"exact": all(frame["exact"] for frame in frames)} if "exact" in joined else {})


class Reader:
    """RapidOCR in batches: the one place that knows its inside (pinned by tests/rewards/test_ocr.py).

    Its own entry point takes one picture a call; here the lines of all pictures of a batch are recognised
    together. A line is padded to the next whole multiple of its height, never to the widest of its batch,
    so that what is read in a picture does not depend on its neighbours.
    """

    def __init__(self) -> None:
        from rapidocr import RapidOCR

        self.engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Rec.rec_batch_num": BATCH,
                "Det.limit_type": "max",
                "Det.limit_side_len": LONG_SIDE,
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "EngineConfig.onnxruntime.enable_cpu_mem_arena": True,
            }
        )

    def read(self, pictures: list[NDArray[np.uint8]]) -> list[dict[str, Any]]:
        """What each picture [H, W, 3] BGR says: `read`, `mode` and `confidence` (the mean over its lines)."""
        modes = ["line" if _is_line(picture) else "detect" for picture in pictures]
        crops = [
            [picture] if mode == "line" else self.lines(picture)
            for picture, mode in zip(pictures, modes, strict=True)
        ]
        texts = iter(self.recognise([crop for of_one in crops for crop in of_one]))
        readings = []
        for mode, of_one in zip(modes, crops, strict=True):
            lines = [line for line in (next(texts) for _ in of_one) if line[0].strip()]
            confidence = sum(score for _, score in lines) / len(lines) if lines else 0.0
            text = " ".join(text for text, _ in lines)
            readings.append({"read": text, "mode": mode, "confidence": round(confidence, 4)})
        return readings

    def lines(self, picture: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The lines of text that the detector finds, cut out, in reading order."""
        from rapidocr.main import RapidOCRError

        image, record = self.engine.preprocess_img(picture)
        try:
            crops, found = self.engine.detect_and_crop(image, record)
        except RapidOCRError:  # its way to say that the picture has no text
            return []
        return [crops[i] for i in reading_order(found.boxes)]

    def recognise(self, crops: list[NDArray[np.uint8]]) -> list[tuple[str, float]]:
        """The text and the confidence of every crop [h, w, 3], called in batches of one padded width."""
        by_width: dict[int, list[int]] = {}
        for i, crop in enumerate(crops):
            by_width.setdefault(math.ceil(crop.shape[1] / crop.shape[0]), []).append(i)
        read: list[tuple[str, float]] = [("", 0.0)] * len(crops)
        recogniser = self.engine._load_rec_model()
        for aspect, members in by_width.items():
            height = recogniser.rec_image_shape[1]
            recogniser.rec_image_shape = [3, height, aspect * height]  # what it pads to, at least
            result = self.engine.recognize_txt([crops[i] for i in members])
            for i, text, score in zip(members, result.txts, result.scores, strict=True):
                read[i] = (str(text), float(score))
        return read


def _is_line(picture: NDArray[np.uint8]) -> bool:
    height, width = picture.shape[:2]
    return bool(height <= LINE_HEIGHT and width >= LINE_ASPECT * height)


def reading_order(boxes: NDArray[np.float32]) -> list[int]:
    """Indices of boxes [N, 4, 2] (corners in pixels), line by line from the top, each from left to right.

    A box belongs to a line when its middle lies between the top and bottom of the line's first box.
    """
    tops, bottoms = boxes[:, :, 1].min(1), boxes[:, :, 1].max(1)
    middles, lefts = (tops + bottoms) / 2, boxes[:, :, 0].min(1)
    lines: list[list[int]] = []
    for i in sorted(range(len(boxes)), key=lambda i: float(middles[i])):
        first = lines[-1][0] if lines else None
        if first is not None and tops[first] <= middles[i] <= bottoms[first]:
            lines[-1].append(i)
        else:
            lines.append([i])
    return [i for line in lines for i in sorted(line, key=lambda i: float(lefts[i]))]
