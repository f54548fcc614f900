"""Chat completions through a live server: the wire with echo, real answers with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.app.server import serve
from tests.servers import LiveServer

ASK = [{"role": "user", "content": "Name the capital of France."}]
GREEDY = {"temperature": 0, "max_tokens": 24}
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def laid_out(*messages: tuple[str, str]) -> str:
    """What the demo model's template makes of messages."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


def text(found: Any) -> str:
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


def chunks(body: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines()]


# -- echo --------------------------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "function": {"name": "f"}}


def test_tools_are_there_as_on_openais_route(echo_server: LiveServer) -> None:
    """Echo repeats the last of the prompt: the call in the message that asks for one."""
    call = '<tool_call>[{"name":"f","arguments":{"a":1}}]</tool_call>'
    body = {"messages": [{"role": "user", "content": call}], "tools": [FUNCTION], "max_tokens": 400}
    found = [echo_server.post(body, path).json()["choices"][0] for path in ("/invocations", "/v1/chat/completions")]
    calls = [[item["function"] for item in choice["message"]["tool_calls"]] for choice in found]
    assert calls[0] == calls[1]
    assert {"name": "f", "arguments": '{"a":1}'} in calls[0]


def test_thoughts_are_shown_apart_and_no_stop_string_ends_them() -> None:
    words = {"messages": [{"role": "user", "content": "Hm STOP </think> Yes STOP no"}], "stop": "STOP"}
    with serve(
        *("--engine", "echo", "-o", "option.reasoning_parser=qwen3"),
        *("-o", 'option.default_chat_template_kwargs={"enable_thinking": true}'),
    ) as server:
        for path in ("/invocations", "/v1/chat/completions"):
            found = server.post(words, path).json()
            message = found["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == (" user: Hm STOP ", " Yes ")
            assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
        assert "the chat template does not read enable_thinking" in server.log
        off = server.post({**words, "chat_template_kwargs": {"enable_thinking": False}}, "/v1/chat/completions")
        assert off.headers["x-lmi-ignored-parameters"] == "chat_template_kwargs.enable_thinking"
        assert off.json()["choices"][0]["message"] == message | {"refusal": None}, "nobody told the model"


# -- the demo model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact_server(demo_model: Path) -> Iterator[LiveServer]:
    """Computes in f32: an answer does not depend on what else is under way, and the small model is at its best."""
    with serve(str(demo_model), "-o", "option.dtype=fp32") as server:
        server.wait_ready()
        yield server


@pytest.mark.model
def test_it_knows_the_capital_of_france(model_server: LiveServer, exact_server: LiveServer) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert text(exact_server.post({"messages": question, **GREEDY})) == "The capital of France is Paris."
    found = model_server.post({"messages": ASK, **GREEDY})
    assert "Paris" in text(found)
    value = found.json()
    assert value["choices"][0]["finish_reason"] == "eos_token"
    usage = value["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] > 20  # the template's own system message is among them


@pytest.mark.model
@pytest.mark.parametrize(
    "messages",
    [
        [("user", "What is the capital of France?")],
        [("system", "You answer in one word."), ("user", "What is the capital of Italy?")],
        [("user", "My name is Ann."), ("assistant", "Hello Ann!"), ("user", "What is my name?")],
        [("user", "Übersetze 'Straße' — 你好 👋🏽")],
        [("user", "two\nlines\n\n  and spaces  "), ("assistant", ""), ("user", "{{ 7*7 }} {% raw %}")],
    ],
    ids=["question", "system", "turns", "unicode", "odd"],
)
def test_greedy_equals_the_text_laid_out_by_hand(model_server: LiveServer, messages: list[tuple[str, str]]) -> None:
    body = {"messages": [{"role": role, "content": content} for role, content in messages], **GREEDY}
    found = model_server.post(body)
    full = messages if messages[0][0] == "system" else [("system", DEFAULT_SYSTEM), *messages]
    by_hand = model_server.post(
        {"inputs": laid_out(*full), "parameters": {"max_new_tokens": GREEDY["max_tokens"], "details": True}}
    ).json()
    assert text(found) == by_hand["generated_text"]
    assert found.json()["usage"]["completion_tokens"] == by_hand["details"]["generated_tokens"]
    assert found.json()["choices"][0]["finish_reason"] == by_hand["details"]["finish_reason"]


@pytest.mark.model
def test_a_stream_says_the_same(model_server: LiveServer) -> None:
    whole = model_server.post({"messages": ASK, **GREEDY, "logprobs": True, "top_logprobs": 1}).json()["choices"][0]
    lines = chunks(
        model_server.post({"messages": ASK, **GREEDY, "logprobs": True, "top_logprobs": 1, "stream": True}).text
    )
    choices = [line["choices"][0] for line in lines]
    assert "".join(choice["delta"]["content"] for choice in choices) == whole["message"]["content"]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in whole["logprobs"]["content"]]
    assert all(entry["logprob"] <= 0 and entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


@pytest.mark.model
def test_sampled_by_default_and_repeatable_by_seed(exact_server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Write a line of a poem."}], "max_tokens": 16}
    asked = [text(exact_server.post({**body, "seed": seed})) for seed in (1, 2, 3, 1)]
    assert asked[3] == asked[0]
    assert len(set(asked)) > 1
    several = [exact_server.post({**body, "seed": 1, "n": 2}).json()["choices"] for _ in range(2)]
    assert several[0] == several[1]
    assert several[0][0]["message"] != several[0][1]["message"]


@pytest.mark.model
def test_a_stop_string_ends_it_and_is_not_shown(model_server: LiveServer) -> None:
    found = model_server.post({"messages": ASK, **GREEDY, "stop": "France"})
    assert "France" not in text(found)
    assert found.json()["choices"][0]["finish_reason"] == "stop_sequence"


@pytest.mark.model
def test_many_at_once(model_server: LiveServer) -> None:
    """The template is laid out on several threads."""
    asks = [[{"role": "user", "content": f"Say the number {number}."}] for number in range(12)]

    def lengths(messages: Any) -> int:
        return int(model_server.post({"messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"])

    alone = [lengths(messages) for messages in asks]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lengths, asks)) == alone


@pytest.mark.model
def test_too_long_a_chat_is_refused_by_its_name(model_server: LiveServer) -> None:
    for messages in (
        ASK * 4_000,
        [{"role": "user", "content": ""}] * 20_000,
        [{"role": "user", "content": "a " * 400_000}],
    ):
        found = model_server.post({"messages": messages})
        assert found.status_code == 424
        assert "'messages' has" in found.json()["error"]


@pytest.mark.model
def test_tgi_compat_streams_lines(tgi_server: LiveServer) -> None:
    tgi_server.wait_ready()
    found = tgi_server.post({"messages": ASK, **GREEDY, "stream": True})
    assert found.headers["content-type"] == "application/jsonlines"
    assert found.text.splitlines()[-1].startswith("{")
    whole = tgi_server.post({"messages": ASK, **GREEDY})
    assert "Paris" in text(whole)
    refused = tgi_server.post({"messages": ASK, "temperature": 9})
    assert (refused.status_code, refused.json()["error_type"]) == (424, "validation")
