"""Triton's routes over real sockets: framing, errors before and inside a stream, and the one door."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.server import serve
from tests.app.test_engine_failures import ISOLATED
from tests.servers import LiveServer, dechunked, http, post_bytes, raw, wait_for

GENERATE = "/v2/models/model/generate"
STREAM = "/v2/models/model/generate_stream"
ASK = {"text_input": "a b", "max_tokens": 3}
EVENTS = "text/event-stream; charset=utf-8"


@pytest.fixture(scope="module")
def slow_server() -> Iterator[LiveServer]:
    """Two places, one in the queue, fifty tokens a second, and the echo engine's cues."""
    options = ("option.max_rolling_batch_size=2", "job_queue_size=1", "option.echo_tokens_per_second=50")
    cues = ("option.echo_cues=true", "max_request_size=2000")
    with serve("--engine", "echo", *(part for option in (*options, *cues) for part in ("-o", option))) as server:
        server.wait_ready()
        yield server


def events(found: httpx.Response) -> list[dict[str, Any]]:
    *lines, rest = found.text.split("\n\n")
    assert rest == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts(found: httpx.Response) -> list[str]:
    return [event["text_output"] for event in events(found)]


# -- the wire ----------------------------------------------------------------------------------------------------


def test_an_event_a_token_and_no_end_mark(slow_server: LiveServer) -> None:
    body = json.dumps({"id": "42", **ASK, "stream": True}).encode()
    head, _, rest = raw(slow_server, post_bytes(body, STREAM)).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"http/1.1 200 ok"
    assert {b"content-type: text/event-stream; charset=utf-8", b"transfer-encoding: chunked"} <= set(lines)
    wanted = [
        b'data: {"id":"42","model_name":"model","model_version":"1","text_output":" %s"}\n\n' % word
        for word in (b"a", b"b", b"a")
    ]
    assert dechunked(rest) == b"".join(wanted)


def test_a_whole_answer(slow_server: LiveServer) -> None:
    body = b'{"text_input":"a b","parameters":{"max_tokens":3}}'
    head, _, rest = raw(slow_server, post_bytes(body, GENERATE), until=b"}").partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower().split(b"\r\n")
    assert rest == b'{"model_name":"model","model_version":"1","text_output":"a b a b a"}'


@pytest.mark.parametrize("version", ["", "/versions/1"])
@pytest.mark.parametrize("headers", ["", "Content-Type: text/csv\r\n", "Content-Type: text/plain\r\n"])
def test_no_content_type_is_asked_for(slow_server: LiveServer, version: str, headers: str) -> None:
    path = f"/v2/models/model{version}/generate"
    assert b'"text_output":"a b a b a"' in raw(slow_server, post_bytes(ASK, path, headers), until=b"}")


def test_a_model_may_have_a_name_in_triton() -> None:
    with serve("--engine", "echo", "-o", "option.model_name=ensemble") as server:
        server.wait_ready()
        found = server.post(ASK, "/v2/models/ensemble/generate").json()
        assert found == {"model_name": "ensemble", "model_version": "1", "text_output": "a b a b a"}
        assert server.post(ASK).json()["model_name"] == "ensemble"
        assert server.post(ASK, GENERATE).status_code == 404


