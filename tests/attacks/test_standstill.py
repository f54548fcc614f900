"""Hostile bodies, schemas and answers: none of them stops the event loop of a server for half a second.

A row of ATTACKS is a request. Attacks by an engine's servers are in `test_upstreams.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from handler.protocols.assistant.tools.formats import FORMATS
from tests.attacks.watch import answering
from tests.doubles import tiny
from tests.servers import ServerProcess, http, options, serve
from tests.unit.protocols.assistant.test_reading import diamonds, itself, wide
from tests.unit.protocols.assistant.tool_texts import BEGUN, TOOLS

CHAT, INVOCATIONS = "/v1/chat/completions", "/invocations"
RESPONSES, GENERATE = "/v1/responses", "/v2/models/model/generate"
RESPONSE = {"input": "a", "stream": True, "max_output_tokens": 4}
TEMPLATE = "{# tools #}{{ messages[-1]['content'] }}"
"""The engine echo answers with the prompt: so a message is what the model writes."""

NESTED = 20_000
LETTERS = "a" * 30


def call(parameters: Any, text: str, **more: Any) -> Any:
    tools = [{"type": "function", "function": {"name": "time", "parameters": parameters}}]
    return {"messages": [{"role": "user", "content": text}], "tools": tools, "max_tokens": 1000, **more}


def chat(content: Any, **more: Any) -> Any:
    """A short answer: without a number the engine goes on until the context is full."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}


def schema(schema: Any) -> Any:
    return chat("a", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def parameters(**values: Any) -> Any:
    return {"inputs": "a b c", "parameters": {"max_new_tokens": 4, **values}}


def deep(depth: int) -> Any:
    found: Any = {"type": "string"}
    for _ in range(depth):
        found = {"anyOf": [found]}
    return found


GEMMA, ARGUMENT, _ = BEGUN["gemma4"]
WRITTEN = GEMMA + ARGUMENT * 20
ATTACKS: dict[str, tuple[str, Any]] = {
    "a schema in itself": (CHAT, call(itself(32), WRITTEN)),
    "a schema of diamonds": (CHAT, call(diamonds(8, 8), WRITTEN)),
    "a wide schema": (CHAT, call(wide(1000, 10_000), WRITTEN)),
    "a deep schema": (CHAT, call({"properties": {"a": deep(60)}}, WRITTEN)),
    "a long reference": (CHAT, call({"properties": {"a": {"$ref": "#" + "/a" * 200_000}}}, WRITTEN)),
    "types without end": (CHAT, call({"properties": {"a": {"type": ["integer"] * 200_000}}}, WRITTEN)),
    "values without end": (CHAT, call({"properties": {"a": {"enum": [*range(200_000)]}}}, WRITTEN)),
    "many arguments": (CHAT, call({}, GEMMA + ARGUMENT * 20_000)),
    "many calls": (CHAT, call({}, (GEMMA + "}<tool_call|>") * 5_000)),
    "calls without end": (CHAT, call({}, GEMMA * 5_000)),
    "an open string": (CHAT, call({}, GEMMA + 'a:<|"|>' + "x" * 200_000)),
    "lists in lists": (CHAT, call({}, GEMMA + "a:" + "[" * 100_000)),
    "128 tools": (CHAT, {**call({}, "a"), "tools": [
        {"type": "function", "function": {"name": f"f{number}", "parameters": wide(100, 100)}} for number in range(128)
    ]}),
    "a required call of a schema in itself": (CHAT, call(itself(32), "a", tool_choice="required")),
    "a format of a schema in itself": (CHAT, schema(itself(32))),
    "a format of diamonds": (CHAT, schema(diamonds(8, 8))),
    "a format of a wide schema": (CHAT, schema(wide(1000, 10_000))),
    "a format of a catastrophic pattern": (CHAT, schema({"type": "string", "pattern": "(a+)+$"})),
    "a format of repetitions": (CHAT, schema({"type": "string", "pattern": "((a{1,999}){1,999}){1,999}"})),
    "a deep body": (INVOCATIONS, b'{"inputs": ' + b"[" * NESTED + b"]" * NESTED + b"}"),
    "a deep parameter": (INVOCATIONS, b'{"inputs": "", "parameters":' + b'{"a":' * NESTED + b"1" + b"}" * (NESTED + 1)),
    "a number without end": (INVOCATIONS, b'{"inputs": "a", "parameters": {"seed": ' + b"9" * 500_000 + b"}}"),
    "a fraction without end": (INVOCATIONS, b'{"inputs": "a", "parameters": {"top_p": 0.' + b"9" * 500_000 + b"}}"),
    "many parameters": (INVOCATIONS, parameters(**{f"p{number}": number for number in range(50_000)})),
    "many stop strings": (INVOCATIONS, parameters(stop=["a"] * 100_000)),
    "long stop strings": (INVOCATIONS, parameters(stop=["a" * 100_000] * 4)),
    "many biases": (CHAT, chat("a", logit_bias={str(number): 1 for number in range(100_000)})),
    "many messages": (CHAT, chat("a", messages=[{"role": "user", "content": "a"}] * 20_000)),
    "many parts": (CHAT, chat([{"type": "text", "text": "a"}] * 50_000)),
    "arguments that are not JSON": (CHAT, chat("a", messages=[
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
        ]},
    ])),
    "half surrogates": (
        CHAT, b'{"max_tokens": 4, "messages": [{"role": "user", "content": "' + b"\\ud800" * 50_000 + b'"}]}'
    ),
    "combining characters": (CHAT, chat("e" + "\u0301" * 200_000)),
    "template arguments": (CHAT, chat("a", chat_template_kwargs={f"a{number}": LETTERS for number in range(20_000)})),
    "an adapter's long name": (INVOCATIONS, {"inputs": "a", "adapters": "../" * 100_000}),
    "a tensor without end": (INVOCATIONS, parameters(request_output_len=[[4]], stop_words_list=[[*range(200_000)]])),
    "many tensors": (INVOCATIONS, parameters(request_output_len=[[4]] * 100_000)),
    "many inputs": (GENERATE, {"text_input": "a", **{f"t{number}": 1 for number in range(50_000)}}),
    "metadata without end": (RESPONSES, {**RESPONSE, "metadata": {"a": "b" * 8_000_000}}),
    "a long description that comes back": (RESPONSES, {**RESPONSE, "tools": [
        {"type": "function", "name": "f", "description": "a" * 8_000_000, "parameters": {}}
    ]}),
    "many lists that come back": (RESPONSES, {**RESPONSE, "tools": [
        {"type": "function", "name": "f", "parameters": {"properties": {"a": {"x": [[]] * 300_000}}}}
    ]}),
}  # fmt: skip
"""Path and body."""


