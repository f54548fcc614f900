"""A server captures what its clients send and get, byte by byte, on every route and in every way of answering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from handler.cli import main
from proof.replay.exchange import Request
from proof.replay.sources import open_requests
from tests.app.server import serve
from tests.app.sockets.client import open_socket, receive, send, until

CHAT = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 3, "model": "model"}
ASKED: list[tuple[str, Any]] = [
    ("/invocations", {"inputs": "one two", "parameters": {"max_new_tokens": 2}}),
    ("/invocations", {"inputs": "one two", "parameters": {"max_new_tokens": 2}, "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/chat/completions?api_key=abc&adapter=", {**CHAT, "stream": True, "n": 2}),
    ("/v1/messages", {**CHAT, "stream": True}),
    ("/v1/responses", {"input": "one two", "max_output_tokens": 2, "model": "model"}),
    ("/generate_stream", {"inputs": "one two", "parameters": {"max_new_tokens": 2}}),
    ("/v2/models/model/generate", {"text_input": "one two", "max_tokens": 2}),
    ("/tokenize", {"prompt": "one two", "model": "model"}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": "many"}),
    ("/invocations", b"{not json"),
    ("/invocations", b"\xff\xfe"),
]

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def test_every_request_is_captured_with_the_bytes_of_its_answer(tmp_path: Path) -> None:
    options = ("--engine", "echo", "-o", f"option.capture_requests={tmp_path}")
    sent = []
    with serve(*options) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path, given in ASKED:
            body = given if isinstance(given, bytes) else json.dumps(given).encode()
            headers = {"content-type": "application/json", "authorization": "Bearer sk-1234", "x-own": "sk-1234"}
            answer = client.post(path, content=body, headers=headers)
            sent.append(
                (path.partition("?")[0], body, answer.status_code, answer.headers["content-type"], answer.content)
            )
        metrics = client.get("/metrics").text
    found = [one for one in open_requests(str(tmp_path)) if isinstance(one, Request)]
    got = [
        (one.path.partition("?")[0], one.body, one.response.status, one.response.content_type, one.response.body)
        for one in found
        if one.response is not None
    ]
    assert got == sent
    assert "lmi_captured_requests_total" in metrics
    assert "sk-1234" not in "".join(path.read_text() for path in tmp_path.iterdir())
    assert [one.path for one in found if "?" in one.path] == ["/v1/chat/completions?adapter="]
    assert len({one.id for one in found}) == len(ASKED)


def test_a_stream_that_fails_is_captured_with_its_end(tmp_path: Path) -> None:
    """Where answers are kept, a thread writes that end."""
    options = ("option.responses_store=memory", "option.echo_cues=true", f"option.capture_requests={tmp_path}")
    asked = {"input": "a b <raise>", "stream": True, "max_output_tokens": 20}
    sent = []
    with serve("--engine", "echo", *(word for option in options for word in ("-o", option))) as server:
        for store in (True, False):
            answer = httpx.post(f"{server.url}/v1/responses", json={**asked, "store": store}, timeout=60)
            assert "response.failed" in answer.text
            sent.append(answer.content)
    found = [one.response.body for one in open_requests(str(tmp_path)) if isinstance(one, Request) and one.response]
    assert found == sent


def test_a_background_response_is_captured_as_its_client_got_it(tmp_path: Path) -> None:
    """As JSON that is queued, or as the stored events, of which a refusal and a client that leaves have none."""
    options = ("option.responses_store=memory", "option.background_max=1", f"option.capture_requests={tmp_path}",
               "option.echo_tokens_per_second=20")  # fmt: skip
    asked = {"input": "one two", "max_output_tokens": 3, "background": True, "temperature": 0, "model": "model"}
    sent = []
    with serve("--engine", "echo", *(word for option in options for word in ("-o", option))) as server:
        for body in ({**asked, "stream": True}, {**asked, "max_output_tokens": 400}, asked):
            answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
            sent.append((answer.status_code, answer.headers["content-type"], answer.content))
        id = json.loads(sent[1][2])["id"]
        assert httpx.post(f"{server.url}/v1/responses/{id}/cancel", timeout=60).json()["status"] == "cancelled"
        long = {**asked, "stream": True, "max_output_tokens": 400}
        with httpx.stream("POST", f"{server.url}/v1/responses", json=long, timeout=60) as left:
            next(left.iter_bytes())
    found = [one.response for one in open_requests(str(tmp_path)) if isinstance(one, Request)]
    assert [(one.status, one.content_type, one.body) for one in found if one is not None] == sent
    assert [status for status, _, _ in sent] == [200, 200, 429]
    assert [one is None for one in found] == [False] * 3 + [True]


def test_a_client_that_leaves_has_no_answer(tmp_path: Path) -> None:
    options = ("-o", f"option.capture_requests={tmp_path}", "-o", "option.echo_tokens_per_second=5")
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 500}, "stream": True}
    with (
        serve("--engine", "echo", *options) as server,
        httpx.stream("POST", f"{server.url}/invocations", json=body, timeout=60) as answer,
    ):
        next(answer.iter_bytes())
    [request] = list(open_requests(str(tmp_path)))
    assert isinstance(request, Request)
    assert request.response is None


def test_no_id_of_a_session_is_captured(tmp_path: Path) -> None:
    on = ("option.enable_stateful_sessions=true", f"option.sessions_path={tmp_path / 'sessions'}")
    captures = tmp_path / "captures"
    options = [word for option in (*on, f"option.capture_requests={captures}") for word in ("-o", option)]
    name = "x-amzn-sagemaker-session-id"
    with serve("--engine", "echo", *options) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        opened = client.post("/invocations", json={"requestType": "NEW_SESSION"})
        id = opened.headers[name].partition(";")[0]
        assert client.post("/invocations", json={"inputs": "one"}, headers={name: id}).status_code == 200
        assert client.post("/invocations", json={"requestType": "CLOSE"}, headers={name: id}).status_code == 200
    text = "".join(path.read_text() for path in captures.iterdir())
    assert text.count('"path"') == 1
    assert id not in text


def test_a_message_of_a_websocket_is_captured_once_as_a_request_that_replays(tmp_path: Path) -> None:
    """A response that another continues is part of the request, so that each can be sent alone."""
    create = {"type": "response.create", "input": "one two", "max_output_tokens": 2, "model": "model", "store": False}
    directory = tmp_path / "captured"
    with serve("--engine", "echo", "-o", f"option.capture_requests={directory}") as server:
        with open_socket(server, "/v1/responses") as socket:
            send(socket, create)
            first = until(socket, *ENDS)[-1]["response"]
            send(socket, {**create, "input": "three", "previous_response_id": first["id"]})
            second = until(socket, *ENDS)[-1]["response"]
            send(socket, {**create, "generate": False})
            until(socket, *ENDS)
        with open_socket(server, "/invocations-bidirectional-stream") as socket:
            send(socket, ASKED[0][1], {**CHAT, "stream": True})
            assert "generated_text" in receive(socket)
            while not receive(socket)["choices"][0]["finish_reason"]:
                pass
    requests = [item for item in open_requests(str(directory)) if isinstance(item, Request)]
    assert [request.path for request in requests] == ["/v1/responses"] * 3 + ["/invocations"] * 2
    assert len({request.id for request in requests}) == 5
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    with serve("--engine", "echo") as server:
        words = ["replay", str(directory), "--to", server.url, "--output", str(tmp_path / "report")]
        assert main(words) == 0
        report = json.loads((tmp_path / "report" / "report.json").read_text())
        replayed = httpx.post(server.url + requests[1].path, content=requests[1].body, headers=requests[1].headers)
    assert report["compared"] == 5
    assert f'"input_tokens":{second["usage"]["input_tokens"]},' in replayed.text.replace(": ", ":")