def test_unknown_names_are_reported_in_triton(slow_server: LiveServer) -> None:
    for path in (GENERATE, STREAM):
        found = slow_server.post({**ASK, "accumulate_tokens": True, "parameters": {"x": 1}}, path)
        assert found.status_code == 200
        assert found.headers["x-lmi-ignored-parameters"] == "accumulate_tokens, parameters.x"


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "failed to parse the request JSON buffer: the body is empty"),
        (b'{"text_input"', "failed to parse the request JSON buffer: "),
        (b'{"text_input":"a","text_input":"b"}', 'the key "text_input" appears twice'),
        (b"[]", "attempt to get members for non-object"),
        (b"{}", "but missing required input(s) ['text_input']"),
        (b'{"text_input":7}', "Unable to parse 'text_input'"),
        (b'{"text_input":"a","arr":[]}', "parameter 'arr' has invalid type"),
        (b'{"text_input":"  "}', "'text_input' has no tokens"),
        (b'{"text_input":"a","max_tokens":9999999}', "max_tokens=9999999: with 1 prompt token it must be at most"),
        (b"x" * 2001, "the body has 2001 bytes; at most 2000"),
    ],
)
def test_what_cannot_be_read_is_plain_json_on_both_routes(
    slow_server: LiveServer, path: str, body: bytes, says: str
) -> None:
    found = http.post(slow_server.url + path, content=body)
    assert (found.status_code, found.headers["content-type"]) == (400, "application/json")
    assert found.json().keys() == {"error"}
    assert says in found.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", GENERATE, 405, "Method Not Allowed"),
        ("PUT", STREAM, 405, "Method Not Allowed"),
        ("POST", "/v2/health/live", 405, "Method Not Allowed"),
        ("POST", "/v2/models/x/generate", 404, "Request for unknown model: 'x' is not found; served here: model"),
        ("POST", "/v2/models/model/versions/9/generate", 404, "unknown model: 'model' version 9 is not found"),
        ("POST", "/v2/models/model/versions/one/generate_stream", 404, "Not Found"),
        ("POST", "/v2/models/x/infer", 404, "Request for unknown model: 'x' is not found; served here: model"),
        ("GET", "/v2/models/model/infer", 405, "Method Not Allowed"),
        ("GET", "/v2/nowhere", 404, "/v2/nowhere is not served here; /docs lists the routes that are"),
    ],
)
def test_wrong_routes(slow_server: LiveServer, method: str, path: str, status: int, says: str) -> None:
    found = http.request(method, slow_server.url + path)
    assert (found.status_code, found.headers["content-type"]) == (status, "application/json")
    assert says in found.json()["error"]


def test_an_encoding_is_refused_in_tritons_form(slow_server: LiveServer) -> None:
    found = slow_server.post(ASK, GENERATE, headers={"content-encoding": "br"})
    assert (found.status_code, "'br'" in found.json()["error"]) == (400, True)


def test_a_stream_from_generate_is_told_under_200(slow_server: LiveServer) -> None:
    found = slow_server.post({**ASK, "stream": True}, GENERATE)
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    assert found.json()["error"].startswith("generate expects model to produce exactly 1 response")


def test_the_first_response_fails(slow_server: LiveServer) -> None:
    found = slow_server.post({"text_input": "<raise> a"}, GENERATE)
    assert (found.status_code, found.headers["content-type"]) == (400, "application/json")
    assert "raised on cue" in found.json()["error"]
    found = slow_server.post({"text_input": "<raise> a"}, STREAM)
    assert (found.status_code, found.headers["content-type"]) == (400, EVENTS)
    (event,) = events(found)
    assert event.keys() == {"error"}
    assert "raised on cue" in event["error"]


def test_a_later_response_fails(slow_server: LiveServer) -> None:
    found = slow_server.post({"text_input": "a b <raise>", "stream": True}, STREAM)
    assert (found.status_code, found.headers["content-type"]) == (200, EVENTS)
    *before, last = events(found)
    assert [event["text_output"] for event in before] == [" a", " b"]
    assert last.keys() == {"error"}
    assert "raised on cue" in last["error"]


# -- state -------------------------------------------------------------------------------------------------------


