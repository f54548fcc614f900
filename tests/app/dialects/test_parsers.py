"""Which parsers read a served model's answers without an option, and what the start says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.app.server import serve
from tests.doubles import tiny
from tests.servers import http, options
from tests.unit.protocols.assistant.response_templates import TEMPLATES

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"<think>Hm.</think> Yes. {CALL}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
THINKS = "{{ messages[-1].content }}{% if tools %}{# <tool_call> <think></think> #}{% endif %}"


@pytest.mark.parametrize(
    ("own", "option", "said", "message"),
    [
        ({}, (), "reasoning: qwen3, by the chat template", ("Hm.", " Yes. ", 1)),
        ({}, ("option.reasoning_parser=none",), "option.reasoning_parser=none", (None, "<think>Hm.</think> Yes. ", 1)),
        ({"response_template": TEMPLATES["hermes"]}, (), "reasoning: hf, by the model's response", ("Hm.", "Yes.", 1)),
        ({"response_template": {"fields": {}}}, (), "tokenizer_config.json: response_template.fields: must have",
         ("Hm.", " Yes. ", 1)),
    ],
)  # fmt: skip
def test_a_model_gets_its_parsers_without_an_option(
    tmp_path: Path, own: Any, option: tuple[str, ...], said: str, message: tuple[str | None, str, int]
) -> None:
    directory = tiny.make(tmp_path / "tiny")
    file = directory / "tokenizer_config.json"
    given = {**json.loads(file.read_text()), "chat_template": THINKS, **own}
    file.write_text(json.dumps(given))
    for other in directory.glob("chat_template.*"):
        other.unlink()
    # echo repeats the prompt, which is the message
    body = {"messages": [{"role": "user", "content": ANSWER}], "tools": TOOLS}
    with serve("--engine", "echo", *options(f"option.echo_tokenizer={directory}", *option)) as server:
        server.wait_ready()
        limit = http.post(server.url + "/tokenize", json=body).json()["count"]
        for path in ("/v1/chat/completions", "/invocations"):
            shown = server.post({**body, "max_tokens": limit}, path).json()["choices"][0]["message"]
            assert (shown.get("reasoning"), shown["content"], len(shown["tool_calls"])) == message
        raw = server.post({"inputs": ANSWER, "parameters": {"max_new_tokens": limit}}, "/invocations").json()
        assert ANSWER in json.dumps(raw).replace('\\"', '"')
        assert said in server.log


def test_a_broken_response_template_stops_the_start_where_an_option_names_it(tmp_path: Path) -> None:
    directory = tiny.make(tmp_path / "tiny")
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": {"fields": {}}}))
    given = options(f"option.echo_tokenizer={directory}", "option.reasoning_parser=hf")
    refused = pytest.raises(
        AssertionError, match=r"tokenizer_config\.json: response_template\.fields: must have some of"
    )
    with refused, serve("--engine", "echo", *given) as server:
        server.wait_ready()
