"""The embedded server over real sockets, on the echo engine: routes, statuses, headers, framing, limits."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import httpx as batch_transform_http
import pytest

from tests.app.server import AppServer, serve
from tests.one_test import in_one_test
from tests.servers import PATIENCE, LiveServer, dechunked, http, post_bytes, raw, wait_for

CANCELLED = 'lmi_requests_total{outcome="cancelled"}'
ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


@pytest.fixture(scope="module")
def slow_server() -> Iterator[LiveServer]:
    """Two places, one in the queue, twenty tokens a second."""
    options = ("option.max_rolling_batch_size=2", "job_queue_size=1", "option.echo_tokens_per_second=20")
    with serve("--engine", "echo", *(part for option in options for part in ("-o", option))) as server:
        yield server


# -- routes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/invocations", "/predictions/model", "/predictions/model/1", "/models/model/invoke"])
def test_inference_routes(echo_server: LiveServer, path: str) -> None:
    found = echo_server.post(ASK, path)
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    assert found.json() == {"generated_text": " a b a"}


def test_ping_says_state(echo_server: LiveServer) -> None:
    found = http.get(echo_server.url + "/ping")
    assert (found.status_code, found.json()) == (200, {"status": "Healthy", "state": "ready"})


def test_models_are_listed_and_described(echo_server: LiveServer) -> None:
    listed = http.get(echo_server.url + "/models").json()
    assert [(model["modelName"], model["status"]) for model in listed["models"]] == [("model", "READY")]
    described = http.get(echo_server.url + "/models/model").json()
    model = described[0]["models"][0]
    assert (model["engine"], model["queueSize"], model["batchSize"]) == ("echo", 1000, 1)
    assert [worker["status"] for group in model["workerGroups"] for worker in group["workers"]] == ["READY"]


def test_a_model_may_have_a_name_in_http() -> None:
    with serve("--engine", "echo", "-o", "option.model_name=mine") as server:
        assert server.post(ASK, "/predictions/mine").status_code == 200
        assert server.post(ASK, "/predictions/model").status_code == 404


@in_one_test(
    ("method", "path", "status", "type"),
    [
        ("GET", "/nowhere", 404, "ResourceNotFoundException"),
        ("POST", "/invocations/x", 404, "ResourceNotFoundException"),
        ("GET", "/invocations", 405, "MethodNotAllowedException"),
        ("PUT", "/predictions/model", 405, "MethodNotAllowedException"),
        ("POST", "/ping", 405, "MethodNotAllowedException"),
        ("DELETE", "/models/model", 405, "MethodNotAllowedException"),
        ("POST", "/predictions/other", 404, "ModelNotFoundException"),
        ("POST", "/predictions/model/7", 404, "ModelNotFoundException"),
        ("GET", "/models/other", 404, "ModelNotFoundException"),
    ],
)
def test_what_djl_says_to_a_wrong_route(
    echo_server: LiveServer, method: str, path: str, status: int, type: str
) -> None:
    found = http.request(method, echo_server.url + path)
    assert (found.status_code, found.headers["content-type"]) == (status, "application/json")
    assert (found.json()["code"], found.json()["type"]) == (status, type)
    assert found.json()["message"]


def test_options_and_head(echo_server: LiveServer) -> None:
    assert http.options(echo_server.url + "/invocations").json() == {}
    assert http.head(echo_server.url + "/ping").status_code == 200


# -- bodies ------------------------------------------------------------------------------------------------------


@in_one_test(
    "content_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        "",
        "application/x-www-form-urlencoded",
        "application/vnd.x+json",
        "application/jsonlines",
        "application/x-jsonlines",
        "application/jsonl",
        "application/x-ndjson",
        "application/ndjson",
    ],
)
def test_json_under_every_name_that_people_send_it(echo_server: LiveServer, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    found = http.post(echo_server.url + "/invocations", content=json.dumps(ASK) + "\n", headers=headers)
    assert found.json() == {"generated_text": " a b a"}


LINES = b'{"inputs":"a"}\n\n{"inputs":"b"}\n'


@in_one_test(
    "path",
    ["/invocations", "/generate", "/v1/chat/completions", "/v1/messages", "/v2/models/model/generate", "/tokenize"],
)
def test_several_lines_are_refused_by_name(echo_server: LiveServer, path: str) -> None:
    found = http.post(echo_server.url + path, content=LINES, headers={"content-type": "application/x-ndjson"})
    assert 400 <= found.status_code < 500
    assert "application/x-ndjson: a request must be one line of JSON, but this body has 2 lines" in found.text
    assert "BatchStrategy=SingleRecord" in found.text


def test_several_lines_are_no_json_under_its_own_type(echo_server: LiveServer) -> None:
    found = http.post(echo_server.url + "/invocations", content=LINES, headers={"content-type": "application/json"})
    assert "not valid JSON: Extra data at line 3" in found.text


def test_a_large_body_of_several_lines_is_refused_by_name(echo_server: LiveServer) -> None:
    line = json.dumps({"inputs": "a" * (1 << 20)}).encode()
    headers = {"content-type": "application/jsonlines"}
    found = http.post(echo_server.url + "/invocations", content=line + b"\n" + line, headers=headers)
    assert "one line of JSON, but this body has 2 lines" in found.text


def test_batch_transform_is_told_how_to_call(echo_server: LiveServer) -> None:
    found = http.get(echo_server.url + "/execution-parameters").json()
    assert found == {"MaxConcurrentTransforms": 32, "BatchStrategy": "SINGLE_RECORD", "MaxPayloadInMB": 3}


def test_plain_text_is_the_prompt(echo_server: LiveServer) -> None:
    found = http.post(echo_server.url + "/invocations", content="a b", headers={"content-type": "text/plain"})
    assert found.json()["generated_text"].startswith(" a b a b")


@pytest.mark.parametrize("headers", [{"content-type": "text/csv"}, {"content-encoding": "br"}])
def test_other_types_are_415(echo_server: LiveServer, headers: dict[str, str]) -> None:
    found = http.post(echo_server.url + "/invocations", content=b"x", headers=headers)
    assert (found.status_code, found.json()["code"]) == (415, 415)
    assert next(iter(headers.values())) in found.json()["message"]


def test_a_large_body_is_read(echo_server: LiveServer) -> None:
    found = echo_server.post({"inputs": "word " * 50_000, "parameters": {"max_new_tokens": 2, "truncate": 10}})
    assert found.json() == {"generated_text": " word word"}


def test_a_prompt_that_cannot_fit_is_refused_with_figures() -> None:
    with serve("--engine", "echo", "-o", "option.max_model_len=10") as server:
        long = server.post({"inputs": "a " * 12})
        assert (long.status_code, "12 tokens; the model accepts at most 9" in long.json()["error"]) == (424, True)
        greedy = server.post({"inputs": "a a a", "parameters": {"max_new_tokens": 8}})
        assert "must be at most 7" in greedy.json()["error"]
        assert {key: value for key, value in long.json().items() if key != "error"} == {
            "generated_text": "", "code": 424,
            "details": {"finish_reason": "error", "generated_tokens": None, "inputs": None, "tokens": None},
        } == {key: value for key, value in greedy.json().items() if key != "error"}  # fmt: skip
        assert server.post({"inputs": "a a a", "parameters": {"max_new_tokens": 7}}).status_code == 200
        assert server.post({"inputs": "a " * 12, "parameters": {"truncate": 3, "max_new_tokens": 7}}).status_code == 200


def test_a_prompt_without_tokens_is_refused(echo_server: LiveServer) -> None:
    assert "no tokens" in echo_server.post({"inputs": "   "}).json()["error"]


def test_stop_token_ids_outside_the_vocabulary_are_refused(echo_server: LiveServer) -> None:
    found = echo_server.post({"inputs": "a", "parameters": {"stop_token_ids": [999]}})
    assert (found.status_code, "stop_token_ids: 999" in found.json()["error"]) == (424, True)


def test_an_offer_of_http_2_is_passed_over(echo_server: LiveServer) -> None:
    """As Java's HttpClient makes it with its first request."""
    settings = "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"
    headers = f"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: {settings}\r\nUpgrade: h2c\r\n"
    assert b'{"generated_text":" a b a"}' in raw(echo_server, post_bytes(ASK, headers=headers), until=b"a b a")


