"""Prompts, and what must be true of every answer that a client gives back, whichever client it is."""

from __future__ import annotations

from typing import Any

PARIS = "The capital of France is"
PARIS_IDS = [504, 3575, 282, 4649, 314]
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"

UNICODE = 'é 日本語 🙂 👩\u200d🚀 🇫🇷 עברית "quoted" back\\slash a\u0301 \U00020000'
"""Several bytes a character, several characters a sign, and what JSON escapes; no two words are equal."""

EMOJI = "emoji: " + "👩\u200d🚀" * 6  # a pattern that even a small model goes on with
"""The demo model goes on in kind, with three or four tokens an emoji."""

TOO_MANY = 200_000
"""New tokens, more than the demo model's context."""


def texts(tokens: list[dict[str, Any]]) -> list[str]:
    return [token["text"] for token in tokens]


def joined(tokens: list[dict[str, Any]]) -> str:
    return "".join(texts(tokens))


def check_tokens(tokens: list[dict[str, Any]]) -> None:
    """Types are checked exactly: the lenient clients hand on whatever came."""
    for token in tokens:
        assert token.keys() == {"id", "text", "logprob", "special"}
        assert type(token["id"]) is int
        assert token["id"] >= 0
        assert type(token["text"]) is str
        assert type(token["logprob"]) is float
        assert token["logprob"] <= 0
        assert type(token["special"]) is bool


def check_prefill(prefill: list[dict[str, Any]], ids: list[int], prompt: str) -> None:
    """The first prompt token has no probability, as nothing stands before it."""
    assert [token["id"] for token in prefill] == ids
    assert joined(prefill) == prompt
    first, *rest = [token["logprob"] for token in prefill]
    assert first is None
    assert all(type(logprob) is float and logprob < 0 for logprob in rest)


def check_answer(answer: dict[str, Any], *, tokens: int, finish: str = "length") -> None:
    """A whole answer with details, to a prompt that it does not repeat."""
    details = answer["details"]
    assert details["finish_reason"] == finish
    assert details["generated_tokens"] == len(details["tokens"]) == tokens
    check_tokens(details["tokens"])
    assert joined(details["tokens"]) == answer["generated_text"]


def check_stream(events: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """A stream must say what the whole answer to the same request says."""
    check_tokens([event["token"] for event in events])
    *before, last = events
    assert all(event["generated_text"] is None and event["details"] is None for event in before)
    assert last["generated_text"] == answer["generated_text"]
    whole = answer["details"]
    assert [_identity(event["token"]) for event in events] == [_identity(token) for token in whole["tokens"]]
    for name in ("finish_reason", "generated_tokens", "seed"):
        assert last["details"][name] == whole[name], name


def _identity(token: dict[str, Any]) -> tuple[Any, ...]:
    """Without the log-probability, of which a second computation may differ in the last bits."""
    return token["id"], token["text"], token["special"]
