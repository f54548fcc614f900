"""llama-server's routes: other names of routes, tokens, chat templates, and those that are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.app.server import serve
from tests.doubles import tiny
from tests.one_test import in_one_test
from tests.servers import LiveServer, ask, http, options

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
OWN = (
    "/completion", "/completions", "/embedding", "/infill", "/props", "/slots", "/slots/0", "/lora-adapters", "/tools",
    "/cors-proxy", "/v1/chat/completions/input_tokens", "/chat/completions/input_tokens",
    "/v1/chat/completions/control", "/v1/stream", "/v1/streams/lookup",
)  # fmt: skip
"""The routes of llama-server (tools/server/server.cpp, b11434) that no other server has, and that are refused."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose tokenizer adds a special token at each end of a text."""
    directory = tiny.make(tmp_path_factory.mktemp("tiny"))
    own = Tokenizer.from_file(str(directory / "tokenizer.json"))
    marks = ("<|im_start|>", "<|im_end|>")
    begin, end = ((mark, own.token_to_id(mark)) for mark in marks)
    own.post_processor = TemplateProcessing(single=f"{begin[0]} $A {end[0]}", special_tokens=[begin, end])
    own.save(str(directory / "tokenizer.json"))
    with serve("--engine", "echo", *options(f"option.echo_tokenizer={directory}")) as server:
        server.wait_ready()
        yield server


def tokens(server: LiveServer, content: str, **flags: bool) -> Any:
    return ask(server, "/tokenize", {"content": content, **flags})["tokens"]


def test_tokens_of_a_text_and_back(server: LiveServer) -> None:
    text = "The capital of France"
    found = tokens(server, text)
    assert ask(server, "/detokenize", {"tokens": found})["content"] == text
    with_marks = tokens(server, text, add_special=True)
    assert with_marks[1:-1] == found
    assert with_marks == ask(server, "/tokenize", {"prompt": text})["tokens"]
    assert tokens(server, "") == []


def test_marks_in_the_text_itself_stay(server: LiveServer) -> None:
    mark = "<|im_start|>"
    found = tokens(server, f"{mark}hi{mark}")
    assert found[0] == found[-1] == tokens(server, mark)[0]
    assert len(found) == len(tokens(server, "hi")) + 2
    error = ask(server, "/tokenize", {"content": mark, "parse_special": False}, 400)["error"]
    assert error["message"].startswith(
        f"parse_special=false is not supported for 'content' with the text of a special token ('{mark}')"
    )
    assert tokens(server, "hi", parse_special=False) == tokens(server, "hi")


def test_pieces_are_text_or_bytes(server: LiveServer) -> None:
    text = "hi \N{HUGGING FACE}"
    found = tokens(server, text, with_pieces=True)
    assert [piece["id"] for piece in found] == tokens(server, text)
    pieces = [piece["piece"] for piece in found]
    assert b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces) == text.encode()
    assert {type(piece) for piece in pieces} == {str, list}


def test_a_chat_as_text(server: LiveServer) -> None:
    prompt = ask(server, "/apply-template", CHAT)["prompt"]
    assert prompt == "".join(ask(server, "/tokenize", {**CHAT, "return_token_strs": True})["token_strs"])
    shorter = ask(server, "/apply-template", {**CHAT, "add_generation_prompt": False})["prompt"]
    assert len(shorter) < len(prompt)
    assert prompt.startswith(shorter)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"content": 3}, "'content' must be a string"),
        ("/tokenize", {"content": ["a", 1]}, "'content' must be a string"),
        ("/tokenize", {"content": "a", "with_pieces": 3}, "with_pieces=3"),
        ("/apply-template", {}, "messages"),
    ],
)
def test_what_is_wrong_is_named(server: LiveServer, path: str, body: Any, words: str) -> None:
    assert words in ask(server, path, body, 400)["error"]["message"]


@in_one_test("path", OWN)
def test_routes_of_llama_servers_own_are_refused_by_name(server: LiveServer, path: str) -> None:
    for found in (http.post(server.url + path, json={}), http.get(server.url + path)):
        assert found.status_code == 404
        message = found.json()["error"]["message"]
        assert path.removeprefix("/v1") in message
        assert " is not served here: it is a route of llama-server's own; " in message


@in_one_test(("path", "route"), [
    ("/api/chat", "/v1/chat/completions"), ("/api/generate", "/v1/completions"), ("/api/tags", "/v1/models"),
    ("/api/embed", "/v1/embeddings"), ("/api/show", "/v1/models"), ("/api/version", "/info"),
    ("/v1/v1/chat/completions", "/v1/chat/completions"), ("/v1/v1/models/a", "/v1/models/a"), ("/v1/v1", "/v1"),
    ("/v2/v2/models/a/infer", "/v2/models/a/infer"), ("/v1", "/v1/chat/completions"), ("/v1/", "/v1/chat/completions"),
])  # fmt: skip
def test_routes_of_ollama_and_doubled_ones_lead_to_the_right_one(server: LiveServer, path: str, route: str) -> None:
    for found in (http.post(server.url + path, json={}), http.get(server.url + path)):
        assert found.status_code == 404
        assert re.search(rf"(call|such as) {route}(?![\w/])", found.text), found.text


def test_routes_have_llama_servers_other_names_too(server: LiveServer) -> None:
    chat = {**CHAT, "max_tokens": 2}
    for path in ("/chat/completions", "/chat/completions/", "//chat/completions"):
        assert ask(server, path, chat)["choices"] == ask(server, "/v1/chat/completions", chat)["choices"]
    assert ask(server, "/responses", {"input": "hi", "max_output_tokens": 2})["object"] == "response"
    assert ask(server, "/responses/input_tokens", {"input": "hi"})["input_tokens"] > 0
    assert http.get(f"{server.url}/v1/health").status_code == 200
    assert http.get(f"{server.url}/models").json()["data"] == http.get(f"{server.url}/v1/models").json()["data"]
    for path in ("/reranking", "/v1/reranking", "/audio/transcriptions"):
        assert "it requires option.task=" in http.post(server.url + path, json={}).text, path


def test_other_names_need_a_key_too() -> None:
    chat, key = {**CHAT, "max_tokens": 2}, {"Authorization": "Bearer secret"}
    with serve("--engine", "echo", env={"LMI_API_KEY": "secret"}) as server:
        server.wait_ready()
        for path in ("/chat/completions", "/responses", "//chat/completions/"):
            assert http.post(server.url + path, json=chat).status_code == 401, path
        assert http.post(f"{server.url}/chat/completions", json=chat, headers=key).status_code == 200
        assert http.get(f"{server.url}/v1/health").status_code == 200


def test_the_header_route_has_the_other_names_too(server: LiveServer) -> None:
    header = {"X-Amzn-SageMaker-Custom-Attributes": "route=/chat/completions"}
    found = http.post(f"{server.url}/invocations", json={**CHAT, "max_tokens": 2}, headers=header)
    assert found.json()["object"] == "chat.completion"
