from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowkit.assets.words import Sign, draw_sign, render
from flowkit.errors import UsageError
from flowkit.rewards.ocr import Ocr, Reader, normal, quoted, reading_order, similarity, target_of
from flowkit.types import Media, Prompt


@pytest.fixture(scope="module")
def ocr() -> Ocr:
    return Ocr()


def media(*pictures: np.ndarray) -> Media:
    return Media(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)[:, None].float() / 255)


def sign(word: str, ground: str = "white") -> np.ndarray:
    return render(Sign(word, "black" if ground == "white" else "white", ground, "sans"))


def poster(*lines: tuple[int, int, str]) -> np.ndarray:
    picture = Image.new("RGB", (320, 256), (235, 225, 200))
    for x, y, text in lines:
        ImageDraw.Draw(picture).text((x, y), text, fill=(20, 20, 60), font=ImageFont.load_default(30))
    return np.asarray(picture)


def test_rendered_words_of_the_embedded_world_are_read_exactly(ocr: Ocr) -> None:
    rng = np.random.default_rng(7)
    signs = [draw_sign(rng) for _ in range(40)]
    result = ocr(media(*map(render, signs)), [Prompt(f'the word "{s.word}"') for s in signs])
    exact = [detail["exact"] for detail in result.details]
    assert sum(exact) >= 0.95 * len(exact)  # the reader itself takes O for 0 once in a hundred
    assert all((value == 1.0) == hit for value, hit in zip(result.values.tolist(), exact, strict=True))


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("CAT", "cat", 1.0),
        ("C A T", "CAT", 1.0),
        ("CAR", "CAT", 2 / 3),
        ("CATS", "CAT", 2 / 3),  # the published reward gives 1.0
        ("CA", "CAT", 2 / 3),
        ("", "CAT", 0.0),
        ("HELLO CAT", "CAT", 0.0),  # 5 extra letters over 3: clipped
        ("CAFE\u0301", "café", 1.0),  # NFC
        ("STRASSE", "Straße", 1.0),  # case folded, not lowered
    ],
)
def test_the_score_is_one_minus_the_distance_over_the_length_of_the_target(
    read: str, target: str, score: float
) -> None:
    assert similarity(read, target) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ('the word "CAT"', "CAT"),
        ("the word “CAT”", "CAT"),
        ("das Wort „Katze“ hier", "Katze"),
        ('"NO" above “ENTRY” and "now"', "NO ENTRY now"),
        ('“it\'s "so" easy”', 'it\'s "so" easy'),
        ("the baker's sign", None),
        ('a 5" ruler says "CAT"', None),
        ('unclosed "CAT', None),
        ("unclosed “CAT", None),
    ],
)
def test_the_target_is_what_stands_in_double_quotes(text: str, target: str | None) -> None:
    assert quoted(text) == target


def test_the_target_of_the_file_wins_over_the_quotes() -> None:
    assert target_of(Prompt('the word "CAT"', target="DOG")) == "DOG"
    assert target_of(Prompt('the word "CAT"', target=" ")) == ""
    assert target_of(Prompt('nothing in ""')) == ""


def test_prompts_without_a_target_are_refused_before_the_run_with_their_lines(ocr: Ocr) -> None:
    good = Prompt('the word "CAT"', where="p.txt:1")
    ocr.check([good])
    bad = [Prompt("no words", i, where=f"p.txt:{i}") for i in range(2, 7)]
    with pytest.raises(UsageError, match=r"5 of 6 prompts .*\(p.txt:2, p.txt:3, p.txt:4, \.\.\.\)"):
        ocr.check([good, *bad])
    with pytest.raises(UsageError, match=r"1 of 1 prompts .*\(p.txt:2\)"):
        ocr.check(bad[:1])


def test_a_missing_target_in_the_run_is_nan_with_a_reason_and_never_a_crash(ocr: Ocr) -> None:
    result = ocr(media(sign("CAT"), sign("DOG")), [Prompt("none"), Prompt('"DOG"')])
    assert result.values.isnan().tolist() == [True, False]
    assert result.details[0]["error"] == "the prompt has no text to look for"


def test_details_say_what_was_read_and_how(ocr: Ocr) -> None:
    (detail,) = ocr(media(sign("CAT", "navy")), [Prompt('the word "cat"')]).details
    assert detail.pop("confidence") > 0.9
    assert detail == {"read": "CAT", "target": "cat", "exact": True, "mode": "line"}


def test_a_large_picture_is_read_by_detection_in_reading_order(ocr: Ocr) -> None:
    two = poster((180, 31, "WORLD"), (20, 30, "HELLO"), (40, 160, "again"))
    result = ocr(media(two, poster()), [Prompt('"hello" “World” "again"'), Prompt('"hello"')])
    assert result.values.tolist() == [1.0, 0.0]
    assert [d["mode"] for d in result.details] == ["detect", "detect"]
    assert result.details[1]["read"] == ""


