"""The application in another ASGI server than ours: hypercorn, as a process of its own on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from handler.http.app import create_app
from tests.app.server import AppServer, serve
from tests.app.sockets.client import open_socket, receive, send
from tests.app.test_http import CANCELLED
from tests.engines_by_url.golden import GOLDEN, ask, assert_equal, one_of_each
from tests.environment import clean_environment
from tests.process_tree import descendants
from tests.servers import ServerProcess, free_port, http, wait_for
from tests.servers import options as given

ECHO = ("option.llm_engine=echo", "option.max_model_len=256")
ROLLING = one_of_each(name for name, asked in GOLDEN.items() if asked.mode == "rolling")


class Hypercorn(ServerProcess):
    """It says itself where it listens."""

    def wait_listening(self, seconds: float) -> None:
        def listening() -> bool:
            found = re.search(r"Running on (http://\S+)", self.log)
            assert found or not self.ended, f"the server ended:\n{self.log}"
            self.url = found[1] if found else ""
            return bool(found)

        wait_for(listening, seconds, "the server does not listen")


@contextlib.contextmanager
def hypercorn(*options: str, more: tuple[str, ...] = (), **env: str) -> Iterator[Hypercorn]:
    app = f"handler.http.app:create_app(*{(*ECHO, *options)})"
    command = [sys.executable, "-m", "hypercorn", "--bind", f"127.0.0.1:{free_port()}", *more, app]
    environment = {**clean_environment(), **env}
    server = Hypercorn(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        server.wait_listening(60)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def mounted() -> Iterator[Hypercorn]:
    with hypercorn() as server:
        yield server


@pytest.fixture(scope="module")
def own() -> Iterator[AppServer]:
    with serve(*given(*ECHO)) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[Hypercorn]:
    """20 tokens a second; it has a prefix in its paths, and takes small bodies only."""
    with hypercorn("option.echo_tokens_per_second=20", "max_request_size=1000", more=("--root-path", "/llm")) as server:
        yield server


def post(server: Hypercorn, body: dict[str, object], **more: Any) -> httpx.Response:
    return http.post(f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 4, **body}, **more)


@pytest.mark.parametrize("name", ROLLING)
def test_a_golden_request_is_answered_as_by_our_own_server(mounted: Hypercorn, own: AppServer, name: str) -> None:
    """Whole answers, streams and refusals of all dialects."""
    assert_equal(name, ask(own, GOLDEN[name]), ask(mounted, GOLDEN[name]))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_in_asgi_servers(slow: Hypercorn, stream: bool) -> None:
    before, log = slow.metric(CANCELLED), slow.log
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    url = f"{slow.url}/v1/completions"
    if stream:
        with http.stream("POST", url, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert slow.metric("lmi_active_sequences") == 1, "a token comes when it is made"
    else:
        with httpx.Client(timeout=0.5, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
            client.post(url, json=body)
    wait_for(lambda: slow.metric(CANCELLED) == before + 1, 10, "the request goes on")
    wait_for(lambda: slow.metric("lmi_active_sequences") == 0, 10, "the engine goes on")
    assert "Traceback" not in slow.log.removeprefix(log)


def test_a_prefix_of_the_paths_is_the_servers(slow: Hypercorn) -> None:
    assert http.get(f"{slow.url}/llm/ping").json() == http.get(f"{slow.url}/ping").json()


def test_http_2_has_streams_and_refusals(slow: Hypercorn) -> None:
    """No header of a connection goes out: HTTP/2 forbids them."""
    body = {"prompt": "hi", "max_tokens": 4}
    with httpx.Client(http1=False, http2=True, trust_env=False) as client:
        url = f"{slow.url}/v1/completions"
        whole, stream = (client.post(url, json={**body, "stream": on}).text for on in (False, True))
        refused = client.post(url, json={"prompt": "hi" * 1000})
    assert '"text"' in whole
    assert stream.endswith("data: [DONE]\n\n")
    assert (refused.http_version, refused.status_code) == ("HTTP/2", 413)


def test_a_page_of_another_name_is_refused(mounted: Hypercorn) -> None:
    assert post(mounted, {}, headers={"host": "attacker.example"}).status_code == 403


def test_requests_need_the_key_and_the_end_ends_the_engine() -> None:
    with hypercorn("option.engine_isolation=process", LMI_API_KEY="s3cret") as server:
        statuses = [
            post(server, {}, headers={"authorization": f"Bearer {key}"}).status_code for key in ("no", "s3cret")
        ]
        assert statuses == [401, 200]
        (engine,) = [pid for pid, command in descendants(server.process.pid).items() if "engine_process" in command]
        assert server.stop() == 0
    assert not Path(f"/proc/{engine}").exists()
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("option.echo_tokens_per_second=fast", "option.echo_tokens_per_second"),
        ("option.echo_tokenizer=/nowhere", "/nowhere"),
    ],
)
def test_a_start_that_fails_says_why(option: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words), hypercorn(option):
        pass


def test_a_bug_in_the_start_ends_it_too() -> None:
    app, sent = create_app("option.llm_engine=echo"), []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    with mock.patch("handler.serving.start.load_model", side_effect=OSError("no space left")):
        asyncio.run(app({"type": "lifespan"}, receive, send))
    (message,) = sent
    assert message["type"] == "lifespan.startup.failed"
    assert "OSError: no space left" in message["message"]


def test_a_handle_of_a_model_py_works_too(tmp_path: Path) -> None:
    text = """
