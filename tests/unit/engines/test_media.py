"""Tokens of images and of audio clips, without an engine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy
import pytest

from handler.core.media import MEDIA, SAMPLE_RATE, Medium
from handler.core.text import Vocabulary
from handler.core.values import TemplateOptions
from handler.engines.huggingface.media import (
    collapse,
    expand,
    no_images,
    no_media,
    read_tokens,
)
from handler.engines.huggingface.tokenizer import find_forms
from handler.engines.huggingface.whisper import WhisperIds, WhisperTokenizer, cut, whisper_ids
from tests.one_test import in_one_test

# -- tokens of images by a model's files, placeholders in prompts, and forms of content that a template takes ----------


CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 16}


def write(directory: Path, config: dict[str, Any], processor: dict[str, Any] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


@pytest.mark.parametrize(
    ("config", "processor", "size", "number"),
    [
        ({"model_type": "llava", "vision_config": CLIP}, None, (10, 2000), 576),
        ({"model_type": "llava", "vision_config": CLIP, "vision_feature_select_strategy": "full"}, None, (9, 9), 577),
        ({"model_type": "llava", "vision_config": SIGLIP, "vision_feature_select_strategy": "full"}, None, (9, 9), 576),
        ({"model_type": "qwen2_vl"}, None, (56, 84), 6),
        ({"model_type": "qwen2_vl"}, None, (1, 1), 4),  # least: 56 times 56 pixels
        ({"model_type": "qwen2_vl"}, None, (4000, 3000), 1230),  # most: 1280 tokens; here 30 times 41
        ({"model_type": "qwen2_5_vl"}, {"min_pixels": 28 * 28 * 100}, (56, 56), 100),
        ({"model_type": "qwen2_vl"}, {"size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 16}}, (999, 999), 16),
    ],
)
def test_counts(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any] | None, size: tuple[int, int], number: int
) -> None:
    found = read_tokens(write(tmp_path, config, processor), "image")
    assert not isinstance(found, str)
    assert found.count(size) == number


@in_one_test(
    ("config", "placeholder"),
    [({}, 151646), ({"audio_token_id": 7}, 7), ({"audio_token_id": 7, "audio_token_index": 8}, 8)],
)
@in_one_test(("samples", "number"), [(481, 1), (16_000, 25), (480_000, 750)])
def test_tokens_of_audio(config: dict[str, Any], placeholder: int, samples: int, number: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        found = read_tokens(write(Path(directory), {"model_type": "qwen2_audio", **config}), "audio")
    assert not isinstance(found, str)
    assert (found.placeholder, found.count((samples,))) == (placeholder, number)


def test_what_takes_no_images_says_why_in_media(tmp_path: Path) -> None:
    assert no_images(write(tmp_path, {"model_type": "llama"})) == "the model accepts text only"
    assert "model_type gemma3 " in no_images(write(tmp_path, {"model_type": "gemma3", "vision_config": {}}))
    assert "pixtral" in no_images(write(tmp_path, {"model_type": "llava", "vision_config": {"model_type": "pixtral"}}))
    qwen = read_tokens(write(tmp_path, {"model_type": "qwen2_vl"}), "image")
    assert not isinstance(qwen, str)
    assert no_media(None) == dict.fromkeys(MEDIA, "the model accepts text only")
    assert no_media(write(tmp_path, {"model_type": "qwen2_vl"})) == {
        "image": "",
        "audio": "the model accepts no audio clips",
    }
    with pytest.raises(ValueError, match="more than 200 times"):
        qwen.count((201, 1))


class Wide:
    """An image has a token a pixel of its width."""

    placeholder, text = 9, "<image>"

    def count(self, size: Sequence[int]) -> int:
        return size[0]


WIDE = {"image": Wide()}


def wide(*widths: int) -> list[Medium]:
    return [Medium("image", (width, 1), b"", "") for width in widths]


def test_placeholders_are_repeated_and_joined_again() -> None:
    assert expand([1, 9, 2, 9, 9], {"image": [3, 1, 2]}, WIDE) == [1, 9, 9, 9, 2, 9, 9, 9]
    assert collapse([1, 9, 9, 9, 2, 9, 9, 9], wide(3, 1, 2), WIDE) == [1, 9, 2, 9, 9]
    with pytest.raises(ValueError, match="writes 2 placeholders for 1 images"):
        expand([9, 9], {"image": [1]}, WIDE)
    for ids, width in (([9, 9, 1], 3), ([9, 9], 1), ([1], 1)):
        with pytest.raises(ValueError, match="the number of placeholders in the prompt differs"):
            collapse(ids, wide(width), WIDE)
    with pytest.raises(ValueError, match="the number of placeholders in the prompt differs"):
        collapse([9], (), WIDE)


_LOOP = "{%% for m in messages %%}[%s]{%% endfor %%}"
_OF_PARTS = "{% for part in m.content %}{{ part.text or '<i>' }}{% endfor %}"
TEXTS = _LOOP % "{{ m.content }}"
PARTS = _LOOP % _OF_PARTS
BOTH = _LOOP % ("{% if m.content is string %}{{ m.content }}{% else %}" + _OF_PARTS + "{% endif %}")
CHAT = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize(
    ("template", "of_parts", "of_text"),
    [(TEXTS, "[<image>\na\nb]", "[hi]"), (PARTS, "[a<i>b]", "[hi]"), (BOTH, "[a<i>b]", "[hi]")],
    ids=["texts", "parts", "both"],
)
def test_a_template_gets_the_form_that_it_renders(template: str, of_parts: str, of_text: str) -> None:
    def render(messages: list[dict[str, Any]]) -> str:
        return str(jinja2.Template(template).render(messages=messages))

    forms = find_forms(render, WIDE)
    assert render(forms.adapt(CHAT)) == of_parts
    assert render(forms.adapt([{"role": "user", "content": "hi"}])) == of_text


# -- Whisper's pieces of a clip, its tokens of times and its prompts, without an engine --------------------------------


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


def test_prompts_in_media() -> None:
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
    assert (found.suppressed, found.languages, found.most) == ((1, 2), {}, 448)
