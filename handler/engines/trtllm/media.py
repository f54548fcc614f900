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
from handler.engines.huggingface.media import (
    QwenTokens,
    collapse,
    no_media,
    pillow_image,
    prompt_text,
    read_image_tokens,
)


def refusals(model: Path | None, *, own_caches: bool) -> dict[str, str]:
    """Return the reasons why TensorRT-LLM takes no media of a kind with this model here; "" where it does.

    It reads audio clips of Phi-4-multimodal alone (1.0 to 1.3), by code and by an adapter that come with that model.

    Args:
        own_caches: a request can have a prefix cache of its own, or there is none.
    """
    images = read_image_tokens(model)
    reasons = {"audio": "TensorRT-LLM has no model_type qwen2_audio (config.json)", "image": ""}
    if not isinstance(images, str) and not isinstance(images, QwenTokens):
        reasons["image"] = "TensorRT-LLM has no model_type llava (config.json)"
    elif not own_caches:
        reasons["image"] = "images before TensorRT-LLM 1.2 need option.enable_prefix_caching=false"
    return {kind: reason or reasons[kind] for kind, reason in no_media(model).items()}


def cache_salt(media: MediaPrompt | None) -> str | None:
    """Name the prefix cache of prompts with the same media; None without media."""
    if media is None or not media.media:
        return None
    return hashlib.sha256(",".join(medium.digest for medium in media.media).encode()).hexdigest()


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
        text, images = ("", ()) if media is None else media
        short = collapse(ids, images, {"image": self._tokens})
        inputs: dict[str, Any] = {"prompt": prompt_text(short, text, self._encode, self._decode)}
        if images:
            inputs["multi_modal_data"] = {"image": [pillow_image(image) for image in images]}
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
    tokens = read_image_tokens(model)
    return VisionPrompts(tokenizer, tokens, vocabulary) if isinstance(tokens, QwenTokens) else None
