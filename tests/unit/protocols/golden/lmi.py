"""The golden cases of LMI's async mode."""

from __future__ import annotations

from typing import Any

from handler.core.errors import AnswerTooLong, PromptTooLong
from handler.core.values import Delta, Finish
from tests.unit.protocols.answers import TOOLS, deltas, failing, refused, saying, shorter

ASK = "What is"
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]}
CALL = 'Wait. <tool_call>[{"name": "weather", "arguments": {"city": "Köln"}}]</tool_call>'


def body(parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"inputs": ASK, **({} if parameters is None else {"parameters": parameters}), **more}


def at_its_limit() -> list[Delta]:
    """An answer that its length ended."""
    *before, last = deltas()[:3]
    return [*before, last._replace(finish=Finish.LENGTH)]


def without_a_last_token() -> list[Delta]:
    """An answer whose end came by itself."""
    return [*deltas()[:2], Delta(1, 0, (), Finish.STOP)]


def several_a_step() -> list[Delta]:
    """An answer whose tokens came in two steps."""
    tokens = [token for delta in deltas() for token in delta.tokens]
    return [Delta(1, 0, tuple(tokens[:3])), Delta(1, 0, tuple(tokens[3:]), Finish.EOS)]


DETAILS = {"details": True, "seed": 42}

CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    "async/plain": ("lmi_async", body(), None),
    "async/details": ("lmi_async", body(DETAILS), None),
    "async/details_without_seed": ("lmi_async", body({"details": True}), at_its_limit()),
    "async/details_stop": ("lmi_async", body(DETAILS), shorter(0)),
    "async/full_text": ("lmi_async", {"inputs": 'a "quoted"\nprompt', "parameters": {"return_full_text": True}}, None),
    "async/prefill": ("lmi_async", body({**DETAILS, "decoder_input_details": True}), None),
    "async/two_choices": ("lmi_async", body({"details": True, "n": 2, "top_n_tokens": 3}), None),
    "async/stream": ("lmi_async", body(stream=True), None),
    "async/stream_in_parameters": ("lmi_async", body({"stream": True}), at_its_limit()),
    "async/stream_details": ("lmi_async", body(DETAILS, stream=True), None),
    "async/stream_details_length": ("lmi_async", body({"details": True}, stream=True), at_its_limit()),
    "async/stream_full_text": ("lmi_async", body({"return_full_text": True}, stream=True), None),
    "async/stream_several_a_step": ("lmi_async", body(DETAILS, stream=True), several_a_step()),
    "async/stream_no_last_token": ("lmi_async", body(DETAILS, stream=True), without_a_last_token()),
    "async/stream_fails": ("lmi_async", body(stream=True), failing(2)),
    "async/stream_fails_at_once": ("lmi_async", body(stream=True), failing(0)),
    "async/fails": ("lmi_async", body(), failing(2)),
    "async/bad_payload": ("lmi_async", {"text": ASK}, None),
    "async/bad_parameter": ("lmi_async", body({"top_p": 2}), None),
    "async/stream_bad_parameter": ("lmi_async", body({"top_p": 2}, stream=True), None),
    "async/several_prompts": ("lmi_async", {"inputs": [ASK, "Why"]}, None),
    "async/unknown_model": ("lmi_async", body(model="other"), None),
    "async/two_errors": ("lmi_async", body({"top_p": 2}, stream="maybe"), None),
    "async/prompt_too_long": ("lmi_async", body(), refused(PromptTooLong("inputs", 9000, 8191))),
    "async/answer_too_long": (
        "lmi_async", body(), refused(AnswerTooLong("parameters.max_new_tokens", 9, 8184, 8192)),
    ),
    "async/prompt": ("lmi_async", {"prompt": ASK}, None),
    "async/prompts": ("lmi_async", {"model": "lmi", "prompt": [ASK, "Why"], "echo": True}, None),
    "async/prompt_stream": ("lmi_async", {"prompt": ASK, "stream": True}, None),
    "async/prompt_stream_usage": (
        "lmi_async", {"prompt": ASK, "stream": True, "stream_options": {"include_usage": True}}, None,
    ),
    "async/prompt_stream_fails": ("lmi_async", {"prompt": ASK, "stream": True}, failing(2)),
    "async/prompt_unknown_model": ("lmi_async", {"prompt": ASK, "model": "other"}, None),
    "async/prompt_bad_parameter": ("lmi_async", {"prompt": ASK, "top_p": 2}, None),
    "async/prompt_fails": ("lmi_async", {"prompt": ASK}, failing(2)),
    "async/chat": ("lmi_async", {"model": "lmi", **CHAT}, None),
    "async/chat_stream": ("lmi_async", {**CHAT, "stream": True}, None),
    "async/chat_stream_usage": (
        "lmi_async", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}, None,
    ),
    "async/chat_stream_fails": ("lmi_async", {**CHAT, "stream": True}, failing(2)),
    "async/chat_tools": ("lmi_async", {**CHAT, "tools": TOOLS}, saying(CALL)),
    "async/chat_stream_tools": ("lmi_async", {**CHAT, "tools": TOOLS, "stream": True}, saying(CALL, 9)),
    "async/chat_unknown_model": ("lmi_async", {**CHAT, "model": "other"}, None),
    "async/chat_bad_payload": ("lmi_async", {"messages": [{"role": "user", "content": 5}]}, None),
    "async/chat_too_long": ("lmi_async", CHAT, refused(PromptTooLong("messages", 9000, 8191))),
}  # fmt: skip
