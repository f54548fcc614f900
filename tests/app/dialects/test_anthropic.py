"""Anthropic's routes over real sockets, and the threads that the server keeps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.server import BY_KEY, impatient, serve
from tests.app.serving.test_between_calls import Stepped
from tests.one_test import in_one_test
from tests.servers import LiveServer, http, options
from tests.stepped import item

# -- anthropic ---------------------------------------------------------------------------------------------------------
# Anthropic's routes over real sockets: framing, pings, keys, `route=`, Bedrock's body, routes that are not there.


MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
RESPONSE_COUNT = "/v1/responses/input_tokens"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "a ü"}], "max_tokens": 3}
NAMED = "X-Amzn-SageMaker-Custom-Attributes"


@pytest.fixture(scope="module")
def short() -> Iterator[LiveServer]:
    """A model of 8 tokens, with a key."""
    with serve("--engine", "echo", "--api-key", "k", *options("option.max_model_len=8")) as server:
        server.wait_ready()
        yield server


def names(body: str) -> list[str]:
    """A stream's events by name, each held against its value's type."""
    *events, rest = body.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value["type"])
    return found


def test_a_message_is_whole_or_events(echo_server: LiveServer) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    whole = http.post(f"{echo_server.url}{MESSAGES}?beta=true", json=ASK, headers=headers).json()
    assert whole["content"] == [{"type": "text", "text": " user: a ü"}]
    streamed = http.post(echo_server.url + MESSAGES, json={**ASK, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream"
    deltas = ["content_block_delta"] * 3
    assert names(streamed.text) == [
        "message_start", "content_block_start", *deltas, "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


BILLING = "x-anthropic-billing-header: cc_version=2.1.330; cch=1f3a;"


@pytest.mark.parametrize(
    "system",
    [
        f"{BILLING}\nBe kind.",
        f"Be kind.\n{BILLING}",
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be kind."}],
        [{"type": "text", "text": f"{BILLING}\nBe kind."}],
    ],
)
def test_lines_for_anthropics_servers_are_no_part_of_a_prompt(echo_server: LiveServer, system: Any) -> None:
    def ask(system: Any) -> list[str]:
        body = {**ASK, "max_tokens": 50, "system": system}
        return str(http.post(echo_server.url + MESSAGES, json=body).json()["content"][0]["text"]).split()

    assert ask(system) == ask("Be kind.")


def test_a_system_prompt_for_anthropics_servers_only_is_none(echo_server: LiveServer) -> None:
    def ask(**more: Any) -> Any:
        return http.post(echo_server.url + COUNT, json={**ASK, **more})

    assert ask(system=BILLING).json() == ask().json()
    inside = "say x-anthropic-billing-header: 1"
    assert ask(system=inside).json()["input_tokens"] > ask().json()["input_tokens"]
    only = ask(messages=[{"role": "system", "content": BILLING}])
    assert only.status_code == 400
    assert "x-anthropic-… lines only" in only.text


def test_an_option_keeps_the_lines_for_anthropics_servers() -> None:
    with serve("--engine", "echo", *options("option.keep_anthropic_lines=true")) as server:
        answer = http.post(server.url + MESSAGES, json={**ASK, "max_tokens": 50, "system": BILLING}).json()
        assert BILLING in answer["content"][0]["text"]


@pytest.mark.parametrize("route", [MESSAGES, COUNT])
def test_invocations_take_them_by_route(echo_server: LiveServer, route: str) -> None:
    direct = http.post(echo_server.url + route, json=ASK).json()
    named = echo_server.post(ASK, headers={NAMED: f"route={route}"}).json()
    assert {**direct, "id": ""} == {**named, "id": ""}


def test_invocations_take_a_response_by_route(echo_server: LiveServer) -> None:
    asked = {"input": "a ü", "max_output_tokens": 3}
    whole = echo_server.post(asked, headers={NAMED: "route=/v1/responses"}).json()
    assert whole["output"][0]["content"][0]["text"] == " user: a ü"
    streamed = http.post(echo_server.url + "/v1/responses", json={**asked, "stream": True})
    assert names(streamed.text)[-1] == "response.incomplete"


@pytest.mark.parametrize(
    ("route", "asked", "last"),
    [
        (MESSAGES, {**ASK, "stream": True}, b'data: {"type":"message_stop"}\n\n'),
        (COUNT, ASK, b'{"input_tokens":4}'),
        ("/v1/responses", {"input": "a", "store": True}, b'"param":"store","code":null}}'),
        (RESPONSE_COUNT, {"input": "a ü"}, b'{"object":"response.input_tokens","input_tokens":4}'),
    ],
)
def test_a_rolling_batch_of_djls_takes_them_by_route(route: str, asked: dict[str, Any], last: bytes) -> None:
    stepped = Stepped(lambda seconds: None)
    try:
        (piece,) = stepped.batch.step(1, {0: item(asked, route=route)})
        assert stepped.until_ended(piece).endswith(last)
    finally:
        stepped.close()


def test_bedrocks_body_is_a_message_anywhere(echo_server: LiveServer) -> None:
    found = echo_server.post({**ASK, "anthropic_version": "bedrock-2023-05-31"}).json()
    assert (found["type"], found["usage"]["output_tokens"]) == ("message", 3)


def test_a_count_is_no_matter_of_the_models_limit(short: LiveServer) -> None:
    key = {"x-api-key": "k"}
    long = {**ASK, "messages": [{"role": "user", "content": "a " * 20}]}
    assert http.post(short.url + COUNT, json=long, headers=key).json() == {"input_tokens": 22}
    found = http.post(short.url + MESSAGES, json=long, headers=key)
    assert found.status_code == 400
    assert found.json()["error"]["message"] == "prompt is too long: 22 tokens > 7 maximum"
    found = http.post(short.url + MESSAGES, json={**ASK, "max_tokens": 100}, headers=key)
    assert found.json()["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_who_has_no_key_is_told_so_in_its_form(short: LiveServer, path: str) -> None:
    found = http.post(short.url + path, json=ASK)
    assert (found.status_code, found.json()["error"]["type"]) == (401, "authentication_error")


@in_one_test(
    ("path", "kind"),
    [
        ("/v1/messages/files", "not_found_error"),
        ("/v1/complete", "not_found_error"),
        ("/v1/moderations", "invalid_request_error"),
        ("/v1/responses/resp_0/steer", "invalid_request_error"),
        ("/v1/embeddings/batches", "invalid_request_error"),
    ],
)
def test_routes_that_are_not_served_say_so_in_their_form(echo_server: LiveServer, path: str, kind: str) -> None:
    found = http.post(echo_server.url + path, json={})
    assert found.status_code == 404
    assert found.json()["error"] | {"param": None, "code": None} == {
        "type": kind,
        "message": f"{path} is not served here; /docs lists the routes that are",
        "param": None,
        "code": None,
    }
    assert ("type" in found.json()) is (kind == "not_found_error")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "it requires option.task=text-embedding"),
    ],
)
def test_a_path_that_is_not_served_is_not_another_route(echo_server: LiveServer, path: str, words: str) -> None:
    found = http.post(echo_server.url + path, json={"input": "a"})
    assert found.status_code == 404
    assert found.json()["error"]["message"].startswith(f"{path} is not served here: {words}")


def test_what_generates_is_not_served_by_a_model_of_another_task() -> None:
    with serve("--engine", "echo", *options("option.task=text-embedding")) as server:
        server.wait_ready()
        found = http.post(f"{server.url}/v1/responses/input_tokens", json={"input": "a"})
    assert found.status_code == 404
    assert "it requires option.task=text-generation" in found.json()["error"]["message"]


def test_a_silent_stream_pings() -> None:
    slow = options("option.echo_tokens_per_second=0.2")  # a busy machine may stand still for seconds
    body = {**ASK, "max_tokens": 2, "stream": True}
    with impatient(*slow) as server, http.stream("POST", server.url + MESSAGES, json=body) as stream:
        found = itertools.dropwhile(lambda line: line != "event: content_block_delta", stream.iter_lines())
        later = [line for line in itertools.takewhile(lambda line: line != "event: ping", found) if "event: " in line]
    assert later == ["event: content_block_delta"], "the client has left before the second token"


# -- Anthropic's threads over HTTP: conversations that the server keeps, by the id of their last message ---------------


PATH, THREADS_COUNT = "/v1/messages", "/v1/messages/count_tokens"
ANN, BOB = {"x-api-key": "ann"}, {"authorization": "Bearer bob"}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve("--engine", "echo", "-o", "option.responses_store=memory", *BY_KEY) as server:
        yield server


def user(words: Any) -> dict[str, Any]:
    return {"role": "user", "content": words}


def send(
    server: LiveServer, *messages: Any, path: str = PATH, headers: dict[str, str] = ANN, **more: Any
) -> httpx.Response:
    limit = {"max_tokens": 64} if path == PATH else {}
    return server.post({"messages": messages, **limit, **more}, path, headers=headers)


def go_on(id: Any) -> dict[str, Any]:
    return {"thread": {"type": "continue", "previous_message_id": id}}


CREATE: dict[str, Any] = {"thread": {"type": "create"}}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


@pytest.mark.parametrize("stream", [False, True])
def test_a_thread_is_the_conversation_of_all_its_messages(server: LiveServer, stream: bool) -> None:
    """The echo engine says its prompt: equal answers are to equal prompts."""
    start: dict[str, Any] = {"system": "Be brief.", "tools": [TOOL]}
    if stream:
        found = events(send(server, user("one two"), **start, **CREATE, max_tokens=9, stream=True))
        first = {
            "id": found[0]["message"]["id"],
            "content": [
                {
                    "type": "text",
                    "text": "".join(one["delta"]["text"] for one in found if "text" in one.get("delta", {})),
                }
            ],
        }
    else:
        first = send(server, user("one two"), **start, **CREATE, max_tokens=9).json()
    second = send(server, user("three"), **go_on(first["id"]), max_tokens=9).json()
    third = send(server, user("four"), **go_on(second["id"])).json()
    said = [{"role": "assistant", "content": one["content"]} for one in (first, second)]
    whole = send(server, user("one two"), said[0], user("three"), said[1], user("four"), **start).json()
    assert without_ids(third["content"]) == without_ids(whole["content"])
    assert third["usage"] == whole["usage"]
    counted = send(server, user("four"), path=THREADS_COUNT, **go_on(second["id"])).json()
    assert counted == {"input_tokens": third["usage"]["input_tokens"]}


def test_a_call_and_its_result(server: LiveServer) -> None:
    """The echo engine says the prompt's words, and with them the call."""
    said = 'So <tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>'
    for stream in (False, True):
        answer = send(server, user(said), tools=[TOOL], **CREATE, max_tokens=400, stream=stream)
        if stream:
            found = events(answer)
            id = found[0]["message"]["id"]
            call = next(
                one["content_block"]["id"] for one in found if one.get("content_block", {}).get("type") == "tool_use"
            )
        else:
            id = answer.json()["id"]
            call = next(block["id"] for block in answer.json()["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call, "content": "12 °C"}
        answered = send(server, user([result]), **go_on(id))
        assert answered.status_code == 200, answered.text
        unknown = send(server, user([{**result, "tool_use_id": "toolu_0"}]), **go_on(id))
        assert unknown.status_code == 400
        assert unknown.json()["error"]["message"].startswith("messages[0].content[0]")


def not_found(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    return (answer.status_code, error["type"], error["details"]) == (
        404,
        "not_found_error",
        {"error_code": "thread_not_found"},
    )


def test_what_is_not_kept_is_not_found(server: LiveServer) -> None:
    first = send(server, user("one"), **CREATE).json()
    alone = send(server, user("one")).json()
    response = server.post({"input": "a", "max_output_tokens": 4}, "/v1/responses", headers=ANN).json()
    for id in ("msg_0", "", "x" * 10_000, alone["id"], response["id"]):
        assert not_found(send(server, user("two"), **go_on(id)))
    assert not_found(send(server, user("two"), headers=BOB, **go_on(first["id"])))
    assert not_found(send(server, user("two"), path=THREADS_COUNT, headers=BOB, **go_on(first["id"])))
    assert send(server, user("two"), **go_on(first["id"])).status_code == 200
    assert httpx.get(f"{server.url}/v1/responses/{first['id']}", headers=ANN).status_code == 404


def test_a_failed_stream_is_not_kept() -> None:
    with serve("--engine", "echo", "-o", "option.echo_cues=true", "-o", "option.responses_store=memory") as server:
        found = events(send(server, user("a b <raise>"), **CREATE, stream=True))
        assert found[-1]["type"] == "error"
        assert not_found(send(server, user("two"), **go_on(found[0]["message"]["id"])))


def test_a_directory_survives_a_restart_in_anthropic(tmp_path: Path) -> None:
    options = ("--engine", "echo", "-o", f"option.responses_store={tmp_path}")
    with serve(*options) as server:
        first = send(server, user("one two"), **CREATE, max_tokens=9).json()
    with serve(*options) as server:
        assert "one two" in send(server, user("three"), **go_on(first["id"])).json()["content"][0]["text"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"thread": "x"}, "thread=\"x\": must be an object with a 'type' that is create or continue"),
        ({"thread": {"type": "fork"}}, "must be an object with a 'type'"),
        ({"thread": {"type": "continue"}}, "continue requires a string 'previous_message_id'"),
        ({"thread": {"type": "create", "previous_message_id": "x"}}, "create allows only 'type'"),
        (go_on(7), "continue requires a string 'previous_message_id'"),
    ],
)
def test_wrong_threads(server: LiveServer, more: dict[str, Any], words: str) -> None:
    for path in (PATH, THREADS_COUNT):
        found = send(server, user("a"), path=path, **more)
        assert (found.status_code, words in found.json()["error"]["message"]) == (400, True), found.text