def test_a_length_beyond_all_numbers_is_too_large(echo_server: LiveServer) -> None:
    for length, status in (("9" * 5000, b"413"), ("0" * 5000 + "9" * 30, b"413")):
        head = f"POST /invocations HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        assert raw(echo_server, head.encode(), until=b"}")[9:12] in (status, b"400"), length


def test_endless_headers_are_431(echo_server: LiveServer) -> None:
    found = raw(echo_server, b"GET /ping HTTP/1.1\r\nx: " + b"a" * 300_000, until=b"}")
    assert found.startswith(b"HTTP/1.1 431")
    assert echo_server.ping() == 200


def test_a_stream_for_http_1_0_has_neither_chunks_nor_a_length(echo_server: LiveServer) -> None:
    request = post_bytes({**ASK, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, body = raw(echo_server, request, until=b"never").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert len(body.splitlines()) == 3


def test_a_connection_that_breaks_with_more_requests_in_it_leaves_nothing(slow_server: LiveServer) -> None:
    """uvicorn does not read on while a pipelined request waits, so it cannot see the end coming."""
    before = slow_server.metric(CANCELLED)
    body = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": 100_000}}
    with socket.create_connection(("127.0.0.1", slow_server.port), timeout=10) as connection:
        connection.sendall(post_bytes(body))
        connection.recv(4096)
        connection.sendall(post_bytes(ASK))
    wait_for(lambda: slow_server.metric(CANCELLED) == before + 1, 10, "the stream was not cancelled")
    assert "a bug" not in slow_server.log


# -- headers -----------------------------------------------------------------------------------------------------


def test_the_clients_request_id_comes_back(echo_server: LiveServer) -> None:
    assert echo_server.post(ASK, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert echo_server.post(ASK, headers={"x-amzn-sagemaker-inference-id": "sm"}).headers["x-request-id"] == "sm"
    assert re.fullmatch(r"[0-9a-f-]{36}", echo_server.post(ASK).headers["x-request-id"])
    assert http.get(echo_server.url + "/nowhere", headers={"x-request-id": "n"}).headers["x-request-id"] == "n"


def test_each_request_with_the_same_head_has_an_id_of_its_own(echo_server: LiveServer) -> None:
    with httpx.Client(timeout=10) as client:
        url = echo_server.url + "/invocations"
        ids = {client.post(url, json=ASK).headers["x-request-id"] for _ in range(4)}
        assert len(ids) == 4
        sent = {client.post(url, json=ASK, headers={"x-request-id": "mine"}).headers["x-request-id"] for _ in range(4)}
        assert sent == {"mine"}
        assert client.post(url, json=ASK).headers["x-request-id"] not in {*ids, *sent}


def test_a_harmful_request_id_is_replaced(echo_server: LiveServer) -> None:
    found = echo_server.post(ASK, headers={"x-request-id": "a b" * 100}).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f-]{36}", found)


@pytest.mark.parametrize(("name", "status"), [("Session-Id", 400), ("Adapter-Identifier", 424), ("Target-Model", 424)])
def test_sagemaker_headers_that_ask_for_what_is_not_there_are_refused(
    echo_server: LiveServer, name: str, status: int
) -> None:
    found = echo_server.post(ASK, headers={f"X-Amzn-SageMaker-{name}": "x"})
    assert found.status_code == status
    assert name.lower() in found.json()["error"].lower()


def test_other_sagemaker_headers_are_let_pass(echo_server: LiveServer) -> None:
    headers = {
        "X-Amzn-SageMaker-Custom-Attributes": "k=v",
        "X-Amzn-SageMaker-Accept": "*/*",
        "X-Amzn-SageMaker-New": "1",
    }
    assert echo_server.post(ASK, headers=headers).status_code == 200


def test_ignored_names_are_said_in_a_header_that_no_name_can_break(echo_server: LiveServer) -> None:
    found = echo_server.post({**ASK, "parameters": {"temprature[]": 1, "ä\r\nx: y": 2}, "model": "m"})
    said = "model, parameters.temprature[], parameters.%C3%A4%0D%0Ax%3A%20y"
    assert found.headers["x-lmi-ignored-parameters"] == said
    assert "x" not in found.headers


def test_ignored_names_are_said_on_streams_too(echo_server: LiveServer) -> None:
    assert echo_server.post({**ASK, "stream": True, "x": 1}).headers["x-lmi-ignored-parameters"] == "x"


def test_sampling_parameters_without_effect_are_listed_and_logged_once() -> None:
    body = {**ASK, "parameters": {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 1}}
    with serve("--engine", "echo") as server:
        for more in ({}, {"stream": True}, {}):
            found = server.post({**body, **more})
            assert found.headers["x-lmi-ignored-parameters"] == "parameters.temperature, parameters.top_p"
        assert server.log.count("set option.lmi_version=0.32 or later to sample") == 1
    with serve("--engine", "echo", "-o", "option.lmi_version=0.32") as server:
        assert "x-lmi-ignored-parameters" not in server.post(body).headers
        assert "option.lmi_version" not in server.log


# -- streams -----------------------------------------------------------------------------------------------------


def test_jsonlines_frames_one_token_a_line(slow_server: LiveServer) -> None:
    body = {"inputs": "a b", "stream": True, "parameters": {"max_new_tokens": 2}}
    found = raw(slow_server, post_bytes(body))
    head, _, rest = found.partition(b"\r\n\r\n")
    assert b"HTTP/1.1 200 OK" in head
    assert b"content-type: application/jsonlines" in head
    assert b"transfer-encoding: chunked" in head
    first = b'{"token":{"id":4,"text":" a","log_prob":0.0}}\n'
    last = b'{"token":{"id":5,"text":" b","log_prob":0.0},"generated_text":" a b"}\n'
    assert dechunked(rest) == first + last


def test_sse_frames(echo_server: LiveServer) -> None:
    body = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": 1, "output_formatter": "sse"}}
    found = echo_server.post(body)
    assert found.headers["content-type"] == "text/event-stream"
    assert found.text == 'data: {"token":{"id":4,"text":" a","log_prob":0.0},"generated_text":" a"}\n\n'


def test_tokens_come_one_by_one_as_they_are_made(slow_server: LiveServer) -> None:
    body = {"inputs": "a", "stream": True, "parameters": {"max_new_tokens": 6}}
    times = []
    with http.stream("POST", slow_server.url + "/invocations", json=body) as found:
        for _ in found.iter_lines():
            times.append(time.monotonic())
    assert len(times) == 6
    assert times[-1] - times[0] > 0.15  # 5 gaps of 50 ms; a buffered stream would come at once


def test_connections_are_kept_alive_after_a_stream(echo_server: LiveServer) -> None:
    with httpx.Client() as client:
        for _ in range(3):
            assert client.post(echo_server.url + "/invocations", json={**ASK, "stream": True}).status_code == 200
    two = post_bytes(ASK, headers="Connection: keep-alive\r\n") + post_bytes(ASK, headers="Connection: close\r\n")
    assert raw(echo_server, two, until=b"never").count(b'{"generated_text":" a b a"}') == 2


@in_one_test(
    "wrong",
    [{"top_p": 7}, {"max_new_tokens": 1 << 21}, {"n": 2}, {"output_formatter": "json_chat"}, {"stop_token_ids": [999]}],
)
@in_one_test("formatter", ["jsonlines", "sse"])
def test_a_refused_stream_is_framed_and_has_its_real_status(
    echo_server: LiveServer, wrong: dict[str, Any], formatter: str
) -> None:
    parameters = {"output_formatter": formatter, **wrong}
    found = echo_server.post({"inputs": "a", "stream": True, "parameters": parameters})
    events = parameters["output_formatter"] == "sse"
    kind, before, after = ("text/event-stream", "data: ", "\n\n") if events else ("application/jsonlines", "", "\n")
    assert (found.status_code, found.headers["content-type"]) == (424, kind)
    assert found.text.startswith(before)
    assert found.text.endswith(after)
    line = json.loads(found.text.removeprefix(before))
    assert line.pop("error").startswith(tuple(f"parameters.{name}" for name in wrong))
    assert line == {
        "token": {"id": -1, "text": "", "log_prob": -1, "special_token": True},
        "generated_text": "",
        "details": {"finish_reason": "error", "generated_tokens": None, "inputs": None},
        "code": 424,
    }


def test_a_client_that_reads_late_gets_every_token(echo_server: LiveServer) -> None:
    """More than the sockets hold: the server has to wait for this client, and for it alone."""
    count = 80_000
    body = {"inputs": "a b c", "stream": True, "parameters": {"max_new_tokens": count}}
    with socket.create_connection(("127.0.0.1", echo_server.port), timeout=30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(post_bytes(body, headers="Connection: close\r\n"))
        time.sleep(0.5)
        assert echo_server.post(ASK).json() == {"generated_text": " a b a"}  # a neighbour is not held up
        parts = []
        while data := connection.recv(1 << 16):
            parts.append(data)
    whole = b"".join(parts)
    assert whole.count(b'"token"') == count
    assert whole.endswith(b"\r\n0\r\n\r\n")


def test_a_client_that_stops_reading_is_dropped_after_a_while() -> None:
    """Its stream would otherwise be kept in memory, and the engine busy with it, for as long as it likes."""
    tokens = 10_000_000  # more than a fast machine sends before the client is dropped
    with serve(
        "--engine", "echo", "-o", "option.client_timeout=1", "-o", f"option.max_model_len={tokens + 9}"
    ) as server:
        body = {"inputs": "a b c", "stream": True, "parameters": {"max_new_tokens": tokens}}
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.sendall(post_bytes(body))
            wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
            wait_for(lambda: server.metric(CANCELLED) == 1, 20, "it was not dropped")
        assert server.post(ASK).status_code == 200


# -- limits ------------------------------------------------------------------------------------------------------


def test_a_thousand_clients_at_once(echo_server: LiveServer) -> None:
    """The backlog takes them all."""
    connections = []
    for _ in range(1024):
        connection = socket.create_connection(("127.0.0.1", echo_server.port), timeout=PATIENCE)
        connection.sendall(post_bytes(ASK, headers="Connection: close\r\n"))
        connections.append(connection)
    answers = []
    for connection in connections:
        with connection:
            parts = []
            while data := connection.recv(65536):
                parts.append(data)
            answers.append(b"".join(parts))
    statuses = [answer[9:12] for answer in answers]
    assert set(statuses) <= {b"200", b"503"}  # 1,000 wait and 32 run: more is refused, not lost
    assert statuses.count(b"200") >= 1000


def test_metrics_count(echo_server: LiveServer) -> None:
    before = {
        name: echo_server.metric(name)
        for name in ('lmi_requests_total{outcome="ok"}', "lmi_generated_tokens_total", "lmi_prompt_tokens_total")
    }
    refused = echo_server.metric('lmi_requests_total{outcome="refused"}')
    echo_server.post(ASK)
    echo_server.post({})
    after = {name: echo_server.metric(name) - value for name, value in before.items()}
    assert list(after.values()) == [1, 3, 2]
    assert echo_server.metric('lmi_requests_total{outcome="refused"}') == refused + 1
    assert echo_server.metric("lmi_time_to_first_token_seconds_count") > 0
    assert echo_server.metric("lmi_time_per_output_token_seconds_count") > 0


def test_the_log_has_the_request_id_and_no_prompt(echo_server: LiveServer) -> None:
    before = len(echo_server.lines)  # other tests of the process write there too
    echo_server.post({"inputs": "secret words", "parameters": {"max_new_tokens": 2}}, headers={"x-request-id": "log-1"})
    wait_for(lambda: "id=log-1 outcome=ok prompt_tokens=2 tokens=2" in echo_server.log, 5, "no log line")
    echo_server.post({"inputs": "a", "parameters": {"top_p": "secret"}}, headers={"x-request-id": "log-2"})
    line = re.compile(r"id=log-2 outcome=refused .* error='parameters.top_p was refused'")
    wait_for(lambda: line.search(echo_server.log), 5, "no log line")
    assert "secret" not in "".join(echo_server.lines[before:])


@in_one_test(
    ("method", "path", "body"),
    [
        ("POST", "/predictions/other", {"inputs": "a"}),
        ("POST", "/models/other/invoke", {"inputs": "a"}),
        ("GET", "/models/other", None),
        ("GET", "/models/other/adapters", None),
        ("GET", "/v2/models/other", None),
        ("GET", "/v2/models/other/ready", None),
        ("POST", "/v2/models/other/generate", {"text_input": "a"}),
        ("POST", "/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "a"}]}),
        ("POST", "/v1/completions", {"model": "other", "prompt": "a"}),
        ("POST", "/v1/responses", {"model": "other", "input": "a"}),
        ("POST", "/v1/messages", {"model": "other", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
        ("POST", "/tokenize", {"model": "other", "prompt": "a"}),
        ("GET", "/v1/models/other", None),
    ],
)
def test_the_message_for_an_unknown_model_names_those_that_are_served(
    echo_server: LiveServer, method: str, path: str, body: Any
) -> None:
    found = http.request(method, echo_server.url + path, json=body)
    assert found.status_code == 404
    assert re.search(
        r"other.* not found.*; served here: model|(?:not found|model): other; served here: model", found.text
    ), found


@pytest.mark.parametrize("path", ["/models/{}", "/models/{}/invoke", "/v2/models/{}", "/v1/models/{}"])
def test_the_message_for_an_unknown_model_has_the_beginning_of_a_long_name(echo_server: LiveServer, path: str) -> None:
    found = http.request("POST" if "invoke" in path else "GET", echo_server.url + path.format("m" * 7_000))
    assert found.status_code == 404
    assert "m" * 200 in found.text
    assert len(found.content) < 1000


def test_prompts_are_logged_when_asked() -> None:
    with serve("--engine", "echo", "-o", "option.log_prompts=true") as server:
        for body in ({"inputs": "secret words"}, {"messages": [{"role": "user", "content": "secret chat"}]}):
            server.post(body)
        wait_for(lambda: "secret words" in server.log and "'content': 'secret chat'" in server.log, 5, "no prompts")


# -- SageMaker's batch transform: a line a request, and a line an answer, also of what is refused ----------------------


ECHO = ("--engine", "echo", "-o", "option.echo_cues=true", "-o", "option.max_model_len=40")
TYPE = {"content-type": "application/jsonlines"}
GOOD = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    """As SageMaker starts it for a job."""
    with serve(*ECHO, env={"SAGEMAKER_BATCH": "true"}) as made:
        yield made


@pytest.fixture(scope="module")
def usual() -> Iterator[AppServer]:
    with serve(*ECHO) as made:
        yield made


def ask(server: AppServer, body: Any, **headers: str) -> batch_transform_http.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode() + b"\n"
    return batch_transform_http.post(server.url + "/invocations", content=content, headers={**TYPE, **headers})


def test_an_answer_is_the_usual_one(server: AppServer, usual: AppServer) -> None:
    chat = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 3}
    for body in (GOOD, chat):
        found, wanted = ask(server, body), ask(usual, body)
        assert found.status_code == 200
        assert found.headers["content-type"] == wanted.headers["content-type"]
        assert [*found.json()] == [*wanted.json()]
        assert b"\n" not in found.content


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": ""},
        {"inputs": "a", "parameters": {"top_p": 2}},
        {"inputs": "a " * 50},
        {"inputs": "a", "adapters": ["nobody"]},
        {"messages": []},
        b"not JSON\n",
        b"\n",
        b'{"inputs": "a"}\n{"inputs": "b"}\n',
        b"\xff\n",
    ],
    ids=str,
)
def test_a_refusal_is_an_answer_too(server: AppServer, usual: AppServer, body: Any) -> None:
    found, wanted = ask(server, body), ask(usual, body)
    assert wanted.status_code >= 400
    assert found.status_code == 200
    assert found.json() == wanted.json()
    assert b"\n" not in found.content


def test_a_content_type_that_nobody_reads_is_an_answer_too(server: AppServer) -> None:
    found = ask(server, b"a,b\n", **{"content-type": "text/csv"})
    assert found.status_code == 200
    assert "text/csv" in found.text


@pytest.mark.parametrize("more", [{"stream": True}, {"parameters": {"output_formatter": "jsonlines"}}])
def test_a_stream_is_refused_by_name(server: AppServer, more: dict[str, Any]) -> None:
    found = ask(server, {**GOOD, **more})
    assert found.status_code == 200
    assert "'stream': batch transform expects one line per response" in found.text
    assert len(found.content.splitlines()) == 1


def test_what_may_succeed_another_time_keeps_its_status(server: AppServer) -> None:
    """So SageMaker sends it again. The next line is answered."""
    assert ask(server, {**GOOD, "inputs": "<raise>"}).status_code == 424
    assert ask(server, GOOD).json() == {"generated_text": " a b a"}


def test_in_asynchronous_modes_schema_an_answer_is_one_line_too() -> None:
    mode = ("-o", "option.lmi_version=0.36", "-o", "option.async_mode=true")
    with serve("--engine", "echo", *mode, env={"SAGEMAKER_BATCH": "true"}) as server:
        good, bad = ask(server, GOOD), ask(server, {"inputs": "a", "parameters": {"top_p": 2}})
    assert (good.status_code, bad.status_code) == (200, 200)
    assert "error" in bad.json()
    assert all(b"\n" not in one.content and one.json() for one in (good, bad))


def test_other_routes_are_as_ever(server: AppServer) -> None:
    found = batch_transform_http.post(server.url + "/v1/chat/completions", json={"messages": []})
    assert found.status_code == 400