FAMILIES = {type(format.make(TOOLS)).__module__: name for name, format in FORMATS.items()}
"""A family's module -> one of its formats. `test_answers.py` measures the parser of every format alone."""

LONGEST_ANSWER = 900_000  # characters; what the tokenizer makes of them has to fit into the model


@contextlib.contextmanager
def echoing(model: Path, format: str) -> Iterator[ServerProcess]:
    own = (
        f"option.tool_call_parser={format}",
        f"option.chat_template={TEMPLATE}",
        f"option.echo_tokenizer={model}",
        "option.max_model_len=2000000",
    )
    with serve("--engine", "echo", *options(*own)) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with echoing(model, "gemma4") as server:
        yield server


@pytest.mark.parametrize("name", ATTACKS)
def test_no_request_stops_the_event_loop(server: ServerProcess, name: str) -> None:
    path, body = ATTACKS[name]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    with answering(server):
        answer = http.post(server.url + path, content=data, headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, answer.text[:500]
        assert answer.status_code != 404, "it attacks nothing"


@pytest.mark.parametrize("format", FAMILIES.values())
def test_no_answer_stops_the_event_loop(model: Path, format: str) -> None:
    begin, argument, partial = BEGUN[format]
    texts = [
        begin + argument * min(20_000, LONGEST_ANSWER // len(argument)),
        (begin + argument) * 3000,
        begin + partial * 20_000,
    ]
    with echoing(model, format) as server, answering(server):
        for text, stream in zip(texts, (False, True, False), strict=True):
            answer = server.post(call(itself(32), text, stream=stream), CHAT)
            assert answer.status_code == 200, answer.text[:500]


def test_long_answers_that_end_together_do_not_stop_the_event_loop(server: ServerProcess) -> None:
    body = parameters(max_new_tokens=60_000, details=True)

    with answering(server), ThreadPoolExecutor(16) as threads:
        answers = [*threads.map(lambda _: server.post(body, INVOCATIONS), range(16))]
    assert [answer.status_code for answer in answers] == [200] * 16