def test_a_picture_reads_the_same_whatever_its_neighbours(ocr: Ocr) -> None:
    pictures = [poster((20, 30, "HI")), poster((10, 30, "A MUCH LONGER LINE")), poster((20, 80, "HELLO"))]
    prompts = [Prompt('"HI"')] * 3
    together = ocr(media(*pictures), prompts)
    for i, picture in enumerate(pictures):
        alone = ocr(media(picture), prompts[:1])
        assert alone.details[0]["read"] == together.details[i]["read"]
        # the confidence is rounded to 4 digits; batched float32 sums may differ in the last
        assert alone.details[0]["confidence"] == pytest.approx(together.details[i]["confidence"], abs=1e-4)


@pytest.mark.parametrize(
    ("height", "width", "mode"),
    [(64, 128, "line"), (65, 256, "detect"), (64, 127, "detect"), (32, 96, "line")],
)
def test_only_small_wide_pictures_are_taken_for_one_line(
    ocr: Ocr, height: int, width: int, mode: str
) -> None:
    (detail,) = ocr(media(np.full((height, width, 3), 128, np.uint8)), [Prompt('"CAT"')]).details
    assert detail["mode"] == mode


def test_pictures_go_to_the_reader_as_bytes_in_the_order_blue_green_red() -> None:
    class Seen:
        def read(self, pictures: list[np.ndarray]) -> list[dict[str, object]]:
            self.pictures = pictures
            return [{"read": "CAT"} for _ in pictures]

    ocr, seen = Ocr(), Seen()
    ocr.reader = seen
    pixels = torch.tensor([0.1, 0.5, 2.0]).reshape(1, 1, 3, 1, 1).expand(1, 1, 3, 32, 96)
    ocr(Media(pixels), [Prompt('"CAT"')])
    assert seen.pictures[0].shape == (32, 96, 3)
    assert seen.pictures[0].dtype == np.uint8
    assert seen.pictures[0][0, 0].tolist() == [255, 128, 26]


def test_a_clip_scores_the_mean_of_its_frames(ocr: Ocr) -> None:
    frames = media(sign("CAT"), sign("DOG"), sign("CAT"), sign("CAT"))
    clips = Media(frames.pixels.reshape(2, 2, *frames.pixels.shape[2:]))
    alone = ocr(frames, [Prompt('"CAT"')] * 4).values
    both = ocr(clips, [Prompt('"CAT"')] * 2)
    assert both.values.tolist() == [(float(alone[0]) + float(alone[1])) / 2, 1.0]
    assert both.values[0] < 1
    assert [d["read"] for d in both.details] == [["CAT", "DOG"], ["CAT", "CAT"]]
    assert [d["exact"] for d in both.details] == [False, True]
    assert ocr(clips, [Prompt("none")] * 2).values.isnan().all()


def test_boxes_are_read_line_by_line_even_when_a_line_is_uneven() -> None:
    def box(x: float, y: float, height: float = 20.0) -> list[list[float]]:
        return [[x, y], [x + 30, y], [x + 30, y + height], [x, y + height]]

    boxes = np.array([box(200, 4), box(10, 40), box(100, 0, 26), box(10, 8)], np.float32)
    assert reading_order(boxes) == [3, 2, 0, 1]
    assert reading_order(np.zeros((0, 4, 2), np.float32)) == []


def test_rapidocr_still_is_as_the_reader_relies_on() -> None:
    """Pins what is private there: the recogniser's padded shape is ours to set, one text and score a crop."""
    reader = Reader()
    recogniser = reader.engine._load_rec_model()
    seen: list[tuple[int, ...]] = []
    session = recogniser.session
    recogniser.session = lambda batch: seen.append(batch.shape) or session(batch)
    texts = reader.recognise([sign("CAT"), sign("DOG"), np.full((32, 32, 3), 200, np.uint8)])
    assert [text for text, _ in texts] == ["CAT", "DOG", ""]
    assert seen == [(2, 3, 48, 144), (1, 3, 48, 48)]
    options = session.session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)


def test_normal_forms_do_not_depend_on_how_a_letter_is_composed() -> None:
    assert normal("e\u0301 \u00c9\n") == "éé"


def test_a_prompt_is_not_changed_by_being_judged(ocr: Ocr) -> None:
    prompt = Prompt('the word "CAT"', meta={"a": 1})
    before = dataclasses.asdict(prompt)
    ocr(media(sign("CAT")), [prompt])
    assert dataclasses.asdict(prompt) == before
