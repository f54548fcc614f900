"""A delta of several tokens is rendered as one delta a token would be, in every dialect and format."""

from __future__ import annotations

import copy
import copyreg
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import orjson
import pytest

from handler.core.errors import GenerationFailed
from handler.core.values import NO_EXTRAS, Delta, Extras, Finish, Request, Token
from handler.protocols.anthropic import response as blocks
from handler.protocols.kernel.dialect import ParsedRequest, Reply, ServerContext
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.openai import chat as chat_response
from handler.protocols.openapi import DESCRIPTIONS
from handler.protocols.responses import response
from handler.protocols.responses import response as items
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, DIALECTS, STREAMED, with_options
from tests.unit.protocols.anthropic.golden import TOOLS as ANTHROPIC_TOOLS
from tests.unit.protocols.openai.requests import NAME_IT, TOOLS, USER
from tests.unit.protocols.responses.golden import TOOLS as RESPONSES_TOOLS

copyreg.pickle(orjson.Fragment, lambda fragment: "shared")  # a string: copies of a reply have the same one

TENSORS = ["output_ids", "sequence_length", "output_log_probs", "cum_log_probs", "context_logits", "generation_logits"]
EXTRAS = [f"return_{name}" for name in ("finish_reason", "cumulative_logprob", "num_input_tokens", "num_output_tokens")]
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}
BATCHES = with_options(CAPABLE, enable_streaming=True)


