"""Answers in the API's document: each dialect reads its own example and answers it, without an engine."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from handler.core.text import Prompt, Vocabulary
from handler.core.values import Delta, Extras, Finish, Request, Task, Token
from handler.protocols.kernel.dialect import Dialect, ServerContext

_CONTEXT = ServerContext("echo", task=Task.CLASSIFICATION, labels=("NEGATIVE", "POSITIVE"), no_media={"audio": ""})
_VECTORS = {"embed": ((0.6, -0.8), (0.8, -0.6), (0.8, 0.6)), "score": ((0.1,), (0.9,)), "classify": ((0.1, 0.9),)}
"""By the kind of `Pooling`, of each request of a body."""

_CITIES = (Token(7042, " Paris.", -0.4, False), Token(10505, " Rome.", -0.4, False))
_SPEECH = Token(8502, "Good morning.", -0.4, False)
_END = Token(2, "", -0.1, True)
_NUM_PROMPT_TOKENS = 12

_ID = re.compile(r'"(\w+[-_])[0-9a-f-]{24,}"')
_DRAWN = re.compile(r'"(created|created_at|completed_at|seed)":\d+')
_FIXED = 1760000000  # a time; a seed too


@functools.cache
def answer_to(dialect: Dialect) -> Any:
    """Return the whole answer of a dialect to the example of its description. Each start makes the same."""
    parsed = dialect.parse(dialect.description.example, _CONTEXT)
    if parsed.take_prompt is not None:
        parsed.take_prompt(Prompt("", [0] * _NUM_PROMPT_TOKENS, Vocabulary([b""])))
    body = b""
    for index, request in enumerate(parsed.requests):
        parsed.reply.start(index, _NUM_PROMPT_TOKENS)
        for delta in _deltas(index, request):
            if not parsed.reply.finished:  # a document made of the prompt alone ends with the first
                body += parsed.reply.feed(index, delta)
    text = _DRAWN.sub(rf'"\1":{_FIXED}', _ID.sub(r'"\g<1>0"', body.decode()))
    return json.loads(text)


def _deltas(index: int, request: Request) -> list[Delta]:
    """Return what an engine gives request number `index`."""
    if request.pooling is not None:
        return [Delta(1, 0, (), Finish.STOP, extras=Extras(vector=_VECTORS[request.pooling.kind][index]))]
    token = _SPEECH if request.transcribes else _CITIES[index]
    if request.messages:  # a chat's answer begins without a space
        token = token._replace(text=token.text.lstrip())
    return [Delta(1, 0, (token,)), Delta(1, 0, (_END,), Finish.EOS)]
