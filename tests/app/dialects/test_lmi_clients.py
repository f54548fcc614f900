"""Requests that the clients of LMI's integration tests and documents send, and the parts of answers that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.server import AppServer, serve
from tests.one_test import in_one_test
from tests.servers import LiveServer, http, options
from tests.user_files import write_adapter, write_model

# -- lmi clients 028 ---------------------------------------------------------------------------------------------------
# What the integration tests of LMI 0.28 and 0.29 send, by the handlers that they configure, and what they assert.
#
# Each story has a configuration as those tests write it, the payload of their client, and its assertions; where the
# documents of the schema promise more (types of content, fields, their order in a stream), that is asserted too.


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


# -- newer -------------------------------------------------------------------------------------------------------------
# What the clients of LMI's integration tests and documents send, 0.36 and later, and what they read of the answers.
#
# `tests/app/dialects/test_lmi.py` has the schema itself. Here are the payloads of each kind of client, in the order
# in which it sends them, and the properties that it asserts.


VERSION = ("--engine", "echo", "-o", "option.lmi_version=0.36")
SHORT = ("-o", "option.max_model_len=50")
SAMPLED = {"do_sample": True, "max_new_tokens": 16, "details": True}
GREEDY = {
    "do_sample": False, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": 42, "max_new_tokens": 8, "details": True,
}  # fmt: skip
MESSAGES = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "what is it?"},
    {"role": "user", "content": "deep learning"},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}
SESSION = "X-Amzn-SageMaker-Session-Id"
whole_and_streamed = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with serve(*VERSION, *SHORT, "-o", "option.reasoning_parser=deepseek_r1") as found:
        yield found


def last_line(answer: httpx.Response) -> dict[str, Any]:
    """The last line with JSON, as these clients read answers of both kinds; a formatter may have made events."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.strip()]
    last: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line != "[DONE]"))
    return last


