"""Prompts in the form that vLLM's engine takes; those with images by vLLM's own processor of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handler.core.media import MediaPrompt, MediaTokens
from handler.engines.huggingface.image_tokens import collapse


def engine_input(renderer: Any, ids: Sequence[int], prompt: MediaPrompt | None, tokens: MediaTokens) -> Any:
    """Make the engine's input of a prompt, with images or without.

    The digests are the images' names in all of vLLM's caches: equal images hit, different ones never.

    Args:
        renderer: the engine's.
        ids: with as many placeholders as the images have tokens.
        tokens: the model's.

    Raises:
        ValueError: vLLM refuses the images, or computes other tokens than `tokens` says.
    """
    if prompt is None:
        from vllm.inputs import tokens_input

        return tokens_input(list(ids))
    from PIL import Image

    counts = [tokens.count(image.width, image.height) for image in prompt.media]
    given = {
        "prompt_token_ids": collapse(ids, tokens.placeholder, counts),
        "multi_modal_data": {
            "image": [Image.frombytes("RGB", (image.width, image.height), image.rgb) for image in prompt.media]
        },
        "multi_modal_uuids": {"image": [image.digest for image in prompt.media]},
    }
    (found,) = renderer.render_cmpl([given])
    if list(found["prompt_token_ids"]) != list(ids):
        raise ValueError(f"vLLM computes {len(found['prompt_token_ids'])} tokens for a prompt of {len(ids)}: a bug")
    return found