@pytest.mark.parametrize("more", [{"system": "Be long."}, {"tools": [TOOL]}])
def test_a_thread_keeps_what_it_was_created_with(server: LiveServer, more: dict[str, Any]) -> None:
    first = send(server, user("one"), **CREATE).json()
    found = send(server, user("two"), **go_on(first["id"]), **more)
    assert found.status_code == 400
    assert f"{next(iter(more))}: cannot be changed within a thread" in found.json()["error"]["message"]


def test_wrong_messages_are_named_by_their_own_place(server: LiveServer) -> None:
    first = send(server, user("one"), **CREATE).json()
    assert "messages[1].role must be" in send(server, user("b"), {"role": "x"}, **go_on(first["id"])).text
    assert "'messages' must be a non-empty list" in send(server, **go_on(first["id"])).text


def test_the_document_says_where_threads_are_taken(server: LiveServer, echo_server: LiveServer) -> None:
    for one, taken in ((server, True), (echo_server, False)):
        schemas = httpx.get(f"{one.url}/api-doc/openapi.json").json()["components"]["schemas"]
        assert ("thread" in schemas["AnthropicMessagesRequest"]["properties"]) is taken


def test_ids_of_messages_mean_nothing(server: LiveServer) -> None:
    for id in (None, 5, {"a": 1}):
        made = send(server, {**user("a"), "id": id}, **CREATE).json()
        assert send(server, user("b"), **go_on(made["id"])).status_code == 200


def test_a_thread_that_cannot_be_kept_is_refused(server: LiveServer) -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "maximum": 10**30}}
    found = send(server, user("a"), tools=[tool], **CREATE)
    assert (found.status_code, "cannot be stored" in found.text) == (400, True)
