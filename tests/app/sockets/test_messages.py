"""Messages of a WebSocket are requests: each route answers as it does over HTTP, and nothing of a neighbour is lost."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.app.server import serve
from tests.app.sockets.client import open_socket, receive, send, until, wire
from tests.servers import ANSWER_LIMIT, LiveServer, wait_for

INVOKE = "/invocations-bidirectional-stream"
CHAT = {"messages": [{"role": "user", "content": "a plain question"}], "max_tokens": 5}

STREAMS: dict[tuple[str, str], dict[str, Any]] = {
    ("/invocations", INVOKE): {"inputs": "a plain question", "parameters": {"max_new_tokens": 5}, "stream": True},
    ("/invocations", f"{INVOKE}?key=value"): {**CHAT, "stream": True},
    ("/v1/chat/completions", "/v1/chat/completions"): {**CHAT, "stream": True},
    ("/v1/completions", "/v1/completions"): {"prompt": "a plain question", "max_tokens": 5, "stream": True},
    ("/v1/messages", "/v1/messages"): {**CHAT, "stream": True},
    ("/generate_stream", "/generate_stream"): {"inputs": "a plain question", "parameters": {"max_new_tokens": 5}},
    ("/v1/responses", INVOKE): {"input": "a plain question", "max_output_tokens": 5, "stream": True},
}


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of the events or lines of a stream over HTTP."""
    lines = response.text.splitlines()
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def without_ids(events: list[Any]) -> str:
    """The events as JSON, without what differs from response to response."""
    text = re.sub(r'"(id|item_id)": "[^"]+"', "", json.dumps(events))
    return re.sub(r'"(created|created_at|completed_at)": \d+', "", text)


@pytest.mark.parametrize(("route", "path"), STREAMS)
def test_a_stream_has_the_same_events_as_over_http(echo_server: LiveServer, route: str, path: str) -> None:
    body = STREAMS[route, path]
    expected = events_of(echo_server.post(body, route))
    if route == "/v1/responses":
        body = {"type": "response.create", **body}
    with open_socket(echo_server, path) as client:
        for _ in range(2):  # one after another on the same connection
            send(client, body)
            events = [receive(client) for _ in expected]
            assert without_ids(events) == without_ids(expected)


def test_a_whole_response_is_one_frame(echo_server: LiveServer) -> None:
    body = {"inputs": "one two", "parameters": {"max_new_tokens": 2}}
    with open_socket(echo_server, INVOKE) as client:
        send(client, body)
        assert receive(client) == echo_server.post(body).json()


@pytest.mark.parametrize("path", [INVOKE, "/v1/chat/completions", "/v1/messages"])
def test_an_error_has_its_status_and_leaves_the_connection_open(echo_server: LiveServer, path: str) -> None:
    route = "/invocations" if path == INVOKE else path
    refused = {**CHAT, "max_tokens": -1}
    expected = echo_server.post(refused, route)
    assert expected.status_code >= 400
    with open_socket(echo_server, path) as client:
        send(client, refused)
        assert receive(client) == {**expected.json(), "type": "error", "status": expected.status_code}
        client.send("{")
        assert receive(client)["status"] >= 400
        send(client, CHAT)
        assert "type" not in receive(client) or path == "/v1/messages"


def test_lanes_run_at_once_and_each_in_order(echo_server: LiveServer) -> None:
    stop = {"inputs": "x", "parameters": {"max_new_tokens": 1}}
    long = {"inputs": "y " * 20, "parameters": {"max_new_tokens": 5000}}
    with open_socket(echo_server, INVOKE) as client:
        send(client, {**long, "stream_id": "a"}, {**stop, "stream_id": "a"}, {**stop, "stream_id": "b"})
        order = [receive(client) for _ in range(3)]
    assert [event["stream_id"] for event in order] == ["b", "a", "a"]
    assert [len(event["generated_text"].split()) for event in order] == [1, 5000, 1]


def test_a_lane_needs_a_name_of_few_characters(echo_server: LiveServer) -> None:
    with open_socket(echo_server, INVOKE) as client:
        for name in ("", "a b", "é", "x" * 257, 5, None):
            send(client, {"inputs": "x", "stream_id": name})
            assert receive(client)["error"]["message"].startswith("stream_id: ")


