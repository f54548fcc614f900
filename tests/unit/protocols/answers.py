"""Runs schemas without an engine: a body in, scripted deltas through, wire bytes or values out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from handler.core.errors import GenerationFailed, ServingError
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Delta, Extras, Finish, Token
from handler.protocols.kernel.body import decode
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect, WithoutEngine
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai.chat import OpenAiChat
from handler.protocols.openai.completions import OpenAiCompletions
from handler.protocols.openapi import DESCRIPTIONS
from handler.protocols.registry import INVOCATIONS, POOLED_INVOCATIONS, POOLED_ROUTES, ROOTS, ROUTES, dialects_of

_POOLED = [*POOLED_INVOCATIONS.values(), *(schema for routes in POOLED_ROUTES.values() for schema in routes.values())]

DIALECTS = {**INVOCATIONS, **{schema.name: schema for schema in (*ROOTS.values(), *ROUTES.values(), *_POOLED)}}

STREAMED = {name for name, described in DESCRIPTIONS.items() if described.streams} - {"dynamic_batch"}
"""The dialects that stream where a body's `stream` says so, or always; dynamic batching does so by an option."""

EXAMPLES = [(name, one.name) for name, schema in DIALECTS.items() for one in dialects_of(schema)]
"""Each route and a dialect of its bodies, which is asked with the example of the API's document."""

CONTEXT = ServerContext(
    engine="openvino", unsupported={"typical_p": "it does not implement typical decoding", "bad_sequences": "no"}
)

VOCABULARY = Vocabulary([b"a", b" b", "\u00e9".encode()[:1], "\u00e9".encode()[1:], b"c", b"<end>"], special={5})
CAPABLE = ServerContext(engine="able", vocabulary=VOCABULARY, no_media={"audio": ""})
"""An engine that lacks nothing, with a vocabulary of six tokens."""


class _Registered:
    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters

    def find(self, name: str) -> Adapter | None:
        return next((one for one in self._adapters if one.name == name), None)

    def by_number(self, number: int) -> Adapter | None:
        return next((one for one in self._adapters if one.id == number), None)

    def names(self) -> list[str]:
        return [one.name for one in self._adapters]


def with_adapters(context: ServerContext, *adapters: Adapter) -> ServerContext:
    return replace(context, adapters=_Registered(adapters), no_adapters="")


def with_options(context: ServerContext, **options: Any) -> ServerContext:
    return replace(context, config=replace(context.config, **options))


TOKENS = (
    Token(304, "Deep", -0.05, False),
    Token(11157, ' "Learning"', -1.25, False),
    Token(278, "", -0.5, False),
    Token(279, " 😀\n", -0.25, False),
    Token(2, "", -0.125, True),
)
PREFILL = (Token(504, "What", None, False), Token(314, " is", -3.5, False))


VECTORS = {
    "embed": [[0.6, -0.8, 0.0], [0.0, 1.0, 0.10000000149011612], [1.0, 0.0, 0.0]],
    "score": [[0.25], [0.75], [0.5]],
    "classify": [[0.125, 0.625, 0.25], [-1.5, 2.0, 0.5]],
}
"""Of the first requests of a body."""


def deltas(sequence: int = 0, *, prefill: bool = False, shift: float = 0.0) -> list[Delta]:
    """A whole answer, one token a step, the end token last."""
    tokens = [token._replace(logprob=(token.logprob or 0) + shift) for token in TOKENS]
    found = [Delta(1, sequence, (token,)) for token in tokens[:-1]]
    found.append(Delta(1, sequence, (tokens[-1],), Finish.EOS))
    return [found[0]._replace(prefill=PREFILL if prefill else None), *found[1:]]


def with_tops(sequence: int = 0) -> list[Delta]:
    """A whole answer with two alternatives a token, of which the chosen one is the second."""

    def topped(token: Token) -> Token:
        return token._replace(top=(Token(5, " fi", -0.02, False), token._replace(text=token.text or "<s>")))

    return [one._replace(tokens=[topped(token) for token in one.tokens]) for one in deltas(sequence)]


def with_logits(sequence: int = 0) -> list[Delta]:
    """A whole answer with rows of three logits for the prompt's two tokens and for each of its own."""
    context = [[0.5, -1.0, float("-inf")], [1.0, 2.0, 3.0]]
    rows = [[float(index), -float(sequence), 0.25] for index in range(len(TOKENS))]
    found = [one._replace(extras=Extras(None, [row])) for one, row in zip(deltas(sequence), rows, strict=True)]
    return [found[0]._replace(extras=Extras(context, [rows[0]])), *found[1:]]


