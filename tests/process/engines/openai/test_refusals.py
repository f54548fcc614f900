"""A server that refuses a request: its words reach the client as its dialect has wrong requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.server import AppServer, serve
from tests.doubles import tiny
from tests.process.engines.openai.server import HEAD, Server, event, listening, status
from tests.servers import options

MESSAGE = "the engine refused the request: no such thing"
NO = status(400, {"error": {"message": "no such thing", "code": 400}})
CHAT = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
NOTHING = {"finish_reason": "error", "generated_tokens": None, "inputs": None}
LMI = {"generated_text": "", "details": {**NOTHING, "tokens": None}, "error": MESSAGE, "code": 424}
LINE = {"token": {"id": -1, "text": "", "log_prob": -1, "special_token": True}, **LMI, "details": NOTHING}
OPENAI = {"error": {"message": MESSAGE, "type": "invalid_request_error", "param": None, "code": None}}
ANTHROPIC = {"type": "error", "error": {"type": "invalid_request_error", "message": MESSAGE}}
TGI = {"error": f"Input validation error: {MESSAGE}", "error_type": "validation"}
TRITON = {"error": MESSAGE}
INPUTS = {"inputs": "hi"}

REFUSALS: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "lmi": ("/invocations", INPUTS, 424, LMI),
    "lmi, a stream": ("/invocations", {**INPUTS, "stream": True}, 424, LINE),
    "lmi's chat": ("/invocations", CHAT, 424, LMI),
    "chat": ("/v1/chat/completions", CHAT, 400, OPENAI),
    "chat, a stream": ("/v1/chat/completions", {**CHAT, "stream": True}, 400, OPENAI),
    "completions": ("/v1/completions", {"prompt": "hi"}, 400, OPENAI),
    "responses": ("/v1/responses", {"input": "hi"}, 400, OPENAI),
    "responses, a stream": ("/v1/responses", {"input": "hi", "stream": True}, 400, OPENAI),
    "messages": ("/v1/messages", CHAT, 400, ANTHROPIC),
    "messages, a stream": ("/v1/messages", {**CHAT, "stream": True}, 400, ANTHROPIC),
    "tgi": ("/generate", INPUTS, 422, TGI),
    "tgi, a stream": ("/generate_stream", INPUTS, 200, TGI),
    "mindie": ("/", INPUTS, 422, {"error": TGI["error"]}),
    "triton": ("/v2/models/model/generate", {"text_input": "hi", "max_tokens": 4}, 400, TRITON),
    "triton, a stream": ("/v2/models/model/generate_stream", {"text_input": "hi", "max_tokens": 4}, 400, TRITON),
}


@pytest.fixture(scope="module")
def behind() -> Iterator[Server]:
    with listening() as server:
        yield server


@pytest.fixture(scope="module")
def front(behind: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    model = tiny.make(tmp_path_factory.mktemp("tiny"))
    given = options(f"option.base_url={behind.url}", "option.base_url_kind=vllm", "option.root_schema=mindie")
    with serve(str(model), "--engine", "openai", *given) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("name", REFUSALS)
def test_each_dialect_says_that_the_request_is_wrong(behind: Server, front: AppServer, name: str) -> None:
    path, body, code, expected = REFUSALS[name]
    behind.scripts[:] = [(NO,)]
    before = front.metric('lmi_requests_total{outcome="refused"}')
    answer = front.post(body, path)
    found = answer.text.removeprefix("data:").strip() if code == 200 else answer.text
    assert (answer.status_code, json.loads(found)) == (code, expected)
    assert front.metric('lmi_requests_total{outcome="refused"}') == before + 1


def test_a_key_that_is_missing_there_is_no_fault_of_the_client(behind: Server, front: AppServer) -> None:
    behind.scripts[:] = [(status(401, "who?"),)] * 3
    answer = front.post(CHAT, "/v1/chat/completions")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "request failed in the engine: the vllm server answered 401"
    assert f"{behind.url} answered 401: who?; its key is the variable OPENAI_API_KEY" in front.log


def test_in_a_stream_that_has_begun_it_is_the_last_event(behind: Server, front: AppServer) -> None:
    behind.scripts[:] = [(HEAD, event(5), b'data: {"error": {"message": "no such thing", "code": 400}}\n\n')]
    answer = front.post({**CHAT, "stream": True}, "/v1/chat/completions")
    assert answer.status_code == 200
    assert "the vllm server refused it with 400" in answer.text
    assert "refused it with 400: no such thing" in front.log
