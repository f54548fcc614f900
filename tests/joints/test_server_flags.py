"""The fields of all APIs that ask for structured output, and servers whose flags keep them from enforcing any."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.app.server import serve
from tests.doubles import grpc_servers, sglang_server, tiny
from tests.process.engines.openai import server as url_servers
from tests.servers import options

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
FORMAT = {"type": "json_schema", "name": "f", "schema": SCHEMA}

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}},
    ),
    "tools and a schema": (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    "a strict tool": (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]},
    ),
    "a required tool": ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    "a named tool": (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    "structured_outputs": ("/v1/completions", {"prompt": "hi", "structured_outputs": {"choice": ["red", "blue"]}}),
    "Responses": ("/v1/responses", {"input": "hi", "text": {"format": FORMAT}}),
    "Anthropic": ("/v1/messages", {**CHAT, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}),
    "LMI": ("/invocations", {"inputs": "hi", "parameters": {"guided_regex": "[0-9]"}}),
    "TGI": ("/generate", {"inputs": "hi", "parameters": {"grammar": {"type": "regex", "value": "[0-9]"}}}),
}


@contextlib.contextmanager
def by_url(*, reasons: bool) -> Iterator[str]:
    with url_servers.listening() as server:
        server.models["data"][0]["max_model_len"] = tiny.CONTEXT
        server.always = partial(url_servers.enforcing, thought_end=-1 if reasons else None)
        yield server.url


@contextlib.contextmanager
def sglang_by_url(*, reasons: bool) -> Iterator[str]:
    with sglang_server.listening(context=tiny.CONTEXT, reasons=reasons) as server:
        yield server.url


@contextlib.contextmanager
def by_grpc(*, reasons: bool) -> Iterator[str]:
    with grpc_servers.listening() as server:
        server.model["max_context_length"] = tiny.CONTEXT
        server.rule_start = "after_reasoning" if reasons else "first_token"
        yield server.url


@pytest.mark.parametrize("reasons", [True, False], ids=["--reasoning-parser", "no parser"])
@pytest.mark.parametrize(
    ("engine", "kind", "listening"),
    [("openai", "vllm", by_url), ("openai", "sglang", sglang_by_url), ("grpc", "vllm", by_grpc)],
)
def test_what_asks_for_structured_output_gets_it_or_is_refused(
    engine: str,
    kind: str,
    listening: Callable[..., contextlib.AbstractContextManager[str]],
    reasons: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = str(tiny.make(tmp_path_factory.mktemp("tiny")))
    with (
        listening(reasons=reasons) as url,
        serve(model, "--engine", engine, *options(f"option.base_url={url}", f"option.base_url_kind={kind}")) as server,
    ):
        server.wait_ready()
        for name, (path, body) in ASKED.items():
            answer = server.post(body, path)
            assert (answer.status_code == 200) is not reasons, (name, answer.text)
            assert ("--reasoning-parser" in answer.text) is reasons, (name, answer.text)
