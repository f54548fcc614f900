"""What a client sees of an answer, changed in one place: a replay finds each mutant, and nothing between twins."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from proof.replay.comparison import Finding, traits
from proof.replay.content import NEAR
from proof.replay.exchange import Request, Response
from proof.replay.noise import Noise

Value = dict[str, Any]
SAMPLED = {"temperature": 1, "do_sample": True}


class Piece(NamedTuple):
    """A document of an answer, as `name` and `data` of an event."""

    value: Any
    name: str = ""


class Said:
    """What a server makes anew for each answer: ids, times, and the words of a sampled one."""

    def __init__(self, seed: int, *, sampled: bool) -> None:
        self._ids = random.Random(seed)
        words = random.Random(seed if sampled else 0)
        self.words = [f" {words.choice('abcdefgh')}" for _ in range(words.randint(4, 7) if sampled else 5)]

    def id(self, kind: str) -> str:
        return f"{kind}_{self._ids.getrandbits(64):x}"

    @property
    def text(self) -> str:
        return "".join(self.words)


def lmi(said: Said) -> list[Piece]:
    tokens = [{"id": ord(word[1]), "text": word, "log_prob": -0.5} for word in said.words]
    details = {"finish_reason": "length", "generated_tokens": len(tokens), "inputs": "x", "tokens": tokens}
    return [Piece({"generated_text": said.text, "details": {**details, "prefill": [{"id": 1}, {"id": 2}]}})]


def lmi_stream(said: Said) -> list[Piece]:
    events: list[Value] = [
        {"index": 0, "token": {"id": ord(word[1]), "text": word, "logprob": -0.5}, "generated_text": None}
        for word in said.words
    ]
    events[-1] |= {"generated_text": said.text, "details": {"finish_reason": "length", "input_length": 8}}
    return [Piece(event) for event in events]


def lmi_batch(said: Said) -> list[Piece]:
    return [Piece([{"generated_text": said.text}, {"generated_text": said.text[::-1]}])]


def tgi(said: Said) -> list[Piece]:
    tokens = [{"id": ord(word[1]), "text": word, "logprob": -0.5, "special": False} for word in said.words]
    best = {"generated_text": "other", "finish_reason": "length", "generated_tokens": 1, "seed": 7}
    details = {"finish_reason": "length", "generated_tokens": len(tokens), "seed": 7, "tokens": tokens}
    details |= {"prefill": [{"id": 1, "text": "x"}], "best_of_sequences": [best, {**best, "generated_text": "third"}]}
    return [Piece([{"generated_text": said.text, "details": details}])]


def tgi_stream(said: Said) -> list[Piece]:
    events: list[Value] = [
        {"index": index, "token": {"id": ord(word[1]), "text": word, "logprob": -0.5, "special": False}}
        | {"generated_text": None, "details": None}
        for index, word in enumerate(said.words, 1)
    ]
    events[-1]["generated_text"] = said.text
    events[-1]["details"] = {"finish_reason": "length", "generated_tokens": len(events), "input_length": 8}
    return [Piece(event) for event in events]


def openai(said: Said) -> list[Piece]:
    """A chat of two choices that calls two tools."""
    calls = [
        {"id": said.id("call"), "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "ab"
    ]
    message = {"role": "assistant", "content": said.text, "tool_calls": calls}
    choices = [
        {"index": 0, "message": message, "finish_reason": "tool_calls"},
        {"index": 1, "message": {"role": "assistant", "content": said.text[::-1]}, "finish_reason": "stop"},
    ]
    usage = {"prompt_tokens": 8, "completion_tokens": len(said.words), "total_tokens": 8 + len(said.words)}
    head = {"id": said.id("chatcmpl"), "object": "chat.completion", "model": "m", "service_tier": "default"}
    return [Piece({**head, "choices": choices, "usage": usage})]


def openai_stream(said: Said) -> list[Piece]:
    head = {"id": said.id("chatcmpl"), "object": "chat.completion.chunk", "model": "m"}

    def chunk(index: int, delta: Value, reason: str | None = None) -> Piece:
        return Piece({**head, "choices": [{"index": index, "delta": delta, "finish_reason": reason}], "usage": None})

    def call(index: int, name: str) -> Iterator[Piece]:
        function = {"name": name, "arguments": ""}
        yield chunk(0, {"tool_calls": [{"index": index, "id": said.id("call"), "function": function}]})
        yield chunk(0, {"tool_calls": [{"index": index, "function": {"arguments": "{}"}}]})

    usage = {"prompt_tokens": 8, "completion_tokens": len(said.words), "total_tokens": 8 + len(said.words)}
    return [
        chunk(0, {"role": "assistant", "content": ""}),
        *(chunk(0, {"content": word}) for word in said.words),
        *call(0, "a"),
        *call(1, "b"),
        chunk(0, {}, "tool_calls"),
        Piece({**head, "choices": [], "usage": usage}),
    ]


def responses_stream(said: Said) -> list[Piece]:
    item, response = said.id("msg"), {"id": said.id("resp"), "object": "response", "status": "in_progress"}
    part = {"item_id": item, "output_index": 0, "content_index": 0}
    done = {"id": item, "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said.text}]}
    end = {**response, "status": "completed", "output": [done], "usage": {"input_tokens": 8, "output_tokens": 4}}
    events: list[Value] = [
        {"type": "response.created", "response": {**response, "output": [], "usage": None}},
        {"type": "response.output_item.added", "output_index": 0, "item": {**done, "content": []}},
        *({"type": "response.output_text.delta", **part, "delta": word} for word in said.words),
        {"type": "response.output_text.done", **part, "text": said.text},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {"type": "response.completed", "response": end},
    ]
    return [Piece({**event, "sequence_number": at}, event["type"]) for at, event in enumerate(events)]


def anthropic(said: Said) -> list[Piece]:
    tools = [{"type": "tool_use", "id": said.id("toolu"), "name": name, "input": {}} for name in "ab"]
    content = [{"type": "text", "text": said.text}, *tools]
    head = {"id": said.id("msg"), "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use"}
    return [Piece({**head, "content": content, "usage": {"input_tokens": 8, "output_tokens": len(said.words)}})]


def anthropic_stream(said: Said) -> list[Piece]:
    head = {"id": said.id("msg"), "type": "message", "role": "assistant", "model": "m", "content": []}
    usage, delta = {"input_tokens": 8, "output_tokens": 1}, "content_block_delta"
    tool = {"type": "tool_use", "id": said.id("toolu"), "name": "a", "input": {}}
    events: list[Value] = [
        {"type": "message_start", "message": {**head, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": delta, "index": 0, "delta": {"type": "text_delta", "text": word}} for word in said.words),
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": tool},
        {"type": delta, "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": len(said.words)}},
        {"type": "message_stop"},
    ]
    return [Piece(event, event["type"]) for event in events]


def triton(said: Said) -> list[Piece]:
    return [Piece({"id": "42", "model_name": "m", "model_version": "1", "text_output": said.text})]


def triton_beams(said: Said) -> list[Piece]:
    texts = {"text_output": [said.text, said.text[::-1]], "cum_log_probs": [-1.5, -2.5], "output_log_probs": [0.0, 0.0]}
    return [Piece({"model_name": "m", "model_version": "1", "sequence_index": 0, "sequence_end": False, **texts})]


def triton_stream(said: Said) -> list[Piece]:
    head = {"id": "42", "model_name": "m", "model_version": "1"}
    return [
        Piece({**head, "sequence_start": at == 0, "sequence_end": word is said.words[-1], "text_output": word})
        for at, word in enumerate(said.words)
    ]


Make = Callable[[Said], list[Piece]]
SSE = (tgi_stream, openai_stream, responses_stream, anthropic_stream, triton_stream)
PATHS = {"lmi": "/invocations", "tgi": "/generate", "triton": "/v2/models/m/generate"}


def request_of(make: Make, *, sampled: bool) -> Request:
    name = make.__name__
    path = PATHS.get(name.partition("_")[0], "/v1/messages" if "anthropic" in name else "/v1/chat/completions")
    body: Value = {"inputs": "x"} if path in PATHS.values() else {"messages": [], "temperature": 0}
    body |= SAMPLED if sampled else {}
    return Request("1", path, {}, json.dumps({**body, "stream": name.endswith("_stream")}).encode())


def answer(make: Make, pieces: list[Piece]) -> Response:
    if make in SSE:
        names = [f"event: {piece.name}\n" if piece.name else "" for piece in pieces]
        events = [f"{name}data: {json.dumps(piece.value)}\n\n" for name, piece in zip(names, pieces, strict=True)]
        return Response(200, "text/event-stream", "".join(events).encode())
    lines = "".join(f"{json.dumps(piece.value)}\n" for piece in pieces)
    return Response(200, "application/jsonlines" if len(pieces) > 1 else "application/json", lines.encode())


Change = Callable[[list[Piece]], object]


def put(*path: Any, to: Any) -> Change:
    """Set a value; the path begins with the number of its document."""

    def change(pieces: list[Piece]) -> None:
        place: Any = pieces[path[0]].value
        for name in path[1:-1]:
            place = place[name]
        assert place[path[-1]] != to
        place[path[-1]] = to

    return change


def each(name: str, to: Callable[[int], Any]) -> Change:
    def change(pieces: list[Piece]) -> None:
        for at, piece in enumerate(pieces):
            piece.value[name] = to(at)

    return change


def swap(one: int, other: int, *path: Any) -> Change:
    """Swap two documents, or two items of a list in the document that the path begins with."""

    def change(pieces: list[Piece]) -> None:
        place: Any = pieces
        for name in path:
            place = place[name].value if place is pieces else place[name]
        place[one], place[other] = place[other], place[one]

    return change


def named(at: int, name: str) -> Change:
    """Give one event another name."""

    def change(pieces: list[Piece]) -> None:
        pieces[at] = pieces[at]._replace(name=name)

    return change


def retype(at: int, to: str) -> Change:
    """Give an event another type and name."""

    def change(pieces: list[Piece]) -> None:
        pieces[at] = Piece({**pieces[at].value, "type": to}, to)

    return change


def swap_ids(pieces: list[Piece]) -> None:
    """Name another item in the last piece of text."""
    pieces[4].value["item_id"] = "msg_other"


def one_id(pieces: list[Piece]) -> None:
    """Give both calls one id."""
    calls = pieces[0].value["choices"][0]["message"]["tool_calls"]
    calls[1]["id"] = calls[0]["id"]


def indexes(number: int) -> Change:
    """Move every choice of a stream."""

    def change(pieces: list[Piece]) -> None:
        for choice in itertools.chain.from_iterable(piece.value["choices"] for piece in pieces):
            choice["index"] = number

    return change


def calls(number: int) -> Change:
    """Count the calls of a stream from a number."""

    def change(pieces: list[Piece]) -> None:
        for choice in itertools.chain.from_iterable(piece.value["choices"] for piece in pieces):
            for call in choice["delta"].get("tool_calls", ()):
                call["index"] += number

    return change


def blocks(pieces: list[Piece]) -> None:
    """Count the blocks from 1."""
    for piece in pieces:
        if "index" in piece.value:
            piece.value["index"] += 1


def not_counted(pieces: list[Piece]) -> None:
    """Leave the number of its block out of the first one's end."""
    del next(piece.value for piece in pieces if piece.value["type"] == "content_block_stop")["index"]


