"""Whisper's pieces of a clip, its tokens of times and its prompts, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from handler.core.media import SAMPLE_RATE
from handler.core.text import Vocabulary
from handler.core.values import TemplateOptions
from handler.engines.huggingface.whisper import WhisperIds, WhisperTokenizer, cut, whisper_ids
from tests.one_test import in_one_test

WINDOW = 30 * SAMPLE_RATE
IDS = WhisperIds(
    start=10,
    previous=11,
    no_timestamps=20,
    languages={"en": 12, "de": 13},
    tasks={"transcribe": 14, "translate": 15},
    suppressed=(),
    most=448,
)


@pytest.mark.parametrize("length", [1, SAMPLE_RATE, WINDOW])
def test_a_clip_of_one_window_is_whole(length: int) -> None:
    assert list(cut(numpy.ones(length, numpy.float32))) == [(0, length)]


@in_one_test("seconds", [30.001, 59, 60, 61.5, 300])
def test_pieces_follow_one_another_and_fit_a_window(seconds: float) -> None:
    samples = numpy.random.default_rng(1).standard_normal(round(seconds * SAMPLE_RATE)).astype(numpy.float32)
    pieces = list(cut(samples))
    assert pieces[0][0] == 0
    assert pieces[-1][1] == len(samples)
    assert [start for start, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
    assert all(WINDOW - SAMPLE_RATE <= end - start <= WINDOW for start, end in pieces[:-1])
    assert 0 < pieces[-1][1] - pieces[-1][0] <= WINDOW


def test_a_clip_is_cut_where_it_is_quiet() -> None:
    samples = numpy.ones(2 * WINDOW, numpy.float32)
    quiet = WINDOW - SAMPLE_RATE + 8000
    samples[quiet : quiet + 1600] = 0.01
    assert list(cut(samples))[0] == (0, quiet)  # noqa: RUF015


def tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer(Vocabulary([b"a"] * 21, special={10}), lambda text: [1] * len(text.split()), IDS)


def test_times_are_special_tokens_though_the_tokenizer_lacks_them() -> None:
    vocabulary = tokenizer().vocabulary
    assert vocabulary is not None
    assert len(vocabulary) == 21 + 1501
    assert [vocabulary.text(IDS.of_time(seconds)) for seconds in (0, 1.5, 30, 99)] == [
        "<|0.00|>", "<|1.50|>", "<|30.00|>", "<|30.00|>",
    ]  # fmt: skip
    assert {IDS.of_time(0), IDS.of_time(30), 10} <= vocabulary.special


def test_prompts() -> None:
    def ids(**asked: object) -> list[int]:
        return tokenizer().encode_chat((), options=TemplateOptions(arguments=tuple(asked.items()))).ids

    assert ids(task="transcribe") == [10, 14, 20]
    assert ids(task="translate", language="de", timestamps=True) == [10, 13, 15]
    prompt = ids(task="transcribe", prompt="two words")
    assert prompt == [11, 1, 1, 10, 14, 20]
    assert IDS.language_of(prompt) == ""
    assert IDS.language_of([11, 12, *IDS.in_language(prompt[3:], "de")]) == "de"  # a client's prompt names none


def test_a_models_own_values(tmp_path: Path) -> None:
    made = {
        "decoder_start_token_id": 3,
        "no_timestamps_token_id": 4,
        "suppress_tokens": [1, -1, "x", 2],
        "is_multilingual": False,
        "lang_to_id": {"<|en|>": 5},
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(made))
    (tmp_path / "config.json").write_text("{}")
    found = whisper_ids(tmp_path)
    assert (found.suppressed, found.languages, found.most, found.most_previous) == ((1, 2), {}, 448, 223)