def test_a_text_that_quotes_a_lane_names_none(echo_server: LiveServer) -> None:
    with open_socket(echo_server, INVOKE) as client:
        send(client, {"inputs": '"stream_id": "a"', "parameters": {"max_new_tokens": 1}})
        assert "stream_id" not in receive(client)


def test_too_many_waiting_messages_are_refused_by_an_event(echo_server: LiveServer) -> None:
    with open_socket(echo_server, INVOKE) as client:
        send(client, {"inputs": "y " * 20, "parameters": {"max_new_tokens": 30000}})
        send(client, *[{"inputs": "x", "parameters": {"max_new_tokens": 1}}] * 300)
        answers = [receive(client) for _ in range(301)]
    refused = [answer for answer in answers if answer.get("type") == "error"]
    assert 0 < len(refused) <= 300 - 256 + 1
    assert all(answer["status"] == 429 for answer in refused)


def test_routes_without_a_socket_say_so(echo_server: LiveServer) -> None:
    with pytest.raises(InvalidStatus) as refused:
        open_socket(echo_server, "/v1/load_lora_adapter").__enter__()
    assert refused.value.response.status_code == 426
    with pytest.raises(InvalidStatus) as missing:
        open_socket(echo_server, "/nothing").__enter__()
    assert missing.value.response.status_code == 404
    for path in (INVOKE, "/v1/responses"):
        assert httpx.get(echo_server.url + path).status_code == (426 if path == INVOKE else 405)


def test_a_client_that_vanishes_ends_its_requests() -> None:
    with serve("--engine", "echo") as server:
        with wire(server) as client:
            for lane in "abc":
                body = {"inputs": "y", "parameters": {"max_new_tokens": 100000}, "stream": True, "stream_id": lane}
                client.frame(1, json.dumps(body).encode())
            lanes = set[str]()
            while len(lanes) < 3:  # each has begun
                first, data = client.read()
                assert first == 0x81
                lanes.add(json.loads(data)["stream_id"])
        wait_for(lambda: server.log.count("outcome=cancelled") == 3, 10, "the requests go on")


# -- who may open a socket ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked_server() -> Any:
    with serve("--engine", "echo", env={"LMI_API_KEY": "secret-key-1,secret-key-2"}) as server:
        yield server


def test_a_key_is_checked_before_the_socket_opens(locked_server: LiveServer) -> None:
    with pytest.raises(InvalidStatus) as refused:
        open_socket(locked_server, INVOKE).__enter__()
    assert refused.value.response.status_code == 401
    headers = {"Authorization": "Bearer secret-key-1"}
    with open_socket(locked_server, INVOKE, additional_headers=headers) as client:
        send(client, {"inputs": "x", "parameters": {"max_new_tokens": 1}})
        assert receive(client) == {"generated_text": " x"}
    assert "secret" not in locked_server.log


def test_a_page_of_another_site_cannot_open_a_socket(echo_server: LiveServer) -> None:
    with pytest.raises(InvalidStatus) as refused:
        open_socket(echo_server, INVOKE, origin="https://example.com").__enter__()
    assert refused.value.response.status_code == 403
    with open_socket(echo_server, INVOKE, origin=echo_server.url) as client:
        send(client, {"inputs": "x", "parameters": {"max_new_tokens": 1}})
        assert receive(client) == {"generated_text": " x"}


# -- OpenAI's Responses ------------------------------------------------------------------------------------------------


ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def create(client: Any, **fields: Any) -> Any:
    """The last event of a response."""
    send(client, {"type": "response.create", "store": False, "max_output_tokens": 6, **fields})
    return until(client, *ENDS)[-1]


def text_of(event: Any) -> str:
    return "".join(part["text"] for item in event["response"]["output"] for part in item["content"])


