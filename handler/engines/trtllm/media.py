"""Prompts of vision models for TensorRT-LLM, which reads them as text and computes the ids itself.

Facts of 1.0 to 1.3 (llmapi/llm.py, inputs/registry.py, _torch/models/modeling_qwen2vl.py, NVIDIA/TensorRT-LLM):

* Ids with images are decoded and encoded again; before 1.3 that fails without `mm_processor_kwargs`.
* Before 1.3 a step that has prompts of ids beside images fails for all of them: texts alone get Qwen2-VL's positions.
* The images' hashes in the KV cache leave out the width, and one image that cannot be hashed ends hashing for good.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from handler.core.media import MediaPrompt
from handler.engines.huggingface.image_tokens import QwenTokens, collapse, prompt_text, read_media_tokens


def refusal(model: Path | None, *, own_caches: bool) -> str:
    """Return the reason why TensorRT-LLM takes no images of this model here; "" where it does.

    Args:
        own_caches: a request can have a prefix cache of its own, or there is none.
    """
    tokens = read_media_tokens(model)
    if isinstance(tokens, str):
        return tokens
    if not isinstance(tokens, QwenTokens):
        return "TensorRT-LLM has no model_type llava (config.json)"
    return "" if own_caches else "images before TensorRT-LLM 1.2 need option.enable_prefix_caching=false"


def cache_salt(media: MediaPrompt | None) -> str | None:
    """Name the prefix cache of prompts with the same images; None without images."""
    if media is None or not media.media:
        return None
    return hashlib.sha256(",".join(image.digest for image in media.media).encode()).hexdigest()


class VisionPrompts:
    """Makes the inputs of `generate_async`, and checks the ids that TensorRT-LLM computes.

    Args:
        tokenizer: the LLM's.
        tokens: the model's.
        vocabulary: size of it.
    """

    def __init__(self, tokenizer: Any, tokens: QwenTokens, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._vocabulary = vocabulary

    def inputs(self, ids: Sequence[int], media: MediaPrompt | None) -> dict[str, Any]:
        """Return the text, with images as Pillow's.

        Raises:
            ValueError: no text has these ids, or not as many placeholders as images.
        """
        text, pictures = ("", ()) if media is None else media
        counts = [self._tokens.count(picture.width, picture.height) for picture in pictures]
        short = collapse(ids, self._tokens.placeholder, counts)
        inputs: dict[str, Any] = {"prompt": prompt_text(short, text, self._encode, self._decode)}
        if pictures:
            from PIL import Image

            found = [Image.frombytes("RGB", (picture.width, picture.height), picture.rgb) for picture in pictures]
            inputs["multi_modal_data"] = {"image": found}
        return inputs

    def check(self, found: Sequence[int], ids: Sequence[int]) -> str:
        """Compare the ids that TensorRT-LLM computes; return what is wrong, or "".

        Before 1.3 those of images are beyond the vocabulary.
        """
        placeholder = self._tokens.placeholder
        if len(found) != len(ids):
            return f"TensorRT-LLM computes {len(found)} tokens for a prompt of {len(ids)}: a bug"
        for at, (one, id) in enumerate(zip(found, ids, strict=True)):
            if one != id and not (id == placeholder and one >= self._vocabulary):
                return f"TensorRT-LLM computes the id {one} in the prompt's place {at}, which has {id}: a bug"
        return ""

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def vision_prompts(model: Path, tokenizer: Any, vocabulary: int) -> VisionPrompts | None:
    """Make them for a model with images; None where prompts are ids."""
    tokens = read_media_tokens(model)
    return VisionPrompts(tokenizer, tokens, vocabulary) if isinstance(tokens, QwenTokens) else None
