"""A request that is summarized first, whose engine or server ends between the summary and the response."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.protocols.assistant.summary import Summarizing
from handler.serving.quota import Quota
from tests.app.server import AppServer, serve
from tests.app.test_background import ANN, PATH, Stream, call, events_in, noted_quota, numbers, poll
from tests.servers import http, options, wait_for
from tests.servers import serve as serve_process

MESSAGES = "/v1/messages"
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
EDIT = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1}}
BODIES: dict[str, dict[str, Any]] = {
    PATH: {
        "input": TURNS, "max_output_tokens": 20, "context_management": [{"type": "compaction", "compact_threshold": 1}],
    },
    MESSAGES: {
        "messages": [{"role": "user", "content": "a b"}], "max_tokens": 20, "context_management": {"edits": [EDIT]},
    },
}  # fmt: skip
KILLED = "engine failure: it was killed by signal 9"
ECHO = ("--engine", "echo", *options("option.max_model_len=400"))


@contextlib.contextmanager
def isolated() -> Iterator[tuple[AppServer, Callable[[], Quota]]]:
    """A server whose engine has its own process, and the memory of all its requests. All is given back at the end."""
    store = options("option.responses_store=memory", "option.engine_isolation=process", "option.background_max=1")
    with noted_quota() as quota, serve(*ECHO, *store) as server:
        yield server, quota
        server.wait_ready()
        for name in ("lmi_active_sequences", "lmi_queued_requests"):
            assert server.metric(name) == 0
        wait_for(lambda: quota().taken == 0, 10, "memory is not given back")


@contextlib.contextmanager
def engine_killed_between(server: AppServer) -> Iterator[None]:
    """The engine is killed once, when a summary is complete and the response has not begun."""
    summaries, follow_up = list[str](), Summarizing.follow_up

    def killing(self: Summarizing) -> Any:
        if not summaries:
            summaries.append(self.summary)
            pid = server.engine_pid()
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}/stat").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
                time.sleep(0.01)
        return follow_up(self)

    with mock.patch.object(Summarizing, "follow_up", killing):
        yield
    assert summaries


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_that_dies_between_the_passes_is_an_error(path: str) -> None:
    with isolated() as (server, _):
        with engine_killed_between(server):
            found = server.post(BODIES[path], path, headers=ANN)
        assert (found.status_code, found.json()["error"]["message"]) == (500, KILLED)
        server.wait_ready()
        with engine_killed_between(server):
            streamed = server.post({**BODIES[path], "stream": True}, path, headers=ANN)
        last = events_in(streamed.text)[-1]
        failure = last["response"]["error"] if path == PATH else last["error"]
        assert (streamed.status_code, failure["message"]) == (200, KILLED)
        server.wait_ready()
        assert server.post(BODIES[path], path, headers=ANN).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_between_the_passes_fails_a_background_response(stream: bool) -> None:
    """Its conversation has not changed, and is free again."""
    with isolated() as (server, _):
        conversation = http.post(f"{server.url}/v1/conversations", json={}, headers=ANN).json()["id"]
        body = {**BODIES[PATH], "background": True, "conversation": conversation}
        with engine_killed_between(server):
            if stream:
                made = events_in(server.post({**body, "stream": True}, PATH, headers=ANN).text)[0]["response"]
            else:
                made = server.post(body, PATH, headers=ANN).json()
            failed = poll(server, made["id"])
        assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": KILLED})
        if stream:
            found = events_in(call(server, "GET", f"{made['id']}?stream=true").text)
            assert numbers(found) == list(range(len(found)))
            assert found[-1] == {"type": "response.failed", "sequence_number": len(found) - 1, "response": failed}
        items = f"{server.url}/v1/conversations/{conversation}/items"
        assert http.get(items, headers=ANN).json()["data"] == []
        server.wait_ready()
        again = server.post(body, PATH, headers=ANN).json()["id"]
        assert poll(server, again)["status"] == "incomplete"
        kinds = [item["type"] for item in http.get(f"{items}?order=asc", headers=ANN).json()["data"]]
        assert kinds == ["message", "message", "compaction", "message"]


def test_a_server_that_is_killed_between_the_passes(tmp_path: Path) -> None:
    """Background responses have failed after the restart, and the conversation of each is free and unchanged."""
    store = options(f"option.responses_store={tmp_path}", "option.echo_tokens_per_second=50")
    with serve_process(*ECHO, *store) as server:
        server.wait_ready()
        conversations = [
            http.post(f"{server.url}/v1/conversations", json={}, headers=ANN).json()["id"] for _ in range(2)
        ]
        bodies = [{**BODIES[PATH], "background": True, "conversation": one} for one in conversations]
        polled = server.post(bodies[0], PATH, headers=ANN).json()["id"]
        with (
            http.stream("POST", server.url + MESSAGES, json={**BODIES[MESSAGES], "stream": True}) as plain,
            Stream(server, "POST", json={**bodies[1], "stream": True}) as stream,
        ):
            seen = []
            for event in stream:
                seen.append(event)
                if event["type"] == "response.output_item.done":
                    assert event["item"]["type"] == "compaction"
                    break
            server.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                plain.read()
        server.wait(60)
    with serve(*ECHO, *store) as again:
        id = seen[0]["response"]["id"]
        for one in (polled, id):
            failed = call(again, "GET", one).json()
            assert (failed["status"], failed["error"]["code"], failed["output"]) == ("failed", "server_error", [])
        events = events_in(call(again, "GET", f"{id}?stream=true").text)
        assert numbers(events) == list(range(len(events)))
        assert events[: len(seen)] == seen
        assert (events[-1]["type"], events[-1]["response"]) == ("response.failed", call(again, "GET", id).json())
        for conversation, body in zip(conversations, bodies, strict=True):
            items = f"{again.url}/v1/conversations/{conversation}/items"
            assert http.get(items, headers=ANN).json()["data"] == []
            assert poll(again, again.post(body, PATH, headers=ANN).json()["id"])["status"] == "incomplete"
            assert len(http.get(items, headers=ANN).json()["data"]) == 4