def accept(answer: httpx.Response, *, stream: bool) -> dict[str, Any]:
    """Check an answer as the integration tests' client does, and return its last line."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == ("application/jsonlines" if stream else "application/json")
    if not stream:
        assert len(answer.text.splitlines()) == 1
    last = last_line(answer)
    assert last.get("code", 200) == 200
    assert "error" not in last
    return last


def named(adapter: str | None) -> dict[str, str]:
    return {} if adapter is None else {"adapters": adapter}


@whole_and_streamed
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"parameters": {"max_new_tokens": 16}},
        {"parameters": {"max_new_tokens": 16, "temperature": 0, "seed": 42}},
        {"parameters": SAMPLED},
        {"max_new_tokens": 16},  # at the wrong place
    ],
)
def test_prompts_in_lmi_clients(server: LiveServer, more: dict[str, Any], stream: bool) -> None:
    last = accept(server.post({"inputs": "He is working on", **more, "stream": stream}), stream=stream)
    assert last["generated_text"].startswith(" He is working on He")
    if more.get("parameters", {}).get("details"):
        assert (last["details"]["finish_reason"], last["details"]["generated_tokens"]) == ("length", 16)
        assert stream or len(last["details"]["tokens"]) == 16


@whole_and_streamed
@pytest.mark.parametrize("limit", [{"max_tokens": 16}, {}])
def test_chats_with_logprobs(server: LiveServer, limit: dict[str, Any], stream: bool) -> None:
    body = {"messages": MESSAGES, **limit, "logprobs": True, "top_logprobs": 1}
    (choice,) = accept(server.post({**body, "stream": stream}), stream=stream)["choices"]
    for entry in choice["logprobs"]["content"]:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 1
    assert choice["finish_reason"] == "length"


@whole_and_streamed
def test_an_image_in_a_chat_since_0_36(server: LiveServer, stream: bool) -> None:
    pixel = (
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
        "YPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    )
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": pixel}}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0.9, "top_p": 0.6, "max_tokens": 8}
    (choice,) = accept(server.post({**body, "stream": stream}), stream=stream)["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.model
@pytest.mark.nightly  # starts a server of its own
def test_the_prompts_tokens_are_scored_since_0_36(demo_model: Path) -> None:
    """The client asks for them in whole answers alone, as vLLM has none in streams."""
    parameters = {"do_sample": True, "max_new_tokens": 4, "details": True, "decoder_input_details": True}
    with serve(str(demo_model), "-o", "option.lmi_version=0.36") as server:
        details = accept(server.post({"inputs": "He is working on", "parameters": parameters}), stream=False)["details"]
    assert "".join(token["text"] for token in details["prefill"]) == " is working on"
    assert all(token["logprob"] < 0 for token in details["prefill"])


@whole_and_streamed
def test_a_chat_that_thinks(server: LiveServer, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "9.11 and 9.8, which is greater?"}], "max_tokens": 8}
    (choice,) = accept(server.post({**body, "stream": stream}), stream=stream)["choices"]
    assert choice["delta" if stream else "message"]["reasoning"]


@whole_and_streamed
def test_a_long_prompt_has_lmis_status_and_harms_no_other(server: LiveServer, stream: bool) -> None:
    for parameters in ({"max_new_tokens": 25}, {"max_new_tokens": 49}):
        long = {"inputs": "a " * (100 if parameters["max_new_tokens"] == 25 else 10), "parameters": parameters}
        found = server.post({**long, "stream": stream})
        assert (found.status_code, found.json()["code"], "at most" in found.json()["error"]) == (424, 424, True)
    for body in ({"prompt": "a " * 100}, {"messages": [{"role": "user", "content": "a " * 100}]}):
        assert server.post({**body, "stream": stream}).status_code == 400
    accept(server.post({"inputs": "a " * 10, "parameters": SAMPLED, "stream": stream}), stream=stream)


@whole_and_streamed
@pytest.mark.parametrize("choice", ["auto", {"type": "function", "function": {"name": "get_current_weather"}}, None])
def test_tools(stream: bool, choice: Any) -> None:
    tools = {"tools": [WEATHER]} | ({} if choice is None else {"tool_choice": choice})
    body = {"messages": MESSAGES, **tools, "max_tokens": 40, "logprobs": True, "top_logprobs": 1}
    options = ("-o", "option.enable_auto_tool_choice=true", "-o", "option.tool_call_parser=llama3_json")
    with serve(*VERSION, *options) as server:
        found = server.post({**body, "stream": stream})
    if isinstance(choice, dict):  # a named function needs structured output, which echo has not
        assert (found.status_code, "the engine echo does not support it" in found.text) == (424, True)
    else:
        accept(found, stream=stream)


@pytest.fixture(scope="module", params=["async", "rolling"])
def newer_adapters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    """A model `test` with the adapters `medical` and `exam` in its directory."""
    home = tmp_path_factory.mktemp("model")
    for name in ("medical", "exam"):
        write_adapter(home / "adapters" / name)
    rolling = "option.rolling_batch=vllm\n" if request.param == "rolling" else ""
    (home / "serving.properties").write_text(f"option.enable_lora=true\noption.max_loras=2\n{rolling}")
    named = ("-o", "option.model_name=test")
    with serve(*VERSION, *named, "--properties", str(home / "serving.properties")) as found:
        found.wait_ready()
        yield found


def test_adapters_are_used_deleted_and_missed(newer_adapters: AppServer) -> None:
    for stream in (False, True):
        texts = []
        for name in ("medical", "exam", None):
            told = named(name)
            ask = {"inputs": "He has a", "parameters": GREEDY, **told, "stream": stream}
            first, again = (accept(newer_adapters.post(ask), stream=stream) for _ in range(2))
            assert (again["generated_text"], again["details"]["finish_reason"]) == (first["generated_text"], "length")
            texts.append(first["generated_text"])
            chat = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0.0, "top_p": 1.0, "seed": 42, **told}
            assert accept(newer_adapters.post({**chat, "stream": stream}), stream=stream)["choices"]
        assert len(set(texts)) == 3
    gone = http.delete(newer_adapters.url + "/models/test/adapters/medical")
    assert (gone.status_code, gone.json()) == (200, {"status": "Adapter medical unregistered"})
    for stream in (False, True):
        ask = {"inputs": "He has a", "parameters": GREEDY, "stream": stream}
        missing = newer_adapters.post({**ask, "adapters": "medical"})
        assert (missing.status_code, "'medical'" in missing.json()["error"]) == (424, True)
        for told in (named("exam"), named(""), named(None)):
            assert accept(newer_adapters.post({**ask, **told}), stream=stream)["details"]["finish_reason"] == "length"


SIGNED = """
import json
from djl_python.output_formatter import output_formatter


@output_formatter
def custom_output_formatter(output, **kwargs):
    if hasattr(output, "model_dump"):
        output.processed_by = %r
        return output
    if isinstance(output, str) and output.startswith("data: ") and output.strip() != "data: [DONE]":
        data = json.loads(output[6:])
        data["processed_by"] = %r
        return f"data: {json.dumps(data)}"
    return output
"""


@whole_and_streamed
def test_an_adapters_formatter_signs_its_chats(tmp_path: Path, stream: bool) -> None:
    properties = write_model(tmp_path, SIGNED % ("base", "base"))
    properties.write_text("option.enable_lora=true\n")
    for own in ("medical", "exam"):
        (write_adapter(tmp_path / "adapters" / own) / "model.py").write_text(SIGNED % (own, own))
    with serve(*VERSION, "--properties", str(properties)) as server:
        server.wait_ready()
        for name in ("medical", "exam", None):
            told = named(name)
            found = accept(
                server.post({"messages": MESSAGES, "max_tokens": 4, **told, "stream": stream}), stream=stream
            )
            assert (found["processed_by"], found["choices"][0]["finish_reason"]) == (name or "base", "length")


RENAMED = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter


@input_formatter
def custom_input_formatter(decoded_payload: dict, tokenizer=None, **kwargs) -> dict:
    parameters = decoded_payload.setdefault("parameters", {})
    if "inputPrompt" in decoded_payload:
        decoded_payload["inputs"] = decoded_payload.pop("inputPrompt")
    if "maxOutputToken" in parameters:
        parameters["max_new_tokens"] = parameters.pop("maxOutputToken")
    return decoded_payload


@output_formatter
def custom_output_formatter(output):
    if getattr(output, "choices", None):
        choice = output.choices[0]
        text = choice.text if hasattr(choice, "text") else choice.message.content
        return {"custom_formatter_applied": True, "generated_text": text, "model": output.model}
    return {"custom_formatter_applied": True}
"""


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    properties = write_model(tmp_path_factory.mktemp("renamed"), RENAMED)
    with serve(*VERSION, "--properties", str(properties)) as found:
        yield found


