"""What reads a request × what writes its answer: a number or flag of another type changes nothing in the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.app.server import serve
from tests.one_test import in_one_test
from tests.servers import LiveServer

CHAT = {"messages": [{"role": "user", "content": "a b c"}]}
OWN = re.compile(r'"(?:id|created|created_at|completed_at|system_fingerprint|item_id)":\s*(?:"[^"]*"|\d+)')
"""What every answer has of its own."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Mapping[str, LiveServer]]:
    with (
        serve("--engine", "echo") as rolling,
        serve("--engine", "echo", "-o", "option.async_mode=true") as asynchronous,
    ):
        yield {"rolling": rolling, "async": asynchronous}


def answer(server: LiveServer, path: str, body: Mapping[str, Any]) -> tuple[int, str, str]:
    found = server.post(body, path)
    return found.status_code, found.headers.get("x-lmi-ignored-parameters", ""), OWN.sub("", found.text)


@in_one_test(
    ("mode", "path", "body", "same"),
    [
        (
            "rolling", "/v1/chat/completions",
            {**CHAT, "max_tokens": 2, "temperature": 0, "logprobs": True, "top_logprobs": 1},
            {**CHAT, "max_tokens": "2", "temperature": "0.0", "logprobs": "yes", "top_logprobs": 1.0},
        ),
        (
            "rolling", "/v1/chat/completions",
            {**CHAT, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
            {**CHAT, "max_tokens": 2.0, "stream": "true", "stream_options": {"include_usage": 1}},
        ),
        (
            "rolling", "/v1/completions",
            {"prompt": "a b c", "max_tokens": 0, "echo": True, "stream": False},
            {"prompt": "a b c", "max_tokens": "0", "echo": 1, "stream": 0},
        ),
        (
            "rolling", "/v1/responses",
            {"input": "a b c", "max_output_tokens": 2, "temperature": 0.5, "top_p": 1.0, "parallel_tool_calls": False},
            {"input": "a b c", "max_output_tokens": "2", "temperature": "0.5", "top_p": True, "parallel_tool_calls": 0},
        ),
        (
            "rolling", "/v1/responses",
            {"input": "a b c", "max_output_tokens": 2, "max_tool_calls": 3, "stream": True, "store": False},
            {"input": "a b c", "max_output_tokens": 2.0, "max_tool_calls": "3", "stream": 1, "store": "no"},
        ),
        (
            "rolling", "/v1/messages",
            {**CHAT, "model": "model", "max_tokens": 2, "temperature": 1, "stream": True},
            {**CHAT, "model": "model", "max_tokens": "2", "temperature": True, "stream": "1"},
        ),
        (
            "rolling", "/tokenize",
            {"prompt": "a b c", "return_token_strs": True}, {"prompt": "a b c", "return_token_strs": "true"},
        ),
        (
            "rolling", "/invocations",
            {"inputs": "a b c", "parameters": {"max_new_tokens": 2, "details": True, "seed": 7}, "stream": True},
            {"inputs": "a b c", "parameters": {"max_new_tokens": 2.0, "details": 1, "seed": "7"}, "stream": 1},
        ),
        (
            "rolling", "/invocations",
            {**CHAT, "max_tokens": 2, "logprobs": True, "stream": True},
            {**CHAT, "max_tokens": "2", "logprobs": 1.0, "stream": "on"},
        ),
        (
            "async", "/invocations",
            {"inputs": "a b c", "parameters": {"max_new_tokens": 2, "details": True, "seed": 7, "do_sample": False}},
            {"inputs": "a b c", "parameters": {"max_new_tokens": "2", "details": "yes", "seed": 7.0, "do_sample": 0}},
        ),
        ("async", "/invocations", {**CHAT, "max_tokens": 2, "stream": True}, {**CHAT, "max_tokens": "2", "stream": 1}),
        (
            "async", "/invocations",
            {"prompt": "a b c", "max_tokens": 2, "logprobs": 1},
            {"prompt": "a b c", "max_tokens": 2.0, "logprobs": True},
        ),
    ],
)  # fmt: skip
def test_the_answer_is_the_same(
    servers: Mapping[str, LiveServer], mode: str, path: str, body: dict[str, Any], same: dict[str, Any]
) -> None:
    wanted = answer(servers[mode], path, body)
    assert wanted[0] == 200, wanted
    assert answer(servers[mode], path, same) == wanted