MUTANTS: list[tuple[Make, bool, Change]] = [
    (lmi, False, put(0, "details", "tokens", 1, "id", to=0)),
    (lmi, True, put(0, "details", "inputs", to="y")),
    (lmi, True, put(0, "details", "prefill", 1, "id", to=3)),
    (lmi_stream, False, put(-1, "details", "finish_reason", to="eos_token")),
    (lmi_stream, False, each("index", lambda at: 1)),
    (lmi_stream, True, each("index", lambda at: 1)),
    (lmi_stream, True, put(-1, "details", "input_length", to=9)),
    (lmi_batch, False, swap(0, 1, 0)),
    (tgi, False, swap(0, 1, 0, 0, "details", "best_of_sequences")),
    (tgi, True, put(0, 0, "details", "prefill", 0, "id", to=3)),
    (tgi, True, put(0, 0, "details", "seed", to=8)),
    (tgi_stream, False, each("index", lambda at: at)),
    (tgi_stream, True, each("index", lambda at: at)),
    (tgi_stream, True, put(-1, "details", "input_length", to=9)),
    (tgi_stream, False, named(2, "token")),
    (tgi_stream, True, named(2, "token")),
    (openai, False, swap(0, 1, 0, "choices")),
    (openai, False, one_id),
    (openai, True, put(0, "usage", "prompt_tokens", to=9)),
    (openai, True, put(0, "choices", 0, "message", "role", to="user")),
    (openai, True, put(0, "object", to="completion")),
    (openai_stream, False, indexes(1)),
    (openai_stream, True, indexes(1)),
    (openai_stream, False, calls(1)),
    (openai_stream, True, calls(1)),
    (openai_stream, False, put(2, "id", to="chatcmpl_other")),
    (openai_stream, True, put(2, "id", to="chatcmpl_other")),
    (openai_stream, False, swap(-6, -5)),
    (openai_stream, True, put(-1, "usage", "prompt_tokens", to=9)),
    (responses_stream, False, swap_ids),
    (responses_stream, False, retype(3, "response.output_text.piece")),
    (responses_stream, True, put(1, "item", "id", to="msg_other")),
    (anthropic, False, swap(1, 2, 0, "content")),
    (anthropic, True, put(0, "usage", "input_tokens", to=9)),
    (anthropic, True, put(0, "type", to="answer")),
    (anthropic_stream, False, named(2, "content_block_start")),
    (anthropic_stream, True, named(2, "content_block_start")),
    (anthropic_stream, False, blocks),
    (anthropic_stream, True, blocks),
    (anthropic_stream, False, swap(6, 7)),
    (anthropic_stream, False, not_counted),
    (anthropic_stream, True, not_counted),
    (anthropic_stream, True, retype(1, "content_block_begin")),
    (anthropic_stream, True, put(0, "message", "usage", "input_tokens", to=9)),
    (triton, True, put(0, "id", to="43")),
    (triton, True, put(0, "model_version", to="2")),
    (triton_beams, False, swap(0, 1, 0, "text_output")),
    (triton_beams, False, put(0, "sequence_index", to=1)),
    (triton_stream, False, put(0, "sequence_end", to=True)),
    (triton_stream, False, swap(0, 1)),
    (triton_stream, True, put(2, "model_name", to="n")),
    (triton_stream, True, named(1, "message")),
]
"""What answers, whether it samples, and what is changed."""


def compare(make: Make, change: Change | None, *, sampled: bool, seed: int) -> list[Finding]:
    """Compare an answer with a changed one, after others of its kind; the reference can be asked again."""
    seeds = itertools.count(100 * seed)
    request = request_of(make, sampled=sampled)
    noise = Noise(NEAR, later=0.0)

    def said() -> Response:
        return answer(make, make(Said(next(seeds), sampled=sampled)))

    async def again(_: Request) -> Response:
        return said()

    def compared(new: Response) -> list[Finding]:
        old = said()
        return asyncio.run(noise.real(request, traits(request), old, new, again, old))

    assert compared(said()) == []
    pieces = make(Said(next(seeds), sampled=sampled))
    if change is not None:
        change(pieces)
    return compared(answer(make, pieces))


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_a_mutant_is_found(number: int) -> None:
    make, sampled, change = MUTANTS[number]
    assert compare(make, change, sampled=sampled, seed=number)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("make", dict.fromkeys(make for make, *_ in MUTANTS))
def test_twins_are_equal(make: Make, sampled: bool) -> None:
    for seed in range(8):
        assert compare(make, None, sampled=sampled, seed=seed) == []