import json
from djl_python import Output
from djl_python.async_utils import create_stream_chunk_output


async def chunks():
    for word in ("one", "two"):
        yield create_stream_chunk_output(word, word == "two")


async def handle(inputs):
    if inputs.is_empty():
        return None
    do = inputs.get_as_json().get("do")
    return {"whole": Output().add("whole"), "stream": chunks()}.get(do)
"""
    (tmp_path / "model.py").write_text(text)
    with hypercorn(f"option.model_id={tmp_path}") as server:
        answers = {do: server.post({"do": do}).text for do in ("whole", "stream")}
        assert answers == {"whole": "whole", "stream": "one\ntwo\n"}
        engines = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 2}})
        assert engines.json() == {"generated_text": " a b"}


# -- WebSockets --------------------------------------------------------------------------------------------------------


def test_a_socket_has_the_messages_of_our_own_server(mounted: Hypercorn, own: AppServer) -> None:
    body = {"prompt": "once upon a time", "max_tokens": 3, "stream": True}
    texts = []
    for server in (mounted, own):
        with open_socket(server, "/v1/completions") as client:
            send(client, body, {**body, "stream_id": "a"}, {"prompt": 5})
            events = [receive(client) for _ in range(7)]
            texts.append(sorted(event["choices"][0]["text"] for event in events if "choices" in event))
            assert [event["status"] for event in events if event.get("type") == "error"] == [400]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6


def test_a_socket_of_an_asgi_server_is_refused_with_a_status(mounted: Hypercorn) -> None:
    for path, status in (("/v1/load_lora_adapter", 426), ("/nothing", 404)):
        with pytest.raises(InvalidStatus) as refused:
            open_socket(mounted, path).__enter__()
        assert refused.value.response.status_code == status


def test_a_client_of_an_asgi_server_that_leaves_ends_its_requests(slow: Hypercorn) -> None:
    before, log = slow.metric(CANCELLED), slow.log
    with open_socket(slow, "/llm/v1/completions") as client:
        send(client, {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True})
        receive(client)
        assert slow.metric("lmi_websockets") == 1
    wait_for(lambda: slow.metric(CANCELLED) == before + 1, 10, "the request goes on")
    wait_for(lambda: slow.metric("lmi_websockets") == 0, 10, "the connection is open")
    assert "Traceback" not in slow.log.removeprefix(log)
