"""Prompts for OpenVINO GenAI's vision models, which take text and images, no ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.media import MediaPrompt, MediaTokens, Medium
from handler.engines.huggingface.media_tokens import collapse, prompt_text

_OWN_TAGS = ("<ov_genai_image_", "<ov_genai_video_", "<ov_genai_audio_")
"""GenAI's own placeholders, which it replaces wherever they stand."""


class VisionPrompts:
    """Makes GenAI's arguments of a prompt, and checks that GenAI reads the ids that the host has counted.

    Args:
        tokenizer: the pipeline's.
        tokens: the model's, by kind.
    """

    def __init__(self, tokenizer: Any, tokens: Mapping[str, MediaTokens]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens

    def arguments(self, ids: Sequence[int], media: MediaPrompt | None) -> tuple[str, list[Any]]:
        """Return the text, and images as tensors [1, height, width, 3] of u8.

        Raises:
            ValueError: no text has these ids.
        """
        text, images = ("", ()) if media is None else media
        text = prompt_text(collapse(ids, images, self._tokens), text, self._encode, self._decode)
        if tag := next((tag for tag in _OWN_TAGS if tag in text), ""):
            raise ValueError(f"the prompt's text has {tag}, which OpenVINO GenAI reads as an image")
        return text, [_tensor(image) for image in images]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        return ids

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _tensor(image: Medium) -> Any:
    import numpy
    import openvino

    width, height = image.size
    return openvino.Tensor(numpy.frombuffer(image.data, dtype=numpy.uint8).reshape(1, height, width, 3).copy())