@whole_and_streamed
def test_formatters_have_the_first_and_the_last_word(renamed: AppServer, stream: bool) -> None:
    parameters = {"do_sample": True, "maxOutputToken": 4, "details": True}
    found = renamed.post({"inputPrompt": "a b", "parameters": parameters, "stream": stream})
    accept(found, stream=stream)
    expected: dict[str, Any] = {"custom_formatter_applied": True}
    if not stream:
        expected |= {"generated_text": " a b a b", "model": "lmi"}
    assert json.loads(found.text.partition("\n")[0]) == expected
    accept(renamed.post({"messages": MESSAGES, "max_tokens": 4, "stream": stream}), stream=stream)


@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_formatter_that_raises_is_that_requests_424(tmp_path: Path, kind: str) -> None:
    module = "input_parser" if kind == "input" else "output_formatter"
    text = f"from djl_python.{module} import {kind}_formatter\n\n\n"
    text += f'@{kind}_formatter\ndef custom(data, **kwargs):\n    raise RuntimeError("failed on purpose")\n'
    with serve(*VERSION, "--properties", str(write_model(tmp_path, text))) as server:
        found = server.post({"inputs": "a", "parameters": SAMPLED})
        assert (found.status_code, "failed on purpose" in found.json()["error"]) == (424, True)
        assert server.ping() == 200


def test_a_model_py_without_a_handler_or_formatter_changes_nothing(tmp_path: Path) -> None:
    properties = write_model(tmp_path, "from djl_python import Input, Output\n\n\ndef other():\n    return 1\n")
    with serve(*VERSION, "--properties", str(properties)) as server:
        for stream in (False, True):
            accept(server.post({"inputs": "a", "parameters": SAMPLED, "stream": stream}), stream=stream)


def test_a_session_spans_requests_and_is_closed_by_its_name(server: LiveServer) -> None:
    opened = server.post({"requestType": "NEW_SESSION"})
    name = opened.headers[SESSION].partition(";")[0]
    assert (opened.status_code, opened.json()) == (200, {"result": f"Session {name} created"})
    for stream in (False, True):
        ask = {"inputs": "a", "parameters": SAMPLED, "stream": stream}
        assert accept(server.post(ask, headers={SESSION: name}), stream=stream)["details"]
    closed = server.post({"requestType": "CLOSE"}, headers={SESSION: name})
    assert (closed.status_code, closed.headers["X-Amzn-SageMaker-Closed-Session-Id"]) == (200, name)


def test_prompts_with_a_long_common_beginning() -> None:
    shared = " ".join(f"word{i}" for i in range(4000))
    with serve(*VERSION) as server:
        for end in ("one?", "two?"):
            ask = {"inputs": f"{shared} {end}", "parameters": {"max_new_tokens": 50, "temperature": 0, "seed": 42}}
            assert accept(server.post(ask), stream=False)["generated_text"].startswith(" word0 word1 ")


def test_chats_stream_lines_that_a_benchmark_counts() -> None:
    """It takes no line that begins with `data:`, and counts those whose delta has a content."""
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0.0, "stream": True}
    with serve(*VERSION) as server:
        lines = [line for line in server.post(body).text.splitlines() if line and not line.startswith("data:")]
    assert len([line for line in lines if json.loads(line)["choices"][0]["delta"].get("content")]) == 8


@pytest.mark.parametrize("number", [1, 4])
def test_a_dynamic_batch_answers_whole_whatever_stream_says(number: int) -> None:
    with serve(*VERSION, "-o", "option.rolling_batch=disable", "-o", "option.device_map=auto") as server:
        for stream in (False, True):
            ask = {"inputs": ["He has a"] * number, "parameters": {"max_new_tokens": 4}, "stream": stream}
            found = server.post(ask)
            assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
            assert found.json() == [{"generated_text": "He has a He has a He"}] * number
            assert found.headers.get("x-lmi-ignored-parameters") == ("stream" if stream else None)


@pytest.mark.parametrize("number", [1, 8])
def test_embeddings_are_a_list_of_one_vector_each(number: int) -> None:
    with serve(*VERSION, "-o", "option.task=text-embedding", "-o", "option.async_mode=true") as server:
        found = server.post({"inputs": [f"text {i}" for i in range(number)]}).json()
    assert len(found) == number
    assert all(isinstance(vector, list) for vector in found)