def test_health_and_metadata(echo_server: LiveServer) -> None:
    echo_server.wait_ready()
    url = echo_server.url
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/model/ready", "/v2/models/model/versions/1/ready"):
        found = http.get(url + path)
        assert (found.status_code, found.content) == (200, b"")
    server = http.get(url + "/v2").json()
    assert server["name"] == "lmi-handler"
    assert "generate" in server["extensions"]
    model = http.get(url + "/v2/models/model/versions/1").json()
    assert (model["name"], model["versions"], model["platform"]) == ("model", ["1"], "echo")
    assert model["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
    assert {"name": "text_output", "datatype": "BYTES", "shape": [-1, -1]} in model["outputs"]
    config = http.get(url + "/v2/models/model/config").json()
    required = [one["name"] for one in config["input"] if not one["optional"]]
    assert required == ["text_input"]
    assert config["input"][0]["data_type"] == "TYPE_STRING"
    index = http.post(url + "/v2/repository/index", json={}).json()
    assert index == [{"name": "model", "version": "1", "state": "READY"}]


@pytest.mark.parametrize("end", ["", "/ready", "/config", "/versions/2/ready"])
def test_another_model_is_not_found(echo_server: LiveServer, end: str) -> None:
    name = "model" if "versions" in end else "x"
    found = http.get(f"{echo_server.url}/v2/models/{name}{end}")
    assert (found.status_code, found.json()["error"].startswith("Request for unknown model")) == (404, True)


def test_a_server_that_is_not_ready_says_so_and_lives() -> None:
    with serve("--engine", "echo", *ISOLATED) as server:
        killed = server.engine_pid()
        os.kill(killed, signal.SIGKILL)
        wait_for(
            lambda: len(found := server.engine_pids()) == 1 and found != {killed}, 10, "no other engine is started"
        )
        (loading,) = server.engine_pids()
        os.kill(loading, signal.SIGSTOP)  # an echo engine is ready in half a second
        wait_for(lambda: http.get(server.url + "/v2/health/ready").status_code == 503, 10, "it is ready")
        assert http.get(server.url + "/v2/health/live").status_code == 200
        assert http.get(server.url + "/v2/models/model/ready").status_code == 503
        assert http.post(server.url + "/v2/repository/index").json()[0]["state"] == "UNAVAILABLE"
        os.kill(loading, signal.SIGCONT)
        server.wait_ready()
        assert http.get(server.url + "/v2/models/model/ready").status_code == 200


# -- the one door ------------------------------------------------------------------------------------------------

_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


def test_a_body_with_text_input_is_tritons(slow_server: LiveServer) -> None:
    found = slow_server.post(ASK)
    assert found.json() == {"model_name": "model", "model_version": "1", "text_output": "a b a b a"}
    for names in ({"stream": True}, {"streaming": True}, {"parameters": {"stream": True}}):
        found = slow_server.post({**ASK, **names})
        assert found.headers["content-type"] == EVENTS
        assert texts(found) == [" a", " b", " a"]
    found = slow_server.post({**ASK, "top_p": 2})
    assert (found.status_code, found.json().keys()) == (400, {"error"})


def test_inputs_come_first_at_the_one_door(slow_server: LiveServer) -> None:
    found = slow_server.post({"inputs": "a b", "parameters": {"max_new_tokens": 3}, "text_input": "x"})
    assert found.json() == {"generated_text": " a b a"}
    assert found.headers["x-lmi-ignored-parameters"] == "text_input"


def test_the_named_routes_dialect_says_what_is_wrong(slow_server: LiveServer) -> None:
    found = slow_server.post({}, headers={_ATTRIBUTES: f"route={GENERATE}"})
    assert (found.status_code, "['text_input']" in found.json()["error"]) == (400, True)
    found = slow_server.post(ASK, headers={_ATTRIBUTES: "route=/v2/models/x/generate"})
    assert (found.status_code, "'x' is not found" in found.json()["error"]) == (404, True)


def test_no_other_route_can_be_named(slow_server: LiveServer) -> None:
    """Who may only invoke must not reach more by it."""
    found = slow_server.post(ASK, headers={_ATTRIBUTES: "route=/adapters"})
    assert found.status_code == 424
    assert "is not a route for inference" in found.json()["error"]


def test_other_routes_do_not_look_at_the_attribute(slow_server: LiveServer) -> None:
    found = slow_server.post(ASK, GENERATE, headers={_ATTRIBUTES: "route=/nowhere"})
    assert found.status_code == 200
