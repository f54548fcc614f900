"""The golden cases of vLLM's scores, labels and pooling."""

from __future__ import annotations

from typing import Any

from handler.core.errors import Overloaded, PromptTooLong
from handler.core.values import Delta
from tests.unit.protocols.answers import failing, refused

PAIRS = {"text_1": "What is deep learning?", "text_2": ["A cheese", "A kind of learning", "Ü"]}
TOO_LONG = refused(PromptTooLong("input", 600, 512))
BUSY = refused(Overloaded("the queue is full"))

_SCORE: dict[str, tuple[Any, Any]] = {
    "one": ({"queries": "a", "documents": "b", "model": "model"}, None),
    "several": ({**PAIRS, "user": "me"}, None),
    "none": ({"text_1": "a"}, None),
    "wrong": ({**PAIRS, "truncate_prompt_tokens": "all"}, None),
    "too_long": (PAIRS, TOO_LONG),
    "busy": (PAIRS, BUSY),
    "fails": (PAIRS, failing(0)),
    "not_json": (b"{", None),
}
_TEXTS: dict[str, tuple[Any, Any]] = {
    "one": ({"input": "What is"}, None),
    "several": ({"input": ["What", "is"], "model": "model"}, None),
    "none": ({"input": []}, None),
    "wrong": ({"input": "a", "use_activation": 2}, None),
    "too_long": ({"input": "a"}, TOO_LONG),
    "busy": ({"input": "a"}, BUSY),
    "fails": ({"input": "a"}, failing(0)),
}
_POOLING: dict[str, tuple[Any, Any]] = {
    **_TEXTS,
    "base64": ({"input": "What is", "encoding_format": "base64"}, None),
    "of_tokens": ({"input": "a", "task": "token_embed"}, None),
}

CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    **{f"vllm/score_{name}": ("vllm_score", *case) for name, case in _SCORE.items()},
    **{f"vllm/classify_{name}": ("vllm_classify", *case) for name, case in _TEXTS.items()},
    **{f"vllm/pooling_{name}": ("vllm_pooling", *case) for name, case in _POOLING.items()},
}
