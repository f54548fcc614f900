"""A request in the executor, and what C++ says of its sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm._double.result import GenerationResult
from tensorrt_llm.inputs import Processed

_RANGES = {
    "top_p": (0, 1, False),
    "top_p_min": (0, 1, True),
    "top_p_decay": (0, 1, False),
    "min_p": (0, 1, True),
    "repetition_penalty": (0, math.inf, False),
    **dict.fromkeys(
        (
            "temperature", "top_k", "min_tokens", "prompt_ignore_length", "early_stopping", "length_penalty",
            "no_repeat_ngram_size", "beam_search_diversity_rate",
        ),
        (0, math.inf, True),
    ),
}  # fmt: skip
"""Least, most, whether the least itself is allowed. The C++ SamplingConfig checks this in the worker, so the error
arrives with the result (TensorRT-LLM 1.2)."""
_WHOLE = (
    "max_tokens", "top_k", "seed", "min_tokens", "no_repeat_ngram_size", "early_stopping", "end_id", "pad_id", "n",
    "best_of",
)  # fmt: skip


@dataclass
class Sequence:
    random: Any
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    posted: int = 0
    cumulative: float = 0.0
    finish: str | None = None


@dataclass
class Request:
    id: int
    prompt: list[int]
    params: Any
    streaming: bool
    result: GenerationResult
    lora: Any
    salt: str | None
    processed: Processed | None = None  # by a vision model's input processor
    seen: tuple[str, ...] = ()  # pixels of the images that it is computed with
    room: int = 0
    stop: list[list[int]] = field(default_factory=list)
    bad: list[list[int]] = field(default_factory=list)
    guide: list[list[int]] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    context: Any = None
    cancelled_in: int | None = None

    @property
    def keys(self) -> list[Any]:
        """What the KV cache knows each of the prompt's positions by."""
        return self.prompt if self.processed is None else self.processed.keys

    @property
    def images(self) -> list[tuple[int, str]]:
        """Where each image begins, and the pixels that it is computed with."""
        starts = () if self.processed is None else self.processed.images
        return [(start, pixels) for (start, _), pixels in zip(starts, self.seen, strict=False)]

    @property
    def world(self) -> Any:
        """What the next token depends on beside the ids before it."""
        lora = self.lora.lora_int_id if self.lora else 0
        return (lora, self.seen) if self.seen else lora

    @property
    def end(self) -> int:
        return -1 if self.params.ignore_eos or self.params.end_id is None else self.params.end_id


def check_sampling(params: Any) -> None:
    for name in _WHOLE:
        value = getattr(params, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"incompatible function arguments: {name}={value!r}")
    if params.seed is not None and not 0 <= params.seed < 1 << 64:
        raise TypeError("incompatible function arguments: seed")
    if params.n < 1 or params.best_of < 1:
        raise ValueError("n must be positive")
    for name, (least, most, included) in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not (least < value <= most or (included and value == least)):
            raise ValueError(f"Encountered invalid value for {name}: {value}")
