"""What the integration tests of LMI 0.28 and 0.29 send, by the handlers that they configure, and what they assert.

Each story has a configuration as those tests write it, the payload of their client, and its assertions; where the
documents of the schema promise more (types of content, fields, their order in a stream), that is asserted too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapter_files import write_adapter
from tests.app.server import serve
from tests.one_test import in_one_test
from tests.servers import LiveServer, http, options

ECHO = ("--engine", "echo")
PROMPT = "The first words of a story are"
REASONS = ("length", "eos_token", "stop_sequence")
CHAT = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Who wrote it?"},
    {"role": "assistant", "content": "A friend."},
    {"role": "user", "content": "When?"},
]


def prompt(num_tokens: int = 5, **parameters: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": {"max_new_tokens": num_tokens, **parameters}}


def check_token(token: dict[str, Any]) -> None:
    assert set(token) - {"special_token"} == {"id", "text", "log_prob"}
    assert isinstance(token["id"], int)
    assert isinstance(token["log_prob"], float)


def check_details(details: dict[str, Any], most: int) -> None:
    assert details["finish_reason"] in REASONS
    assert 0 < details["generated_tokens"] <= most
    assert details["inputs"] == PROMPT


def read_whole(answer: httpx.Response, most: int = 5) -> dict[str, Any]:
    """Check a whole answer with its details."""
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
    found: dict[str, Any] = answer.json()
    details = found["details"]
    check_details(details, most)
    assert len(details["tokens"]) == details["generated_tokens"]
    for token in details["tokens"]:
        check_token(token)
    assert "".join(token["text"] for token in details["tokens"]) == found["generated_text"]
    return found


def read_lines(answer: httpx.Response, most: int = 5) -> dict[str, Any]:
    """Check a streamed answer with its details; return its last line."""
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/jsonlines"), answer.text
    assert answer.text.endswith("\n")
    *lines, last = map(json.loads, answer.text.splitlines())
    for line in lines:
        assert list(line) == ["token"]
    for line in (*lines, last):
        check_token(line["token"])
    assert list(last) == ["token", "generated_text", "details"]
    assert last["generated_text"] == "".join(line["token"]["text"] for line in (*lines, last))
    check_details(last["details"], most)
    assert last["details"]["generated_tokens"] == len(lines) + 1
    found: dict[str, Any] = last
    return found


# -- rolling batch: vllm, lmi-dist, trtllm, scheduler, and no configuration but the model's name -----------------------


@in_one_test("version", ["0.28", "0.29"])
@in_one_test("name", ["auto", "vllm", "lmi-dist", "trtllm", "scheduler"])
def test_a_rolling_batch_streams_lines_by_its_output_formatter(name: str, version: str) -> None:
    """Those tests set the formatter, so that a request without `stream` is answered by lines."""
    settings = ("option.output_formatter=jsonlines", f"option.rolling_batch={name}", f"option.lmi_version={version}")
    with serve(*ECHO, *options(*settings)) as server:
        one = read_lines(server.post(prompt(do_sample=True, details=True)))
        with ThreadPoolExecutor(4) as pool:
            others = [*pool.map(server.post, [prompt(do_sample=True, details=True)] * 4)]
        assert [read_lines(other) for other in others] == [one] * 4


def test_without_options_an_answer_is_one_document(echo_server: LiveServer) -> None:
    read_whole(echo_server.post(prompt(do_sample=True, details=True)))
    assert list(echo_server.post(prompt(do_sample=True)).json()) == ["generated_text"]


def test_a_correctness_test_gets_the_prompt_with_the_answer(echo_server: LiveServer) -> None:
    found = echo_server.post(prompt(return_full_text=True))
    assert list(found.json()) == ["generated_text"]
    assert found.json()["generated_text"].startswith(PROMPT + " ")


def test_a_limit_beside_the_parameters_is_reported(echo_server: LiveServer) -> None:
    """A performance test writes it there, where LMI drops it without a word."""
    found = echo_server.post({"inputs": PROMPT, "max_new_tokens": 5})
    assert found.status_code == 200
    assert found.headers["x-lmi-ignored-parameters"] == "max_new_tokens"


def test_a_strategy_of_lmis_scheduler_is_reported(echo_server: LiveServer) -> None:
    found = echo_server.post(prompt(decoding_strategy="contrastive"))
    assert found.status_code == 200
    assert found.headers["x-lmi-ignored-parameters"] == "parameters.decoding_strategy"


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_tokens_are_scored(model_server: LiveServer, stream: bool) -> None:
    body = {**prompt(do_sample=True, details=True, decoder_input_details=True), "stream": stream}
    found = (read_lines if stream else read_whole)(model_server.post(body))
    first, *others = found["details"]["prefill"]
    assert first["log_prob"] is None
    for token in others:
        check_token(token)
    assert "".join(token["text"] for token in (first, *others)) == PROMPT


# -- chats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formatter", ["json", "jsonlines"])
def test_a_chat_with_the_most_likely_token(formatter: str) -> None:
    with serve(*ECHO, "-o", f"option.output_formatter={formatter}") as server:
        answer = server.post({"messages": CHAT, "max_tokens": 5, "logprobs": True, "top_logprobs": 1})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    found = answer.json()
    assert list(found) == ["id", "object", "created", "choices", "usage"]
    assert (found["object"], isinstance(found["created"], int)) == ("chat.completion", True)
    (choice,) = found["choices"]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason"]
    assert (choice["index"], choice["message"]["role"]) == (0, "assistant")
    assert choice["finish_reason"] in REASONS
    usage = found["usage"]
    assert usage["completion_tokens"] == len(choice["logprobs"]["content"]) == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    for token in choice["logprobs"]["content"]:
        (top,) = token.pop("top_logprobs")
        assert top == token
        assert bytes(token["bytes"]).decode() == token["token"]
    assert "".join(token["token"] for token in choice["logprobs"]["content"]) == choice["message"]["content"]


def test_a_streamed_chat_has_its_role_first_and_its_reason_last(echo_server: LiveServer) -> None:
    answer = echo_server.post({"messages": CHAT, "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"] == "application/jsonlines"
    chunks = [json.loads(line) for line in answer.text.splitlines()]
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {(chunks[0]["id"], "chat.completion.chunk")}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [set(choice["delta"]) for choice in choices] == [{"role", "content"}, {"content"}, {"content"}]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


def test_an_image_in_a_chat(echo_server: LiveServer) -> None:
    """The tests' client writes a limit by the name that prompts have for it, which LMI drops."""
    pixel = (
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
        "YPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    )
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": pixel}}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0.9, "top_p": 0.6}
    found = echo_server.post({**body, "max_new_tokens": 512})
    assert found.json()["usage"]["completion_tokens"] == 30
    assert found.headers["x-lmi-ignored-parameters"] == "max_new_tokens"


# -- adapters ----------------------------------------------------------------------------------------------------------

ADAPTERS = ("french", "german", "spanish")


@pytest.fixture(params=["vllm", "lmi-dist"])
def adapters(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    """Adapters lie beside serving.properties, where `option.adapters` names them."""
    for name in ADAPTERS:
        write_adapter(tmp_path / "adapters" / name)
    lines = ("option.adapters=adapters", "option.enable_lora=true", "option.output_formatter=jsonlines",
             f"option.rolling_batch={request.param}", "option.model_name=test")  # fmt: skip
    (tmp_path / "serving.properties").write_text("\n".join(lines))
    with serve(*ECHO, "--properties", str(tmp_path / "serving.properties")) as server:
        yield server


def test_an_unregistered_adapter_is_refused_and_the_others_stay(adapters: LiveServer) -> None:
    bodies = [{**prompt(do_sample=True, details=True), "adapters": name} for name in ADAPTERS]
    with ThreadPoolExecutor(3) as pool:
        first, *others = [read_lines(answer) for answer in pool.map(adapters.post, bodies)]
    assert http.delete(f"{adapters.url}/models/test/adapters/{ADAPTERS[0]}").status_code == 200
    refused = adapters.post(bodies[0])
    assert (refused.status_code, refused.json()["code"], "error" in refused.json()) == (424, 424, True)
    assert [read_lines(adapters.post(body)) for body in bodies[1:]] == others
    assert first not in others


def test_a_list_of_one_prompt_may_have_a_list_of_one_adapter(adapters: LiveServer) -> None:
    body = prompt(details=True)
    one = read_lines(adapters.post({**body, "adapters": "german"}))
    assert read_lines(adapters.post({**body, "inputs": [PROMPT], "adapters": ["german"]})) == one


# -- dynamic batch: transformers ---------------------------------------------------------------------------------------

DYNAMIC = "option.rolling_batch=disable"
PROMPTS = ["a b c", "d", "e f", "g h i j", "k", "l m", "n", "o p"]


@pytest.mark.parametrize("settings", [(DYNAMIC,), (DYNAMIC, "batch_size=8"), ("batch_size=8",)])
def test_a_dynamic_batch_answers_each_prompt_of_a_list(settings: tuple[str, ...]) -> None:
    with serve(*ECHO, *options(*settings)) as server:
        for size in (1, 2, 4, 8):
            answer = server.post({"inputs": PROMPTS[:size], "parameters": {"max_new_tokens": 3}})
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
            assert [list(item) for item in answer.json()] == [["generated_text"]] * size


@pytest.mark.parametrize("streaming", ["true", "huggingface"])
def test_a_streamed_dynamic_batch_has_no_more_lines_than_tokens_asked_for(streaming: str) -> None:
    with serve(*ECHO, *options(DYNAMIC, f"option.enable_streaming={streaming}")) as server:
        for size in (1, 4):
            answer = server.post({"inputs": PROMPTS[:size], "parameters": {"max_new_tokens": 6}})
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/jsonlines")
            lines = [json.loads(line) for line in answer.text.split("\n")[:-1]]
            assert len(lines) == 6
            assert {(*line, len(line["outputs"])) for line in lines} == {("outputs", size)}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_replica_is_a_worker(workers: int) -> None:
    with serve(*ECHO, *options(DYNAMIC, f"option.replicas={workers}")) as server:
        server.wait_ready()
        (model,) = http.get(f"{server.url}/models").json()["models"]
        (found,) = http.get(f"{server.url}/models/{model['modelName']}").json()
    groups = found["models"][0]["workerGroups"]
    assert workers in (len(groups), len(groups[0]["workers"]))


# -- vectors -----------------------------------------------------------------------------------------------------------


def test_texts_become_as_many_vectors() -> None:
    with serve(*ECHO, *options("option.task=text-embedding", "batch_size=32", "normalize=False")) as server:
        for size in (1, 2, 4, 8):
            found = server.post({"inputs": PROMPTS[:size]}).json()
            assert len(found) == size
            assert all(isinstance(vector, list) for vector in found)