def shorter(sequence: int) -> list[Delta]:
    """An answer of two tokens, less probable than the others."""
    first, second, *_ = deltas(sequence, shift=-9.0)
    return [first, second._replace(finish=Finish.STOP)]


def failing(after: int) -> list[Delta]:
    """An answer that breaks off after some tokens."""
    error = GenerationFailed("engine failure: it was killed by signal 9")
    return [*deltas()[:after], Delta(1, 0, (), Finish.ERROR, error)]


def refused(error: ServingError) -> list[Delta]:
    """No answer: what was found when the prompt's ids were counted."""
    return [Delta(1, 0, (), Finish.ERROR, error)]


def logprobs(num_labels: int) -> list[float]:
    """Of labels, each half as likely as the one before it, and of a token that is likelier than any."""
    return [*(-1.0 - number * math.log(2) for number in range(num_labels)), -0.75]


def answer(
    schema: str | Dialect, body: Any, script: list[Delta] | None = None, context: ServerContext = CONTEXT
) -> HttpResponse:
    """What the client gets: the whole body, however many pieces it came in."""
    dialect, value = DIALECTS[schema] if isinstance(schema, str) else schema, None
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        value = decode(raw, unique_keys=dialect.unique_keys)
        call = dialect.parse(value, context)
    except ServingError as error:
        return dialect.errors_of(value, context).whole(error)
    sampling, pooling = call.requests[0].sampling, call.requests[0].pooling
    sent = b""
    if isinstance(call.course, WithoutEngine):
        call.course.take(Prompt("a b", [0, 1], VOCABULARY))
    for index in range(len(call.requests)):
        call.reply.start(index, 2)
        if script is None and pooling is not None:
            labels = (call.requests[index].pooling or pooling).labels
            vector = logprobs(len(labels)) if labels else VECTORS[pooling.kind][index]
            lines = [Delta(1, 0, (), Finish.STOP, extras=Extras(vector=vector))]
        elif script is None:
            lines = [
                delta
                for sequence in range(sampling.num_sequences)
                for delta in deltas(
                    sequence, prefill=sampling.prompt_logprobs and not sequence, shift=-float(sequence * 2 % 3)
                )
            ]
        else:
            lines = script
        for delta in lines:
            if delta.error is not None and not sent:
                return call.errors.whole(delta.error)
            sent += call.reply.feed(index, delta)
    assert call.reply.finished
    return HttpResponse(200, call.reply.content_type, sent)


def value(schema: str | Dialect, body: Any, script: list[Delta] | None = None, context: ServerContext = CONTEXT) -> Any:
    """The answer's JSON."""
    return json.loads(answer(schema, body, script, context).body)


CHAT, COMPLETIONS = OpenAiChat(), OpenAiCompletions()

NAMED = replace(CAPABLE, model_names=("model", "org/model"), fingerprint="lmi-1-able")

USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
NAME_IT = {"type": "function", "function": {"name": "weather"}}


def saying(text: str, size: int = 4, finish: Finish = Finish.EOS, sequence: int = 0) -> list[Delta]:
    """An answer of that text, a few characters a token, its end token last."""
    tokens = [Token(id, text[at : at + size], -0.5, False) for id, at in enumerate(range(0, len(text), size))]
    deltas = [Delta(1, sequence, (token,)) for token in tokens]
    if finish is Finish.EOS:
        return [*deltas, Delta(1, sequence, (Token(99, "", -0.25, True),), finish)]
    return [*deltas[:-1], deltas[-1]._replace(finish=finish)]


def chat(body: Any, script: list[Delta] | None = None, context: ServerContext = NAMED) -> HttpResponse:
    whole = {"messages": [USER], **body} if isinstance(body, dict) else body
    return answer(CHAT, whole, script, context)


def completion(body: Any, script: list[Delta] | None = None, context: ServerContext = NAMED) -> HttpResponse:
    whole = {"prompt": "a b", **body} if isinstance(body, dict) else body
    return answer(COMPLETIONS, whole, script, context)


def events(found: HttpResponse) -> list[dict[str, Any]]:
    """A stream's values, its framing and its end checked."""
    assert found.content_type == "text/event-stream"
    *lines, done, rest = found.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def choices(chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the chunks say, one choice each."""
    found = [chunk["choices"] for chunk in chunks]
    assert all(len(one) == 1 for one in found)
    return [one[0] for one in found]
