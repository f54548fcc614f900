"""A prompt that is too long, alone or together with its answer: one form of error, each dialect's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler.core.errors import AnswerTooLong, PromptTooLong
from tests.unit.protocols.answers import DIALECTS, answer, refused

PROMPT = PromptTooLong("inputs", 9000, 8191)
ANSWER = AnswerTooLong("max_new_tokens", 9, 8184, 8192)

INPUTS = {"inputs": "a"}
TALK = {"messages": [{"role": "user", "content": "a"}]}
TEXT = {"prompt": "a"}
TRITON = {"text_input": "a", "max_tokens": 2}
RERANK = {"query": "a", "documents": ["b"]}
BODIES: dict[str, list[dict[str, Any]]] = {
    "lmi": [INPUTS, TALK, TEXT, TRITON],
    "tgi_compat": [INPUTS, TALK, TEXT, TRITON],
    "dynamic_batch": [INPUTS],
    "tgi": [INPUTS],
    "tgi_generate": [INPUTS],
    "tgi_generate_stream": [INPUTS],
    "mindie": [INPUTS],
    "openai_chat": [TALK],
    "openai_completions": [TEXT],
    "anthropic_messages": [{**TALK, "max_tokens": 2}],
    "anthropic_count": [TALK],
    "openai_responses": [{"input": "a"}],
    "openai_embeddings": [{"input": "a"}],
    "lmi_embedding": [INPUTS, {"input": "a"}],
    "tei_embed": [INPUTS],
    "tei_similarity": [{"inputs": {"source_sentence": "a", "sentences": ["b"]}}],
    "tei_rerank": [{"query": "a", "texts": ["b"]}, RERANK],
    "tei_predict": [INPUTS],
    "rerank": [RERANK],
    "rerank_v2": [RERANK],
    "triton_generate": [TRITON],
    "triton_generate_stream": [TRITON],
}

NO_STREAM = ("dynamic_batch", "tgi_generate", "triton_generate")
"""A request cannot ask these for one."""


def form(value: Any) -> Any:
    """A body without what its messages say."""
    if not isinstance(value, dict):
        return value
    blank = ("error", "message", "param")
    return {key: "" if key in blank and isinstance(part, str) else form(part) for key, part in value.items()}


def test_every_dialect_has_a_row() -> None:
    assert set(BODIES) == set(DIALECTS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dialect", "body"),
    [pytest.param(name, body, id=f"{name}-{next(iter(body))}") for name, bodies in BODIES.items() for body in bodies],
)
def test_both_have_one_form(dialect: str, body: dict[str, Any], stream: bool) -> None:
    if stream and dialect not in NO_STREAM:
        body = {**body, "stream": True}
    alone, together = (answer(dialect, body, refused(error)) for error in (PROMPT, ANSWER))
    assert (alone.status, alone.content_type) == (together.status, together.content_type)
    assert alone.status >= 400 or alone.content_type.startswith("text/event-stream")
    values = [json.loads(one.body.removeprefix(b"data:")) for one in (alone, together)]
    assert values[0] != values[1]
    assert form(values[0]) == form(values[1])
