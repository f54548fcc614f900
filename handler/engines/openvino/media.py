"""Prompts for OpenVINO GenAI's vision models, which take text and images, no ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handler.core.media import MediaPrompt, MediaTokens
from handler.engines.huggingface.image_tokens import collapse, prompt_text

_OWN_TAGS = ("<ov_genai_image_", "<ov_genai_video_", "<ov_genai_audio_")
"""GenAI's own placeholders, which it replaces wherever they stand."""


class VisionPrompts:
    """Makes GenAI's arguments of a prompt, and checks that GenAI reads the ids that the host has counted.

    Args:
        tokenizer: the pipeline's.
        tokens: the model's.
    """

    def __init__(self, tokenizer: Any, tokens: MediaTokens) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens

    def arguments(self, ids: Sequence[int], media: MediaPrompt | None) -> tuple[str, list[Any]]:
        """Return the text, and images as tensors [1, height, width, 3] of u8.

        Raises:
            ValueError: no text has these ids.
        """
        text, pictures = ("", ()) if media is None else media
        counts = [self._tokens.count(picture.width, picture.height) for picture in pictures]
        short = collapse(ids, self._tokens.placeholder, counts)
        text = prompt_text(short, text, self._encode, self._decode)
        if tag := next((tag for tag in _OWN_TAGS if tag in text), ""):
            raise ValueError(f"the prompt's text has {tag}, which OpenVINO GenAI reads as an image")
        return text, [_tensor(picture.width, picture.height, picture.rgb) for picture in pictures]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
        return ids

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _tensor(width: int, height: int, rgb: bytes) -> Any:
    import numpy
    import openvino

    return openvino.Tensor(numpy.frombuffer(rgb, dtype=numpy.uint8).reshape(1, height, width, 3).copy())
