"""Tokens of images by a model's files, placeholders in prompts, and forms of content that a template takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest

from handler.core.media import MEDIA, Medium
from handler.engines.huggingface.media import collapse, expand, no_images, no_media, read_image_tokens
from handler.engines.huggingface.tokenizer import find_forms

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
    found = read_image_tokens(write(tmp_path, config, processor))
    assert not isinstance(found, str)
    assert found.count(size) == number


def test_what_takes_no_images_says_why(tmp_path: Path) -> None:
    assert no_images(write(tmp_path, {"model_type": "llama"})) == "the model takes text only"
    assert "model_type gemma3 " in no_images(write(tmp_path, {"model_type": "gemma3", "vision_config": {}}))
    assert "pixtral" in no_images(write(tmp_path, {"model_type": "llava", "vision_config": {"model_type": "pixtral"}}))
    qwen = read_image_tokens(write(tmp_path, {"model_type": "qwen2_vl"}))
    assert not isinstance(qwen, str)
    assert no_media(None) == dict.fromkeys(MEDIA, "the model takes text only")
    assert no_media(write(tmp_path, {"model_type": "qwen2_vl"})) == {
        "image": "",
        "audio": "the model takes no audio clips",
    }
    with pytest.raises(ValueError, match="over 200 times"):
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
    with pytest.raises(ValueError, match="makes 2 placeholders for 1 images"):
        expand([9, 9], {"image": [1]}, WIDE)
    for ids, width in (([9, 9, 1], 3), ([9, 9], 1), ([1], 1)):
        with pytest.raises(ValueError, match="as many placeholders as its images"):
            collapse(ids, wide(width), WIDE)
    with pytest.raises(ValueError, match="as many placeholders as its images"):
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
