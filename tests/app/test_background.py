"""Background responses over HTTP: polling, events that can be read again, cancellation, owners, limits and restarts."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import random
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.http import background_responses
from handler.protocols.kernel.stored import Detached
from handler.serving import admission
from handler.serving.background.runs import BackgroundRun
from handler.serving.background.tables import BackgroundTables, NewEvents
from handler.serving.quota import Quota
from tests.app import test_batches as batches
from tests.app.server import BY_KEY, serve
from tests.app.sockets.client import open_socket, receive, send
from tests.servers import PATIENCE, LiveServer, http, wait_for
from tests.servers import serve as serve_process

PATH = "/v1/responses"
ANN, BOB = {"authorization": "Bearer ann"}, {"x-api-key": "bob"}
ENDED = ("completed", "incomplete", "failed", "cancelled")
SLOW = ("-o", "option.echo_tokens_per_second=50")
MEMORY = ("--engine", "echo", *BY_KEY, "-o", "option.responses_store=memory")
LONG = {"input": "a b c d", "max_output_tokens": 4000, "background": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """It writes 50 tokens per second."""
    with serve(*MEMORY, *SLOW) as server:
        yield server


def create(server: LiveServer, headers: dict[str, str] = ANN, **body: Any) -> Any:
    found = server.post({"input": "one two", "max_output_tokens": 8, "background": True, **body}, PATH, headers=headers)
    assert found.status_code == 200, found.text
    return found.json()


def call(server: LiveServer, method: str, path: str, headers: dict[str, str] = ANN, **body: Any) -> httpx.Response:
    return http.request(method, f"{server.url}{PATH}/{path}", headers=headers, timeout=30, **body)


def poll(server: LiveServer, id: str, headers: dict[str, str] = ANN) -> Any:
    """The response when it has ended."""
    found: list[Any] = []

    def ended() -> bool:
        found.append(call(server, "GET", id, headers).json())
        return found[-1]["status"] in ENDED

    wait_for(ended, 30, "the response does not end")
    return found[-1]


def events_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["sequence_number"] for event in events]


class Stream:
    """A stream whose events are read one after another."""

    def __init__(self, server: LiveServer, method: str, path: str = "", **request: Any) -> None:
        request = {"headers": ANN, "timeout": 30, **request}
        self._sent = http.stream(method, server.url + PATH + path, **request)
        self._lines: Iterator[str] = iter(())

    def __enter__(self) -> Stream:
        self._lines = self._sent.__enter__().iter_lines()
        return self

    def __exit__(self, *error: Any) -> None:
        self._sent.__exit__(*error)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def begin(server: LiveServer, **body: Any) -> str:
    """The id of a streamed response in progress whose client has gone after its first delta."""
    with Stream(server, "POST", json={**LONG, "stream": True, **body}) as stream:
        events = iter(stream)
        head = next(events)["response"]
        next(event for event in events if event["type"] == "response.output_text.delta")
    id: str = head["id"]
    return id


def test_a_response_is_queued_and_polled_to_its_end(server: LiveServer) -> None:
    made = create(server)
    assert (made["status"], made["background"], made["output"], made["usage"]) == ("queued", True, [], None)
    ended = poll(server, made["id"])
    assert ended["status"] == "incomplete"
    assert {**ended, **{name: made[name] for name in ("status", "output", "usage", "incomplete_details")}} == made
    plain = server.post({"input": "one two", "max_output_tokens": 8}, PATH, headers=ANN).json()
    assert ended["output"][0]["content"] == plain["output"][0]["content"]
    assert ended["usage"] == plain["usage"]
    items = call(server, "GET", f"{made['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["one two"]
    more = server.post(
        {"input": "three", "previous_response_id": made["id"], "max_output_tokens": 32}, PATH, headers=ANN
    )
    assert "one two" in more.json()["output"][0]["content"][0]["text"]


def test_events_are_those_of_every_stream_and_can_be_read_again(server: LiveServer) -> None:
    body = {"input": "one two", "max_output_tokens": 8, "stream": True}
    plain = events_in(server.post(body, PATH, headers=ANN).text)
    streamed = server.post({**body, "background": True}, PATH, headers=ANN).text
    events = events_in(streamed)
    assert [event["type"] for event in events[:3]] == [f"response.{x}" for x in ("created", "queued", "in_progress")]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert [event["type"] for event in events[2:]] == [event["type"] for event in plain[1:]]
    assert numbers(events) == list(range(len(events)))
    id = events[0]["response"]["id"]
    assert events[-1]["response"] == call(server, "GET", id).json()
    for after in range(-1, len(events) + 2):
        query = "stream=true" if after < 0 else f"starting_after={after}&stream=true"
        rest = "".join(f"{event}\n\n" for event in streamed.split("\n\n")[after + 1 : -1])
        query += "&include%5B%5D=reasoning.encrypted_content&include_obfuscation=false"
        again = call(server, "GET", f"{id}?{query}")
        assert again.headers["content-type"].startswith("text/event-stream")
        assert again.text == rest
        number = {} if after < 0 else {"starting_after": after}
        for path, asked in ((f"{id}?{query.partition('&')[0]}", {"stream": True}), (id, {"stream": True, **number})):
            assert call(server, "GET", path, json=asked).text == rest, "openai-go sends `stream` as the body"


BODIES = (b"", b"{}", b"null", b"[1]", b"a=b", b"{", b'{"stream":false}', b'{"stream":null}', b"x" * 100_000)


def test_bodies_where_none_is_expected_change_nothing(server: LiveServer) -> None:
    """Some clients send one with each request. Only what asks for a stream has a meaning."""
    id = create(server, max_output_tokens=1)["id"]
    poll(server, id)
    for path in (id, f"{id}?stream=false", f"{id}/input_items"):
        plain = call(server, "GET", path)
        assert plain.status_code == 200
        for body in BODIES:
            assert call(server, "GET", path, content=body).json() == plain.json(), body
    for body in BODIES:
        made = server.post({"input": "a", "max_output_tokens": 1}, PATH, headers=ANN).json()["id"]
        assert call(server, "DELETE", made, content=body).json()["deleted"] is True, body
    assert call(server, "GET", id, json={"stream": "perhaps"}).status_code == 400
    assert call(server, "GET", f"{id}?stream=false", json={"stream": True}).json()["id"] == id, "the query goes first"


def test_a_response_outlives_its_client_and_has_several_readers(server: LiveServer) -> None:
    id = begin(server, max_output_tokens=60)
    with ThreadPoolExecutor(4) as threads:
        path = f"/{id}?stream=true"
        read = [threads.submit(server_events, server, path) for _ in range(2)]
        late = threads.submit(server_events, server, f"{path}&starting_after=5")
        events = read[0].result(30)
        assert read[1].result(30) == events
        assert late.result(30) == events[6:]
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["response"] == poll(server, id)


def server_events(server: LiveServer, path: str) -> list[dict[str, Any]]:
    with Stream(server, "GET", path) as stream:
        return list(stream)


def test_cancel_frees_the_engine_ends_readers_and_can_be_repeated(server: LiveServer) -> None:
    id = begin(server)
    with Stream(server, "GET", f"/{id}?stream=true") as stream:
        reader = iter(stream)
        next(reader)
        assert call(server, "POST", f"{id}/cancel", BOB).status_code == 404
        cancelled = call(server, "POST", f"{id}/cancel").json()
        assert (cancelled["status"], cancelled["error"], cancelled["background"]) == ("cancelled", None, True)
        rest = list(reader)
        assert all(event["type"] not in ("response.completed", "response.failed") for event in rest)
    wait_for(lambda: server.metric("lmi_active_sequences") == 0, 5, "the engine still runs it")
    assert call(server, "POST", f"{id}/cancel").json() == cancelled == call(server, "GET", id).json()
    assert numbers(events_in(call(server, "GET", f"{id}?stream=true").text)) == list(range(len(rest) + 1))
    gone_on = server.post({"input": "b", "previous_response_id": id}, PATH, headers=ANN)
    assert gone_on.status_code == 400
    ended = poll(server, create(server)["id"])
    assert call(server, "POST", f"{ended['id']}/cancel").json() == ended, "a response that has ended stays"


def test_a_running_response_can_be_deleted(server: LiveServer) -> None:
    id = begin(server)
    with Stream(server, "GET", f"/{id}?stream=true") as stream:
        reader = iter(stream)
        next(reader)
        assert call(server, "DELETE", id, BOB).status_code == 404
        assert call(server, "DELETE", id).json() == {"id": id, "object": "response", "deleted": True}
        list(reader)  # it ends
    for method, path in (("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("POST", "/cancel")):
        found = call(server, method, id + path)
        assert (found.status_code, found.json()["error"]["message"]) == (404, f"Response with id '{id}' not found.")


def test_other_owners_see_nothing(server: LiveServer) -> None:
    id = begin(server, max_output_tokens=200)
    for method, path in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("GET", "/input_items")):
        assert call(server, method, id + path, BOB).status_code == 404, path
        assert call(server, method, id + path, {}).status_code == 404, path
    going_on = {"input": "b", "previous_response_id": id}
    assert server.post(going_on, PATH, headers=BOB).status_code == 404
    assert "still in progress" in server.post(going_on, PATH, headers=ANN).json()["error"]["message"]
    assert call(server, "POST", f"{id}/cancel").json()["status"] == "cancelled"


def test_a_response_that_is_not_to_be_stored_can_be_polled(server: LiveServer) -> None:
    made = create(server, store=False, stream=False)
    assert made["store"] is False
    assert poll(server, made["id"])["status"] == "incomplete"
    going_on = {"input": "b", "previous_response_id": made["id"]}
    assert server.post(going_on, PATH, headers=ANN).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "?stream=true", 400, "created with background=true and stream=true"),
        ("GET", "?starting_after=3", 400, 'starting_after="3": needs stream=true'),
        ("GET", "?stream=perhaps", 400, 'stream="perhaps": must be true or false'),
        ("GET", "?stream=true&starting_after=-1", 400, "must be the sequence number of an event"),
        ("GET", f"?stream=true&starting_after={'9' * 5000}", 400, "must be the sequence number of an event"),
        ("POST", "/cancel", 400, "created with background=true can be cancelled"),
    ],
)
def test_calls_for_other_responses(server: LiveServer, method: str, path: str, status: int, words: str) -> None:
    plain = server.post({"input": "a", "max_output_tokens": 2}, PATH, headers=ANN).json()["id"]
    found = call(server, method, plain + path)
    assert (found.status_code, words in found.json()["error"]["message"]) == (status, True), found.text
    if "starting_after=3" not in path and "cancel" not in path and "perhaps" not in path:
        made = create(server)["id"]
        poll(server, made)
        assert call(server, method, made + path).status_code == 400, "it was not created with stream"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"background": "perhaps"}, 'background="perhaps"'),
        ({"background_options": {"completion_window": "2h"}}, "'completion_window' must be soonest"),
        ({"background_options": 7}, "background_options=7: must be an object"),
    ],
)
def test_wrong_fields(server: LiveServer, body: dict[str, Any], words: str) -> None:
    found = server.post({"input": "a", "background": True, **body}, PATH, headers=ANN)
    assert (found.status_code, words in found.json()["error"]["message"]) == (400, True), found.text
    create(server, background_options={"completion_window": "soonest", "continuation_id": "x"}, max_output_tokens=1)


def test_where_nobody_can_poll_it_is_refused(server: LiveServer) -> None:
    headers = {**ANN, "x-amzn-sagemaker-custom-attributes": "route=/v1/responses"}
    body = {"input": "a", "background": True}
    found = server.post(body, "/invocations", headers=headers)
    assert found.status_code == 400
    assert "use SageMaker's asynchronous inference" in found.json()["error"]["message"]
    found = server.post(body, f"{PATH}/compact", headers=ANN)
    assert "background: is not supported" in found.json()["error"]["message"]
    assert server.post(body, f"{PATH}/input_tokens", headers=ANN).status_code == 200


def test_a_websocket_and_a_line_of_a_batch_refuse_it(server: LiveServer, tmp_path: Path) -> None:
    with open_socket(server, PATH, additional_headers=ANN) as client:
        send(client, {"type": "response.create", "input": "a", "background": True})
        refused = receive(client)
        assert (refused["type"], refused["status"]) == ("error", 400)
        assert "background" in refused["error"]["message"]
        send(client, {"type": "response.create", "input": "a", "background": False, "max_output_tokens": 1})
        assert receive(client)["type"] == "response.created"
    with serve(*MEMORY, "-o", f"option.batches_store={tmp_path}") as other:
        line = {"custom_id": "a", "method": "POST", "url": PATH, "body": {"input": "a", "background": True}}
        batch = batches.ended(other, batches.begin(other, [line], endpoint=PATH)["id"])
        found = batches.lines_of(other, batch["error_file_id"])["a"]["response"]
        assert (found["status_code"], "background" in found["body"]["error"]["message"]) == (400, True)


def test_a_server_without_a_store_refuses() -> None:
    with serve("--engine", "echo", *BY_KEY) as server:
        found = server.post({"input": "a", "background": True}, PATH)
        assert (found.status_code, "option.responses_store" in found.text) == (400, True)
        assert server.post({"input": "a", "background": False, "max_output_tokens": 1}, PATH).status_code == 200
        assert call(server, "POST", "resp_0/cancel").status_code == 404
        assert call(server, "GET", "resp_0?stream=true").status_code == 404


def test_limits() -> None:
    limits = ("background_max=2", "background_max_bytes=65536", "echo_tokens_per_second=400")
    options = [part for limit in limits for part in ("-o", f"option.{limit}")]
    with serve(*MEMORY, *options) as server:
        first, second = (server.post(LONG, PATH, headers=ANN).json()["id"] for _ in range(2))
        third = server.post(LONG, PATH, headers=ANN)
        assert third.status_code == 429
        assert "option.background_max" in third.json()["error"]["message"]
        assert int(third.headers["retry-after"]) > 0
        others = server.post(LONG, PATH, headers=BOB)
        assert others.status_code == 200
        call(server, "POST", f"{first}/cancel")
        large = events_in(server.post({**LONG, "stream": True}, PATH, headers=ANN).text)
        assert large[-1]["type"] == "response.failed"
        assert "option.background_max_bytes" in large[-1]["response"]["error"]["message"]
        assert numbers(large) == list(range(len(large)))
        call(server, "POST", f"{second}/cancel")
        server.post({}, f"{PATH}/{others.json()['id']}/cancel", headers=BOB)
    with serve(*MEMORY, *SLOW, "-o", "option.background_timeout=1") as server:
        late = poll(server, server.post(LONG, PATH, headers=ANN).json()["id"])
        assert (late["status"], late["error"]["code"]) == ("failed", "server_error")
        assert "option.background_timeout" in late["error"]["message"]


@pytest.mark.parametrize("batch", [(), ("-o", "option.rolling_batch=disable")])
def test_it_may_wait_as_long_as_it_may_run(batch: tuple[str, ...]) -> None:
    """Where requests run in dynamic batches too: it waits for the earlier one longer than other requests may."""
    limits = ("background_timeout=60", "predict_timeout=0.5", "max_rolling_batch_size=1")
    options = [part for limit in limits for part in ("-o", f"option.{limit}")]
    with serve(*MEMORY, *SLOW, *options, "-o", "max_batch_delay=0", *batch) as server:
        first = create(server, max_output_tokens=100)["id"]
        wait_for(lambda: call(server, "GET", first).json()["status"] == "in_progress", 10, "it does not run")
        second = create(server)["id"]
        plain = server.post({"input": "a", "max_output_tokens": 1}, PATH, headers=ANN)
        assert (plain.status_code, "(option.predict_timeout)" in plain.text) == (429, True), plain.text
        for id in (first, second):
            assert poll(server, id)["status"] == "incomplete"
    with serve(*MEMORY, *SLOW, "-o", "option.background_timeout=1", "-o", "max_batch_delay=0", *batch) as server:
        late = poll(server, create(server, max_output_tokens=4000)["id"])
        assert "option.background_timeout" in late["error"]["message"]


def test_the_engine_fails() -> None:
    with serve(*MEMORY, "-o", "option.echo_cues=true") as server:
        body = {"input": "a b <raise>", "background": True, "max_output_tokens": 20}
        failed = poll(server, server.post(body, PATH, headers=ANN).json()["id"])
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        events = events_in(server.post({**body, "stream": True}, PATH, headers=ANN).text)
        assert events[-1]["type"] == "response.failed"
        assert numbers(events) == list(range(len(events)))


def test_sigterm_ends_what_runs(tmp_path: Path) -> None:
    """What ends within the drain is complete, and the rest fails."""
    options = ("--engine", "echo", *BY_KEY, *SLOW, "-o", f"option.responses_store={tmp_path}")
    with serve(*options) as server:
        short, long = create(server, max_output_tokens=20, stream=False), begin(server)
        reader = threading.Thread(target=server_events, args=(server, f"/{long}?stream=true"))
        reader.start()
        server.send_signal(signal.SIGTERM)
        server.send_signal(signal.SIGTERM)
        reader.join(30)
        assert not reader.is_alive()
        server.wait(60)
    with serve(*options) as server:
        assert call(server, "GET", short["id"]).json()["status"] in ("incomplete", "failed")
        assert call(server, "GET", long).json()["status"] == "failed"
        events = events_in(call(server, "GET", f"{long}?stream=true").text)
        assert numbers(events) == list(range(len(events)))
        assert events[-1]["type"] == "response.failed"


def test_after_a_crash_what_ran_has_failed(tmp_path: Path) -> None:
    """Another server on the same directory shows what the first one runs, and notices its end."""
    options = ("--engine", "echo", *BY_KEY, *SLOW, "-o", f"option.responses_store={tmp_path}")
    with serve(*options) as other:
        with serve_process(*options) as server:
            id, queued = begin(server), create(server, max_output_tokens=4000)["id"]
            seen = list(itertools.islice(iter(Stream(server, "GET", f"/{id}?stream=true").__enter__()), 8))
            wait_for(lambda: call(other, "GET", queued).json()["status"] == "in_progress", 5, "it is not seen")
            assert call(other, "DELETE", id, BOB).status_code == 404
            with ThreadPoolExecutor(1) as thread:
                reading = thread.submit(server_events, other, f"/{id}?stream=true")
                time.sleep(1.5)
                server.send_signal(signal.SIGKILL)
                events = reading.result(40)
        assert events[-1]["type"] == "response.failed"
        assert numbers(events) == list(range(len(events)))
        assert events[: len(seen)] == seen
        assert events[-1]["response"] == call(other, "GET", id).json()
        for one in (id, queued):
            failed = call(other, "GET", one).json()
            assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert [path.name for path in tmp_path.iterdir()] == ["responses.sqlite3"], "no locks are left"


def test_another_server_cancels_and_deletes(tmp_path: Path) -> None:
    options = ("--engine", "echo", *BY_KEY, *SLOW, "-o", f"option.responses_store={tmp_path}")
    with serve(*options) as server, serve(*options) as other:
        id = begin(server)
        assert call(other, "POST", f"{id}/cancel").json()["status"] == "cancelled"
        wait_for(lambda: call(server, "GET", id).json()["status"] == "cancelled", 10, "it still runs")
        id = begin(server)
        assert call(other, "DELETE", id).status_code == 200
        wait_for(lambda: call(server, "GET", id).status_code == 404, 10, "it still runs")
        wait_for(lambda: server.metric("lmi_active_sequences") == 0, 5, "the engine still runs it")


def test_a_full_store_fails_the_response(tmp_path: Path) -> None:
    """A file that another process has locked is as a full disk: nothing can be written for a while."""
    with serve("--engine", "echo", *BY_KEY, *SLOW, "-o", f"option.responses_store={tmp_path}") as server:
        id = begin(server)
        with closing(sqlite3.connect(tmp_path / "responses.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            wait_for(lambda: "cannot be read or written" in server.log, 30, "it could be written")
            assert server.post(LONG, PATH, headers=ANN).status_code == 503
            other.execute("ROLLBACK")
        failed = poll(server, id)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        events = events_in(call(server, "GET", f"{id}?stream=true").text)
        assert numbers(events) == list(range(len(events)))
        assert events[-1]["response"] == failed


class Silent:
    """A client that asks for events, reads their beginning, and then reads nothing more."""

    def __init__(self, server: LiveServer, method: str, path: str = "", body: Any = None) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(("127.0.0.1", server.port))
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {PATH}{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ann\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        self.beginning = b""
        while b'"sequence_number":1,' not in self.beginning:
            self.beginning += self._socket.recv(256)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()


FAST = ("-o", "option.max_model_len=2000000", "-o", "option.background_max_bytes=100000000")
MANY = {"input": "a b c d", "max_output_tokens": 40_000, "background": True, "stream": True}


@contextlib.contextmanager
def noted_quota() -> Iterator[Callable[[], Quota]]:
    """The memory of all requests of the server that starts meanwhile."""
    noted: list[Quota] = []

    def make(*most: Any, **more: Any) -> Quota:
        noted.append(Quota(*most, **more))
        return noted[-1]

    with mock.patch.object(admission, "Quota", make):
        yield lambda: noted[-1]


def held_of(id: str) -> list[object]:
    """What is still in memory of a response that has ended."""
    gc.collect()
    found: list[object] = [one for one in gc.get_objects() if isinstance(one, Detached) and one.queued.id == id]
    return found + [one for one in gc.get_objects() if isinstance(one, BackgroundRun) and one.id == id]


def test_a_reader_that_reads_nothing_holds_nothing_of_the_response() -> None:
    """It holds up neither the response nor its other readers, whether it has created the response or resumed it."""
    with noted_quota() as quota, serve(*MEMORY, *FAST) as server:
        with Silent(server, "POST", body=MANY) as creator:
            id = creator.beginning.split(b'"id":"')[1].split(b'"')[0].decode()
            with Silent(server, "GET", f"/{id}?stream=true"):
                ended = poll(server, id)
                assert ended["usage"]["output_tokens"] == MANY["max_output_tokens"]
                events = events_in(call(server, "GET", f"{id}?stream=true").text)
                assert numbers(events) == list(range(len(events)))
                assert events[-1]["response"] == ended
                assert server.metric("lmi_active_sequences") == 0
                assert held_of(id) == []
                assert 0 < quota().taken < 2 * (1 << 18), "each has at most a part of the events"
        wait_for(lambda: quota().taken == 0, 10, "the memory of a reader is not given back")


def test_a_reader_that_reads_nothing_is_disconnected() -> None:
    with noted_quota() as quota, serve(*MEMORY, *FAST, "-o", "option.client_timeout=1") as server:
        id = events_in(server.post(MANY, PATH, headers=ANN).text)[0]["response"]["id"]
        with Silent(server, "GET", f"/{id}?stream=true"):
            wait_for(lambda: quota().taken > 0, 10, "the reader does not wait")
            wait_for(lambda: quota().taken == 0, 10, "the reader is not disconnected")


def test_a_connection_that_breaks_off_ends_no_response() -> None:
    """A transport may raise an error before it reports that it is closed."""

    async def broken(model: Any, send: Any, reader: Any, *_: Any) -> None:
        data, _ = await reader.read()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        raise RuntimeError("the transport is closed")

    with mock.patch.object(background_responses, "_send_parts", broken), serve(*MEMORY, *SLOW) as server:
        body = {**LONG, "max_output_tokens": 20, "stream": True}
        with Stream(server, "POST", json=body) as stream:
            events = iter(stream)
            id = next(events)["response"]["id"]
            with pytest.raises(httpx.HTTPError):
                list(events)
        assert poll(server, id)["usage"]["output_tokens"] == 20
        assert "Traceback" not in server.log


def test_streams_that_are_silent_say_that_they_are_there(tmp_path: Path) -> None:
    """Comments have no numbers, and come where another server runs the response too."""
    pace = ("-o", "option.echo_tokens_per_second=0.4")
    options = ("--engine", "echo", *BY_KEY, *pace, "-o", f"option.responses_store={tmp_path}")
    body = {**LONG, "max_output_tokens": 3, "stream": True}
    with (
        mock.patch.object(background_responses, "KEEP_ALIVE", 0.2),
        serve(*options) as server,
        serve(*options) as other,
        ThreadPoolExecutor(3) as threads,
    ):
        created = threads.submit(server.post, body, PATH, headers=ANN)
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        with Stream(server, "POST", json=body) as stream:
            id = next(iter(stream))["response"]["id"]
        resumed = [threads.submit(call, each, "GET", f"{id}?stream=true&starting_after=3") for each in (server, other)]
        for first, answer in ((0, created), *((4, one) for one in resumed)):
            text = answer.result(60).text
            found = numbers(events_in(text))
            assert text.count(":\n\n") >= 2
            assert found == list(range(first, first + len(found)))
        assert ":" not in call(server, "GET", f"{id}?stream=true").text.split("\n\n")


def test_no_event_is_lost_after_a_silence(server: LiveServer) -> None:
    """An event that comes when a comment is due is sent in its place."""
    events = events_in(server.post({**LONG, "max_output_tokens": 2, "stream": True}, PATH, headers=ANN).text)
    with mock.patch.object(background_responses, "KEEP_ALIVE", 0.0):
        again = events_in(call(server, "GET", f"{events[0]['response']['id']}?stream=true").text)
    assert again == events


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_response_that_cannot_be_ended_says_so(tmp_path: Path, method: str) -> None:
    """Its final state is shown once it is stored, so that it is the same after a crash."""
    with (
        mock.patch.object(background_responses, "_WRITE_SECONDS", 0.5),
        serve("--engine", "echo", *BY_KEY, *SLOW, "-o", f"option.responses_store={tmp_path}") as server,
    ):
        id = begin(server)
        with closing(sqlite3.connect(tmp_path / "responses.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            stopped = call(server, method, f"{id}/cancel" if method == "POST" else id)
            assert (stopped.status_code, "has not been stored yet" in stopped.text) == (503, True)
            assert server.metric("lmi_active_sequences") == 0
            assert call(server, "GET", id).json()["status"] == "in_progress"
            other.execute("ROLLBACK")
        assert poll(server, id)["status"] == "cancelled"
        assert call(server, method, f"{id}/cancel" if method == "POST" else id).status_code == 200


def test_what_a_response_repeats_is_bounded(server: LiveServer) -> None:
    """Each event of its state repeats it, and so does each poll."""
    tool = {"type": "function", "name": "f", "description": "a" * (5 << 20), "parameters": {}}
    for stream in (False, True):
        for _ in range(20):
            refused = server.post({**LONG, "tools": [tool], "stream": stream}, PATH, headers={"x-api-key": "carl"})
            assert (refused.status_code, "option.background_max_bytes" in refused.text) == (413, True)
    tool["description"] = "a" * (3 << 20)
    assert poll(server, create(server, tools=[tool])["id"])["tools"] == [{**tool, "strict": False}]


def test_a_state_is_written_once(tmp_path: Path) -> None:
    written: list[bool] = []
    append = BackgroundTables.append

    def appended(tables: BackgroundTables, events: Sequence[NewEvents]) -> set[str]:
        written.extend(new.head is not None for new in events)
        return append(tables, events)

    with mock.patch.object(BackgroundTables, "append", appended), serve(*MEMORY, *SLOW) as server:
        poll(server, create(server, max_output_tokens=40)["id"])
        assert len(written) > 2
        assert written.count(True) == 1


def test_a_response_belongs_to_a_conversation(server: LiveServer) -> None:
    """It has its turn until it has ended, and is appended only if it has not been cancelled."""
    made = http.post(f"{server.url}/v1/conversations", json={}, headers=ANN).json()["id"]
    items = f"{server.url}/v1/conversations/{made}/items?order=asc"
    id = begin(server, conversation=made)
    body = {"input": "b", "max_output_tokens": 2, "conversation": made}
    assert server.post(body, PATH, headers=ANN).status_code == 409
    assert call(server, "POST", f"{id}/cancel").json()["conversation"] == {"id": made}
    assert http.get(items, headers=ANN).json()["data"] == []
    ended = poll(server, create(server, conversation=made, store=False)["id"])
    assert ended["status"] == "incomplete"
    listed = http.get(items, headers=ANN).json()["data"]
    assert [item["role"] for item in listed] == ["user", "assistant"]
    assert listed[1] == ended["output"][0]
    assert server.post(body, PATH, headers=ANN).status_code == 200
    assert len(http.get(items, headers=ANN).json()["data"]) == 4


def test_responses_of_many_owners_are_those_that_they_get_plainly(tmp_path: Path) -> None:
    """64 owners have 20 responses each, of which some are cancelled at random."""
    options = ("-o", "option.background_max=20", "-o", "option.max_rolling_batch_size=64", "-o", "job_queue_size=2000")
    rate = ("-o", "option.echo_tokens_per_second=2000")
    draw = random.Random(20261129)
    with serve("--engine", "echo", *BY_KEY, *options, *rate, "-o", f"option.responses_store={tmp_path}") as server:

        def client_of(owner: int) -> httpx.Client:
            headers = {"x-api-key": f"key {owner}"}
            return httpx.Client(base_url=server.url, headers=headers, timeout=100, verify=False, trust_env=False)

        def ask(client: httpx.Client, owner: int, number: int, **more: Any) -> Any:
            """The echo repeats the prompt, which tells whose it is."""
            body = {"input": f"owner {owner} asks {number}", "max_output_tokens": 40, "temperature": 0, **more}
            found = client.post(PATH, json=body)
            assert found.status_code == 200, found.text
            return found.json()

        def of_owner(owner: int, cancelled: set[int]) -> int:
            with client_of(owner) as client:
                ids = []
                for number in range(20):
                    ids.append(ask(client, owner, number, background=True)["id"])
                    if number in cancelled:
                        client.post(f"{PATH}/{ids[-1]}/cancel")
                plain = [ask(client, owner, number, store=False) for number in range(20)]
                lost = 0
                for number, id in enumerate(ids):
                    while (ended := client.get(f"{PATH}/{id}").json())["status"] not in ENDED:
                        time.sleep(0.02)
                    if ended["status"] == "cancelled":
                        assert number in cancelled
                        lost += 1
                        continue
                    (said,) = (item["content"][0]["text"] for item in ended["output"])
                    assert said.startswith(f" user: owner {owner} asks {number} ")
                    assert ended["output"][0]["content"] == plain[number]["output"][0]["content"]
                    assert ended["usage"] == plain[number]["usage"]
            return lost

        with ThreadPoolExecutor(16) as threads:
            drawn = [set(draw.sample(range(20), 5)) for _ in range(64)]
            lost = sum(threads.map(of_owner, range(64), drawn))
        assert 0 < lost <= 64 * 5
        wait_for(lambda: server.metric("lmi_active_sequences") == 0, 5, "the engine still runs something")
        with client_of(0) as client:
            assert ask(client, 0, 0, background=True)["status"] == "queued", "there is room again"
