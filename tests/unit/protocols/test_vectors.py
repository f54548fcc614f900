"""Answers of vectors: the last text's delta leaves little to do, however many vectors came before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler.core.framing import JSON, Framing
from handler.core.values import Delta, Extras, Finish, Task
from handler.protocols.kernel.dialect import Dialect, ServerContext
from handler.protocols.lmi.request import LmiEmbedding
from handler.protocols.openai.completions import OpenAiEmbeddings
from handler.protocols.tei.request import TeiEmbed

VECTOR = (0.25, -1.5, 3.0)
TEXTS = ["a"] * 5


def numbers(value: Any) -> int:
    if isinstance(value, dict):
        value = [*value.values()]
    return sum(map(numbers, value)) if isinstance(value, list | tuple) else isinstance(value, float)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (OpenAiEmbeddings(), {"input": TEXTS}),
        (OpenAiEmbeddings(), {"input": TEXTS, "encoding_format": "base64"}),
        (TeiEmbed(), {"inputs": TEXTS}),
        (LmiEmbedding(), {"inputs": TEXTS}),
        (LmiEmbedding(), {"inputs": "a"}),
    ],
)
def test_each_vector_is_encoded_when_it_comes(monkeypatch: pytest.MonkeyPatch, schema: Dialect, body: Any) -> None:
    encoded: list[int] = []
    encode = Framing.encode

    def note(self: Framing, value: Any) -> bytes:
        encoded.append(numbers(value))
        return encode(self, value)

    monkeypatch.setattr(Framing, "encode", note)
    reply = schema.parse(body, ServerContext("echo", task=Task.EMBEDDING)).reply
    texts = next(iter(body.values()))
    count = len(texts) if isinstance(texts, list) else 1
    answer = b""
    for index in range(count):
        reply.start(index, 1)
    for index in reversed(range(count)):
        answer = reply.feed(index, Delta(index, 0, (), Finish.STOP, extras=Extras(vector=VECTOR)))
    assert max(encoded) <= len(VECTOR)
    assert encoded[-1] == 0, "the vectors stand in the answer as they were encoded"
    value = json.loads(answer)
    found = [row["embedding"] for row in value["data"]] if isinstance(value, dict) else value
    assert JSON.encode(found).count(b"0.25,-1.5,3.0") == (0 if "encoding_format" in body else count)