def test_a_response_continues_the_newest_of_a_lane(echo_server: LiveServer) -> None:
    with open_socket(echo_server, "/v1/responses") as client:
        first = create(client, input="red")
        second = create(client, input="green", previous_response_id=first["response"]["id"])
        assert second["response"]["previous_response_id"] == first["response"]["id"]
        whole = echo_server.post(
            {
                "input": [
                    {"role": "user", "content": "red"},
                    *first["response"]["output"],
                    {"role": "user", "content": "green"},
                ],
                "max_output_tokens": 6,
                "store": False,
            },
            "/v1/responses",
        ).json()
        assert second["response"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        lost = create(client, input="blue", previous_response_id=first["response"]["id"])
        assert (lost["status"], lost["error"]["code"], lost["error"]["param"]) == (
            400, "previous_response_not_found", "previous_response_id",
        )  # fmt: skip
        assert create(client, input="next")["type"] == "response.incomplete"


def test_a_response_is_continued_without_input(echo_server: LiveServer) -> None:
    with open_socket(echo_server, "/v1/responses") as client:
        first = create(client, input="red")
        second = create(client, previous_response_id=first["response"]["id"])
        assert second["response"]["usage"]["input_tokens"] > first["response"]["usage"]["input_tokens"]


def test_a_fork_keeps_its_parent(echo_server: LiveServer) -> None:
    with open_socket(echo_server, "/v1/responses") as client:
        parent = create(client, input="red")["response"]["id"]
        for lane in ("a", "b"):
            fork = create(client, input="green", previous_response_id=parent, stream_id=lane)
            assert (fork["type"], fork["stream_id"]) == ("response.incomplete", lane)
        refused = create(client, input=5, previous_response_id=parent, stream_id="c")
        assert refused["type"] == "error"
        assert create(client, input="blue", previous_response_id=parent)["type"] == "response.incomplete"


def test_a_refused_continuation_of_a_lane_forgets_its_parent(echo_server: LiveServer) -> None:
    with open_socket(echo_server, "/v1/responses") as client:
        parent = create(client, input="red")["response"]["id"]
        assert create(client, input="x", previous_response_id=parent, max_output_tokens=-1)["status"] == 400
        lost = create(client, input="x", previous_response_id=parent)
        assert lost["error"]["code"] == "previous_response_not_found"


def test_a_warm_up_has_no_output_and_is_continued(echo_server: LiveServer) -> None:
    with open_socket(echo_server, "/v1/responses") as client:
        send(client, {"type": "response.create", "generate": False, "input": "red", "store": False, "stream": True})
        events = until(client, *ENDS)
        assert [event["type"] for event in events] == [
            "response.created", "response.in_progress", "response.completed",
        ]  # fmt: skip
        ended = events[-1]["response"]
        assert (ended["output"], ended["usage"]["output_tokens"], ended["max_output_tokens"]) == ([], 0, None)
        assert "red" in text_of(create(client, input="green", previous_response_id=ended["id"]))


def test_the_number_of_lanes_is_limited(echo_server: LiveServer) -> None:
    with open_socket(echo_server, "/v1/responses") as client:
        for lane in range(32):
            assert create(client, input="x", stream_id=str(lane))["type"] == "response.incomplete"
        refused = create(client, input="x", stream_id="32")
        assert (refused["status"], refused["stream_id"], refused["error"]["code"]) == (
            400, "32", "websocket_stream_limit_reached",
        )  # fmt: skip
        assert create(client, input="x", stream_id="0")["type"] == "response.incomplete"
        refused = create(client, input="x", stream_id="")
        assert (refused["error"]["code"], "stream_id" in refused) == ("invalid_stream_id", False)


def test_other_events(echo_server: LiveServer) -> None:
    with open_socket(echo_server, "/v1/responses") as client:
        send(client, {"type": "response.processed", "response_id": "resp_1"})
        send(client, {"type": "response.steer", "previous_response_id": "resp_1", "input": "shorter"})
        (event,) = until(client, "response.steer.failed")
        assert (event["error"]["code"], event["sequence_number"]) == ("steering_not_supported", 0)
        for message in ('{"type": "session.update"}', "[]", "{", '{"input": "x"}', "[" * 1000 + "]" * 1000):
            client.send(message)
            event = receive(client)
            assert (event["type"], event["status"]) == ("error", 400)
        assert create(client, input="x")["type"] == "response.incomplete"


def test_a_stored_response_is_continued_by_another_connection() -> None:
    with serve("--engine", "echo", "-o", "option.responses_store=memory") as server:
        with open_socket(server, "/v1/responses") as client:
            parent = create(client, input="red", store=True)["response"]["id"]
        with open_socket(server, "/v1/responses") as client:
            assert "red" in text_of(create(client, input="green", previous_response_id=parent))
            lost = create(client, input="green", previous_response_id="resp_none")
            assert (lost["status"], lost["error"]["code"]) == (400, "previous_response_not_found")


def test_a_conversation_over_sockets() -> None:
    """The server stores its items, so the connection does not, and a warm-up would be appended to it."""
    with serve("--engine", "echo", "-o", "option.responses_store=memory") as server:
        id = httpx.post(f"{server.url}/v1/conversations").json()["id"]
        with open_socket(server, "/v1/responses") as client:
            first = create(client, input="red", conversation=id)["response"]
            assert first["conversation"] == {"id": id}
            assert "red" in text_of(create(client, input="green", conversation={"id": id}))
            refused = create(client, input="blue", previous_response_id=first["id"])
            assert (refused["status"], refused["error"]["param"]) == (400, "previous_response_id")
            refused = create(client, input="blue", conversation=id, previous_response_id=first["id"])
            assert (refused["status"], refused["error"]["param"]) == (400, "conversation")
            refused = create(client, input="blue", conversation=id, generate=False)
            assert "generate=false: is not supported with conversation" in refused["error"]["message"]
            assert create(client, input="blue", conversation="conv_0")["status"] == 404
        found = httpx.get(f"{server.url}/v1/conversations/{id}/items").json()
        assert [item["role"] for item in found["data"]] == ["assistant", "user", "assistant", "user"]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_stopping_server_finishes_responses_and_closes_idle_connections() -> None:
    with serve("--engine", "echo") as server:
        with open_socket(server, INVOKE) as idle, open_socket(server, INVOKE) as busy:
            send(busy, {"inputs": "y", "parameters": {"max_new_tokens": 4000}, "stream": True})
            receive(busy)
            server.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                idle.recv(ANSWER_LIMIT)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
            assert len([*busy]) == 3999
        assert server.wait(30) == 0


def test_a_stopping_server_refuses_messages_that_wait_in_a_lane() -> None:
    with serve("--engine", "echo") as server:
        with open_socket(server, INVOKE) as client:
            send(client, {"inputs": "y", "parameters": {"max_new_tokens": 4000}, "stream": True, "stream_id": "a"})
            receive(client)
            send(client, {"inputs": "y", "parameters": {"max_new_tokens": 1}, "stream_id": "a"})
            send(client, {"inputs": "z", "parameters": {"max_new_tokens": 1}})
            assert "stream_id" not in until_default(client)  # so the message before it waits in its lane
            server.send_signal(signal.SIGTERM)
            events = [json.loads(message) for message in client]
            assert (events[-1]["status"], events[-1]["stream_id"]) == (503, "a")
            assert int(events[-1]["headers"]["retry-after"]) > 0
            assert {event["stream_id"] for event in events} == {"a"}
            assert client.close_code == 1001
        assert server.wait(30) == 0


def until_default(client: Any) -> Any:
    """The next event of the default lane."""
    while "stream_id" in (event := receive(client)):
        pass
    return event


def test_a_browsers_key_is_read_from_its_subprotocols(locked_server: LiveServer) -> None:
    for key, admitted in (("secret-key-2", True), ("secret-key-3", False)):
        offered: Any = ["realtime", f"openai-insecure-api-key.{key}", "openai-organization.x"]
        if not admitted:
            with pytest.raises(InvalidStatus) as refused:
                open_socket(locked_server, "/v1/realtime", subprotocols=offered).__enter__()
            assert refused.value.response.status_code == 401
            continue
        with open_socket(locked_server, "/v1/realtime?model=model&api-key=secret", subprotocols=offered) as client:
            assert client.subprotocol == "realtime"
            assert receive(client)["type"] == "session.created"
    assert "secret" not in locked_server.log