def lmi(parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"inputs": "What is", "parameters": parameters or {}, "stream": True, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "stream": True, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a b", "stream": True, **fields}


def messages(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 20, "stream": True, **fields}


def responses(**fields: Any) -> dict[str, Any]:
    return {"input": "hi", "stream": True, **fields}


def triton(**fields: Any) -> dict[str, Any]:
    return {"text_input": "What is", "stream": True, **fields}


CASES: dict[str, tuple[str, dict[str, Any], ServerContext]] = {
    **{
        f"{schema} {name}": (schema, body, CAPABLE)
        for schema in ("lmi", "tgi_compat")
        for name, body in {
            "lines": lmi(),
            "details": lmi({"details": True, "return_full_text": True}),
            "prefill": lmi({"decoder_input_details": True}),
            "top_tokens": lmi({"top_n_tokens": 2}),
            "tensors": lmi({"outputs": TENSORS}),
            "end_id": lmi({"end_id": 2, "details": True}),
            "whole": lmi({"details": True, "n": 2, "do_sample": True}, stream=False),
            "chat": chat(),
            "chat usage": chat(stream_options=ALWAYS),
            "chat logprobs": chat(logprobs=True, top_logprobs=2),
        }.items()
    },
    "lmi events": ("lmi", lmi({"output_formatter": "sse"}), CAPABLE),
    "tgi": ("tgi", lmi({"details": True}), CAPABLE),
    "tgi top_tokens": ("tgi", lmi({"top_n_tokens": 2, "details": True}), CAPABLE),
    "tgi whole": ("tgi", lmi({"decoder_input_details": True}, stream=False), CAPABLE),
    "tgi_generate_stream": ("tgi_generate_stream", lmi(), CAPABLE),
    "mindie": ("mindie", lmi({"details": True}), CAPABLE),
    "triton": ("triton_generate_stream", triton(), CAPABLE),
    "triton prompt": ("triton_generate_stream", triton(exclude_input_in_output=False, id="%b"), CAPABLE),
    "triton extras": ("triton_generate_stream", triton(**dict.fromkeys(EXTRAS, True)), CAPABLE),
    "triton finish_reason": ("triton_generate_stream", triton(return_finish_reason=True), CAPABLE),
    "triton log_probs": ("triton_generate_stream", triton(return_log_probs=True), CAPABLE),
    "triton whole": ("triton_generate_stream", triton(stream=False), CAPABLE),
    "dynamic_batch": ("dynamic_batch", {"inputs": "What", "parameters": {"return_full_text": True}}, BATCHES),
    "dynamic_batch whole": ("dynamic_batch", {"inputs": ["What", "is"]}, CAPABLE),
    "chat": ("openai_chat", chat(), CAPABLE),
    "chat n": ("openai_chat", chat(n=2, stream_options={"include_usage": True}), CAPABLE),
    "chat usage": ("openai_chat", chat(stream_options=ALWAYS, n=2), CAPABLE),
    "chat logprobs": ("openai_chat", chat(logprobs=True, top_logprobs=2), CAPABLE),
    "chat tgi": ("openai_chat", chat(model="tgi"), replace(CAPABLE, model_names=("tgi",))),
    "chat tools": ("openai_chat", chat(tools=TOOLS), CAPABLE),
    "chat tools usage": ("openai_chat", chat(tools=TOOLS, stream_options=ALWAYS), CAPABLE),
    "chat tools logprobs": ("openai_chat", chat(tools=TOOLS, logprobs=True, n=2), CAPABLE),
    "chat named tool": ("openai_chat", chat(tools=TOOLS, tool_choice=NAME_IT), CAPABLE),
    "messages": ("anthropic_messages", messages(), CAPABLE),
    "messages stops": ("anthropic_messages", messages(stop_sequences=["wo", "é"]), CAPABLE),
    "messages tools": ("anthropic_messages", messages(tools=ANTHROPIC_TOOLS), CAPABLE),
    "responses": ("openai_responses", responses(), CAPABLE),
    "responses tools": ("openai_responses", responses(tools=RESPONSES_TOOLS), CAPABLE),
    "responses whole": ("openai_responses", responses(tools=RESPONSES_TOOLS, stream=False), CAPABLE),
    "messages whole": ("anthropic_messages", messages(tools=ANTHROPIC_TOOLS, stream=False), CAPABLE),
    "completions": ("openai_completions", completion(), CAPABLE),
    "completions n": ("openai_completions", completion(prompt=["a", "b"], n=2, echo=True), CAPABLE),
    "completions usage": ("openai_completions", completion(stream_options=ALWAYS), CAPABLE),
    "completions logprobs": ("openai_completions", completion(logprobs=2), CAPABLE),
    "completions echo": ("openai_completions", completion(echo=True, logprobs=0), CAPABLE),
    "completions prompt only": ("openai_completions", completion(echo=True, logprobs=0, max_tokens=0), CAPABLE),
    **{
        f"{name} example": (name, {**DESCRIPTIONS[name].example, "stream": True}, CAPABLE)
        for name in DIALECTS
        if name in STREAMED
    },
}

CALL = 'Wait. <tool_call>[{"name": "weather", "arguments": {"city": "Köln"}}]</tool_call> So.'
TEXTS = ["", " word", "é😀", "%", "%b%d", "\0b", "\x85\u2028", '"', "<tool_call>", CALL, *CALL.split(" ")]
TRIALS = 30
PLAIN = (
    "lmi lines",
    "lmi events",
    "tgi",
    "mindie",
    "triton",
    "dynamic_batch",
    "chat",
    "completions",
    "messages",
    "responses",
)
"""Cases whose tokens have lines."""


def tokens(rng: random.Random, count: int, alternatives: int = 2) -> list[Token]:
    """Tokens that are often special, or without a log-probability."""
    return [
        Token(
            rng.randrange(6),
            rng.choice(TEXTS),
            rng.choice([None, -rng.random(), float("-inf")]),
            rng.random() < 0.2,
            tokens(rng, alternatives, 0) if alternatives else (),
        )
        for _ in range(count)
    ]


def sequence_deltas(rng: random.Random, request: Request, sequence: int) -> list[Delta]:
    """One sequence, in deltas of several tokens."""
    deltas = [Delta(1, sequence, tokens(rng, rng.randrange(5))) for _ in range(rng.randrange(1, 5))]
    if request.sampling.return_generation_logits:
        rows = [Extras(None, [[float(token.id), 0.25] for token in delta.tokens]) for delta in deltas]
        deltas = [delta._replace(extras=own) for delta, own in zip(deltas, rows, strict=True)]
        deltas[0] = deltas[0]._replace(extras=rows[0]._replace(context_logits=[[0.5, -1.0]]))
    if request.sampling.prompt_logprobs and sequence == 0:
        deltas[0] = deltas[0]._replace(prefill=tokens(rng, 2))
    if rng.random() < 0.2:
        return [*deltas, Delta(1, sequence, (), Finish.ERROR, GenerationFailed("request failed in the engine: no"))]
    return [*deltas[:-1], deltas[-1]._replace(finish=rng.choice([Finish.LENGTH, Finish.EOS, Finish.STOP]))]


def answer_deltas(rng: random.Random, call: ParsedRequest) -> list[tuple[int, Delta]]:
    """The deltas of all sequences of all requests, mixed, each after its request's number."""
    waiting = [
        (index, sequence_deltas(rng, request, sequence))
        for index, request in enumerate(call.requests)
        for sequence in range(request.sampling.num_sequences)
    ]
    deltas: list[tuple[int, Delta]] = []
    while waiting and not (deltas and deltas[-1][1].error):  # a failure ends the whole answer
        index, own = rng.choice(waiting)
        deltas.append((index, own.pop(0)))
        waiting = [(index, own) for index, own in waiting if own]
    return deltas


def one_a_token(delta: Delta) -> list[Delta]:
    """The same tokens in deltas of one token each."""
    extras = delta.extras or NO_EXTRAS
    singles = [
        Delta(delta.id, delta.sequence, (token,), extras=Extras(None, [row]) if row else None)
        for token, row in itertools.zip_longest(delta.tokens, extras.generation_logits or ())
    ]
    if len(singles) < 2:
        return [delta]
    first = singles[0].extras and singles[0].extras._replace(context_logits=extras.context_logits)
    singles[0] = singles[0]._replace(prefill=delta.prefill, extras=first)
    singles[-1] = singles[-1]._replace(finish=delta.finish)
    return singles


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two answers of the same tokens equal ids and times."""
    monkeypatch.setattr(chat_response, "call_id", lambda: "call_0")
    monkeypatch.setattr(blocks, "tool_use_id", lambda: "toolu_0")
    monkeypatch.setattr(items, "new_id", lambda prefix: f"{prefix}_0")
    monkeypatch.setattr(response, "now", lambda: 0)


def render(reply: Reply, errors: ErrorFormat, deltas: list[tuple[int, Delta]]) -> tuple[bytes, bool]:
    """Return the bytes, and whether the answer is complete; a failure before them is another response."""
    data = b""
    for index, delta in deltas:
        if delta.error is not None and not data:
            data += errors.whole(delta.error).body
        else:
            data += reply.feed(index, delta)
    return data, reply.finished


@in_one_test("name", CASES)
def test_tokens_that_come_at_once_have_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    schema, body, context = CASES[name]
    call = DIALECTS[schema].parse(json.loads(json.dumps(body)), context)
    for index in range(len(call.requests)):
        call.reply.start(index, 2)
    rng = random.Random(name)
    for _ in range(TRIALS):
        deltas = answer_deltas(rng, call)
        singles = [(index, single) for index, delta in deltas for single in one_a_token(delta)]
        one, other = (render(copy.deepcopy(call.reply), call.errors, each) for each in (deltas, singles))
        assert one == other


@in_one_test("name", CASES)
def test_a_line_of_a_token_is_what_feeding_it_returns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    schema, body, context = CASES[name]
    call = DIALECTS[schema].parse(json.loads(json.dumps(body)), context)
    call.reply.start(0, 2)
    rng = random.Random(name)
    for _ in range(TRIALS):
        fed, passed = copy.deepcopy(call.reply), copy.deepcopy(call.reply)
        line = None
        for token in tokens(rng, 6):
            delta = Delta(1, 0, (token,))
            line = passed.token_line() if line is None else line
            assert fed.feed(0, delta) == (passed.feed(0, delta) if line is None else line(token))
        last = Delta(1, 0, (), Finish.LENGTH)
        assert fed.feed(0, last) == passed.feed(0, last)  # with the counts and the text of all tokens
        assert line is not None or name not in PLAIN
