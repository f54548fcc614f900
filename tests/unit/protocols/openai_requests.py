"""OpenAI's dialects without an engine: a body in, scripted deltas through, wire bytes or values out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from handler.core.values import Delta, Finish, Token
from handler.protocols.kernel.dialect import ServerContext
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai.chat import OpenAiChat
from handler.protocols.openai.completions import OpenAiCompletions
from tests.unit.protocols.answers import CAPABLE, answer

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
