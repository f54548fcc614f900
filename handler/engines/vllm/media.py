"""Prompts in the form that vLLM's engine takes; those with media by vLLM's own processor of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from handler.core.media import SAMPLE_RATE, MediaPrompt, MediaTokens, Medium
from handler.engines.huggingface.media_tokens import collapse
from handler.engines.pillow import pillow_image


def engine_input(
    renderer: Any, ids: Sequence[int], prompt: MediaPrompt | None, tokens: Mapping[str, MediaTokens]
) -> Any:
    """Make the engine's input of a prompt, with media or without.

    The digests are the media's names in all of vLLM's caches: equal ones hit, different ones never.

    Args:
        renderer: the engine's.
        ids: with as many placeholders as the media have tokens.
        tokens: the model's, by kind.

    Raises:
        ValueError: vLLM refuses the media, or computes other tokens than `tokens` says.
    """
    if prompt is None:
        from vllm.inputs import tokens_input

        return tokens_input(list(ids))
    data: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    for medium in prompt.media:
        data.setdefault(medium.kind, []).append(_DATA[medium.kind](medium))
        names.setdefault(medium.kind, []).append(medium.digest)
    given = {
        "prompt_token_ids": collapse(ids, prompt.media, tokens),
        "multi_modal_data": data,
        "multi_modal_uuids": names,
    }
    (found,) = renderer.render_cmpl([given])
    if list(found["prompt_token_ids"]) != list(ids):
        raise ValueError(f"vLLM computes {len(found['prompt_token_ids'])} tokens for a prompt of {len(ids)}: a bug")
    return found


def _samples(clip: Medium) -> tuple[Any, int]:
    import numpy

    return numpy.frombuffer(clip.data, dtype=numpy.float32), SAMPLE_RATE


_DATA: dict[str, Callable[[Medium], Any]] = {"image": pillow_image, "audio": _samples}
"""By kind: make the form that vLLM takes."""
