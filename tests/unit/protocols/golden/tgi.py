"""The golden cases of TGI's own routes and of MindIE's."""

from __future__ import annotations

from typing import Any

from handler.core.errors import GenerationFailed
from handler.core.values import Delta, Finish, Token
from tests.unit.protocols.answers import deltas, failing, shorter, with_tops

ASK = "What is"
GREEDY = {"max_new_tokens": 9, "details": True}
SAMPLED = {**GREEDY, "do_sample": True, "seed": 42}


def marked(sequence: int = 0) -> list[Delta]:
    """An answer whose end token shows itself, as these dialects have it; a special token stands within it too."""
    *before, last = deltas(sequence)
    within = Delta(1, sequence, (Token(7, "<think>", -0.5, True),))
    return [before[0], within, *before[1:], last._replace(tokens=(last.tokens[0]._replace(text="</s>"),))]


def first_bad() -> list[Delta]:
    """Two sequences, of which the first is more probable as a whole, and the second by the token."""
    words = [Delta(1, 0, (Token(5, " x", -2.0, False),), Finish.EOS)]
    longer = [Delta(1, 1, (Token(6, " y", -1.0, False),)) for _ in range(3)]
    return [*words, *longer, Delta(1, 1, (Token(2, "</s>", -0.5, True),), Finish.EOS)]


def body(parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"inputs": ASK, **({} if parameters is None else {"parameters": parameters}), **more}


_FAILS_AT_ONCE = [Delta(1, 0, (), Finish.ERROR, GenerationFailed("request failed in the engine: no"))]

CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    "tgi/plain": ("tgi", body(), marked()),
    "tgi/no_full_text": ("tgi", body({"return_full_text": False}), marked()),
    "tgi/details": ("tgi", body(GREEDY), marked()),
    "tgi/sampled": ("tgi", body(SAMPLED), marked()),
    "tgi/length_first": ("tgi", body({**GREEDY, "max_new_tokens": 6}), marked()),
    "tgi/prefill": ("tgi", body({"decoder_input_details": True}), None),
    "tgi/best_of": ("tgi", body({**GREEDY, "best_of": 2, "temperature": 0.5}), [*marked(0), *shorter(1)]),
    "tgi/best_of_mean": ("tgi", body({**GREEDY, "best_of": 2, "temperature": 0.5}), first_bad()),
    "tgi/top_tokens": ("tgi", body({**GREEDY, "top_n_tokens": 2}), with_tops()),
    "tgi/stream": ("tgi", body({"max_new_tokens": 9}, stream=True), marked()),
    "tgi/stream_details": ("tgi", body(SAMPLED, stream=True), marked()),
    "tgi/stream_top_tokens": ("tgi", body({**GREEDY, "top_n_tokens": 2}, stream=True), with_tops()),
    "tgi/stream_fails": ("tgi", body(stream=True), failing(2)),
    "tgi/stream_fails_at_once": ("tgi", body(stream=True), _FAILS_AT_ONCE),
    "tgi/stream_bad_parameter": ("tgi", body({"top_p": 1.0}, stream=True), None),
    "tgi/stream_wrong_type": ("tgi", body({"top_p": "x"}, stream=True), None),
    "tgi/fails": ("tgi", body(), failing(2)),
    "tgi/two_errors": ("tgi", body({"top_p": 1.0, "top_k": 0}, stream=True), None),
    "tgi/two_errors_stream": ("tgi", body({"top_p": 1.0}, stream="true"), None),
    "tgi/bad_parameter": ("tgi", body({"top_p": 1.0}), None),
    "tgi/lacking": ("tgi", body({"do_sample": True, "typical_p": 0.5}), None),
    "tgi/wrong_type": ("tgi", body({"stop": None}), None),
    "tgi/not_json": ("tgi", b'{"inputs"', None),
    "tgi/generate": ("tgi_generate", body(GREEDY), marked()),
    "tgi/generate_fails": ("tgi_generate", body(stream=True), failing(2)),
    "tgi/generate_stream": ("tgi_generate_stream", body(GREEDY), marked()),
    "tgi/generate_stream_bad_parameter": ("tgi_generate_stream", body({"stop": ["a", "b", "c", "d", "e"]}), None),
    "mindie/plain": ("mindie", body(), marked()),
    "mindie/details": ("mindie", body(SAMPLED), marked()),
    "mindie/prefill": ("mindie", body({"decoder_input_details": True, "seed": 1}), None),
    "mindie/full_text": ("mindie", body({"return_full_text": True}), marked()),
    "mindie/stream": ("mindie", body(stream=True), marked()),
    "mindie/stream_details": ("mindie", body(SAMPLED, stream=True), marked()),
    "mindie/stream_fails": ("mindie", body(stream=True), failing(2)),
    "mindie/fails": ("mindie", body(), failing(2)),
    "mindie/bad_parameter": ("mindie", body({"top_k": 0}), None),
    "mindie/stream_bad_parameter": ("mindie", body({"top_k": 0}, stream=True), None),
    "mindie/wrong_type": ("mindie", body({"top_k": "x"}), None),
}
