"""Handlers and middleware of AWS's vLLM image in the embedded server: what answers, in which order, and what fails."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.server import AppServer, serve
from tests.servers import http, post_bytes, wait_for
from tests.user_files import write_model

STANDARDS = "import model_hosting_container_standards.sagemaker as standards\n"
BODY = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}

HANDLERS = f"""
import asyncio
import dataclasses
import datetime
import http
import json
import pathlib
import sys
import uuid
import numpy
from fastapi import BackgroundTasks, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
{STANDARDS}
from model_hosting_container_standards.logging_config import logger

ALWAYS_THIS = Response("this")


@dataclasses.dataclass
class Point:
    x: int = 1


class Model:
    def model_dump(self, mode):
        return {{"mode": mode}}


VALUES = {{
    "bytes": lambda: b"a", "text": lambda: "a", "number": lambda: 1.5, "nothing": lambda: None,
    "object": lambda: {{"a": [1]}}, "tuple": lambda: (1, 2), "set": lambda: {{1}},
    "generator": lambda: (name for name in "ab"), "dataclass": lambda: [Point()], "model": lambda: {{"a": Model()}},
    "date": lambda: datetime.date(2026, 1, 2), "uuid": lambda: uuid.UUID(int=0), "path": lambda: pathlib.Path("/a"),
    "enum": lambda: http.HTTPStatus.OK, "array": lambda: numpy.ones(1), "NaN": lambda: float("nan"),
    "bad text": lambda: b"\\xff",
}}
left = []


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@standards.custom_ping_handler
async def my_ping(request: Request) -> Response:
    return Response(status_code=202, content="mine")


@standards.custom_invocation_handler
@standards.inject_adapter_id("model", append=True, separator=":")
async def my_invocations(request: Request):
    body = await request.json()
    match body.get("do"):
        case "raise":
            raise ValueError("as asked")
        case "refuse":
            raise HTTPException(status_code=418, detail="no tea", headers={{"x-tea": "none"}})
        case "nonsense":
            return object()
        case "engine":
            return request.app.state.engine_client
        case "own state":
            request.app.state.mine = body["value"]
            return request.app.state.mine
        case "slow stream":
            async def slow():
                await asyncio.sleep(body["seconds"])
                yield "late"
            return StreamingResponse(slow(), media_type="text/plain")
        case "stream":
            return StreamingResponse((part for part in ("one ", "two")), media_type="text/plain")
        case "break":
            def parts():
                yield "one"
                raise RuntimeError("amid")
            return StreamingResponse(parts(), media_type="text/plain")
        case "look":
            request.state.seen = request.headers["x-seen"]
            url = [request.method, request.url.path, request.query_params["q"]]
            return [*url, request.client.host, request.state.seen]
        case "null":
            return None
        case "exit":
            sys.exit("of the handler")
        case "exit amid":
            async def parts():
                yield "one"
                sys.exit("of the stream")
            return StreamingResponse(parts())
        case "silent":
            raise Silent
        case "start":
            return Response("x", status_code=body.get("status", 200), headers=body.get("headers"))
        case "length":
            parts = [part.encode() for part in body["parts"]]
            whole = len(parts) == 1
            answer = Response(parts[0]) if whole else StreamingResponse((part for part in parts))
            answer.status_code = body.get("status", 200)
            answer.raw_headers = [(name.encode(), value.encode()) for name, value in body["headers"]]
            return answer
        case "value":
            return VALUES[body["name"]]()
        case "same":
            return ALWAYS_THIS
        case "wait":
            while not await request.is_disconnected():
                await asyncio.sleep(0.02)
            left.append("wait")
        case "wait amid":
            async def parts():
                yield "one"
                try:
                    await asyncio.sleep(100)
                finally:
                    left.append("wait amid")
            return StreamingResponse(parts())
        case "left":
            return left
        case "background":
            tasks = BackgroundTasks()
            tasks.add_task(json.loads, "no JSON")
            return JSONResponse("done", background=tasks)
        case _:
            return body
"""

AROUND = """
import json
import sys
from fastapi import HTTPException
from model_hosting_container_standards.common.fastapi.middleware import custom_middleware
from model_hosting_container_standards.common.fastapi.middleware import input_formatter, output_formatter


@custom_middleware("throttle")
async def throttle(request, call_next):
    response = await call_next(request)
    response.headers["x-order"] = response.headers.get("x-order", "") + "throttle"
    return response


@input_formatter
async def before(request):
    if request.method == "POST":
        body = json.loads(await request.body())
        if body.get("fail") == "before":
            raise ValueError("before")
        if body.get("fail") == "exit":
            sys.exit("before")
        if body.get("fail") == "refuse":
            raise HTTPException(status_code=400, detail="no prompt", headers={"x-why": "prompt"})
        body["inputs"] = body.pop("question", body.get("inputs"))
        request._body = json.dumps(body).encode()


@output_formatter
async def after(response):
    if response.headers.get("x-request-id") == "fail":
        raise ValueError("after")
    if response.headers.get("x-request-id") == "length":
        response.headers["content-length"] = "1"
    response.headers["x-order"] = "after "
"""


@pytest.fixture(scope="module")
def handlers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    properties = write_model(tmp_path_factory.mktemp("handlers"), HANDLERS)
    with serve("--engine", "echo", "--properties", str(properties)) as server:
        yield server


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    properties = write_model(tmp_path_factory.mktemp("around"), AROUND)
    with serve("--engine", "echo", "--properties", str(properties)) as server:
        yield server


def ping(server: AppServer) -> httpx.Response:
    return http.get(server.url + "/ping")


def test_handlers_answer_in_place_of_the_server(handlers: AppServer) -> None:
    assert (ping(handlers).status_code, ping(handlers).text) == (202, "mine")
    assert handlers.post({"a": 1}).json() == {"a": 1}
    assert handlers.post(BODY, "/predictions/model").json() == {"generated_text": " a b"}


def test_a_handlers_request_has_what_starlettes_has(handlers: AppServer) -> None:
    found = handlers.post({"do": "look"}, "/invocations?q=7", headers={"x-seen": "s"})
    assert found.json() == ["POST", "/invocations", "7", "127.0.0.1", "s"]
    assert found.headers["x-request-id"]


def test_the_adapter_of_the_header_is_put_into_the_body(handlers: AppServer) -> None:
    found = handlers.post({"model": "base"}, headers={"X-Amzn-SageMaker-Adapter-Identifier": "sql"})
    assert found.json() == {"model": "base:sql"}


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b'"a"', b"{", b"\xff", b"[" * 100_000])
def test_an_adapter_that_finds_no_place_in_the_body_is_the_clients_mistake(handlers: AppServer, body: bytes) -> None:
    headers = {"x-amzn-sagemaker-adapter-identifier": "a"}
    found = http.post(handlers.url + "/invocations", content=body, headers=headers)
    assert (found.status_code, "x-amzn-sagemaker-adapter-identifier" in found.text) == (400, True)


@pytest.mark.parametrize(
    "start",
    [
        {"status": 999}, {"status": 0}, {"status": -1}, {"status": 100}, {"status": "200"}, {"status": 1e9},
        {"headers": {"a b": "c"}}, {"headers": {"": "c"}}, {"headers": {"a": "b\r\nc: d"}}, {"headers": {"a": "\0"}},
        {"headers": {"a": "\u65e5"}}, {"headers": {"a": 1}},
    ],
)  # fmt: skip
def test_an_impossible_status_or_header_is_500(handlers: AppServer, start: dict[str, Any]) -> None:
    found = http.post(handlers.url + "/invocations", json={"do": "start", **start})
    assert (found.status_code, "raised" in found.text) == (500, True)


def one_connection(server: AppServer) -> HTTPConnection:
    """A connection that is not opened again."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.connect()
    connection.auto_open = 0
    return connection


LENGTH, CHUNKED = "content-length", ("transfer-encoding", "chunked")


@pytest.mark.parametrize(
    "headers",
    [
        [(LENGTH, "2")], [(LENGTH, "99")], [(LENGTH, "6"), (LENGTH, "6")], [(LENGTH, "6"), ("Content-Length", "2")],
        [(LENGTH, "x")], [(LENGTH, "")], [(LENGTH, "-6")], [(LENGTH, "+6")], [(LENGTH, "0_6")], [(LENGTH, "6, 6")],
        [(LENGTH, "0")], [(LENGTH, "9" * 30)], [CHUNKED], [("Transfer-Encoding", "gzip")], [CHUNKED, CHUNKED],
        [CHUNKED, (LENGTH, "2")], [("transfer-encoding", "gzip, chunked")], [("Transfer-Encoding", "identity")], [],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("parts", [["abcdef"], ["abc", "def"]])
def test_what_frames_an_answer_is_the_servers(handlers: AppServer, headers: list[Any], parts: list[str]) -> None:
    """The next answer on the connection is read as it was sent."""
    connection = one_connection(handlers)
    for body in ({"do": "length", "headers": headers, "parts": parts}, {"after": 1}):
        connection.request("POST", "/invocations", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        framing = [name.lower() for name in answer.headers if name.lower() in (LENGTH, "transfer-encoding")]
        assert (answer.status, len(framing)) == (200, 1)
        assert answer.read() == (b"abcdef" if "do" in body else b'{"after":1}')
    connection.close()


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("headers", [[], [(LENGTH, "6")], [(LENGTH, "2")], [CHUNKED]], ids=str)
def test_an_answer_that_can_have_no_body_has_none(handlers: AppServer, status: int, headers: list[Any]) -> None:
    asked = {"do": "length", "headers": headers, "parts": ["abcdef"], "status": status}
    connection = one_connection(handlers)
    for body, wanted in ((asked, (status, b"")), ({"after": 1}, (200, b'{"after":1}'))):
        connection.request("POST", "/invocations", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == wanted
    connection.close()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bytes", '"a"'), ("text", '"a"'), ("number", "1.5"), ("nothing", "null"), ("object", '{"a":[1]}'),
        ("tuple", "[1,2]"), ("set", "[1]"), ("generator", '["a","b"]'), ("dataclass", '[{"x":1}]'),
        ("model", '{"a":{"mode":"json"}}'), ("date", '"2026-01-02"'), ("path", '"/a"'), ("enum", "200"),
        ("uuid", '"00000000-0000-0000-0000-000000000000"'),
    ],
)  # fmt: skip
def test_a_handler_may_return_what_fastapi_takes(handlers: AppServer, name: str, wanted: str) -> None:
    assert (found := handlers.post({"do": "value", "name": name})).status_code == 200, found.text
    assert found.text == wanted


@pytest.mark.parametrize(
    ("name", "told"),
    [("array", "Object of type ndarray"), ("NaN", "not JSON compliant"), ("bad text", "'utf-8' codec can't decode")],
)
def test_a_value_that_fastapi_refuses_is_500(handlers: AppServer, name: str, told: str) -> None:
    found = handlers.post({"do": "value", "name": name})
    assert (found.status_code, told in found.text) == (500, True), found.text


def test_answers_are_those_of_fastapi(handlers: AppServer) -> None:
    refused = handlers.post({"do": "refuse"})
    error = {"message": "no tea", "type": "I'm a Teapot", "param": None, "code": 418}  # vLLM's form, as in that image
    assert (refused.status_code, refused.json(), refused.headers["x-tea"]) == (418, {"error": error}, "none")
    assert handlers.post({"do": "null"}).text == "null"
    assert handlers.post({"do": "stream"}).text == "one two"


@pytest.mark.parametrize(
    ("do", "told"),
    [
        ("raise", "raised ValueError: as asked"),
        ("nonsense", "raised TypeError: Object of type object"),
        ("exit", "raised SystemExit: of the handler"),
        ("silent", "raised Silent: <exception str() failed>"),
    ],
)
def test_a_failure_is_that_requests_and_is_named(handlers: AppServer, do: str, told: str) -> None:
    found = handlers.post({"do": do})
    assert found.status_code == 500
    assert f"custom handler 'my_invocations' {told}" in found.text
    assert "Traceback" in handlers.log
    assert handlers.post({"a": 1}).status_code == 200


def test_the_state_has_what_a_handler_puts_there_and_nothing_of_vllm(handlers: AppServer) -> None:
    assert handlers.post({"do": "own state", "value": 3}).json() == 3
    found = handlers.post({"do": "engine"})
    assert found.status_code == 500
    assert "request.app.state.engine_client: vLLM's own objects are not available" in found.json()["error"]["message"]
    assert f"line {_line_of('state.engine_client')}: request.app.state.engine_client: vLLM's own" in handlers.log
    assert "app.state.mine" not in handlers.log


def _line_of(text: str) -> int:
    return next(number for number, line in enumerate(HANDLERS.splitlines(), 1) if text in line)


def test_a_streams_head_does_not_wait_for_its_first_part(handlers: AppServer) -> None:
    connection = HTTPConnection("127.0.0.1", handlers.port, timeout=60)
    body = json.dumps({"do": "slow stream", "seconds": 30})
    connection.request("POST", "/invocations", body, {"content-type": "application/json"})
    before = time.monotonic()
    answer = connection.getresponse()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert time.monotonic() - before < 20
    connection.close()


@pytest.mark.parametrize("do", ["break", "exit amid"])
def test_a_stream_that_breaks_ends_its_connection(handlers: AppServer, do: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        handlers.post({"do": do})
    assert handlers.post({"a": 1}).status_code == 200


def test_a_background_task_that_fails_leaves_the_answer_as_it_is(handlers: AppServer) -> None:
    assert handlers.post({"do": "background"}).json() == "done"
    wait_for(lambda: "Expecting value" in handlers.log, 10, "the task's failure")
    assert "Exception in ASGI application" not in handlers.log


def test_one_response_for_all_requests_has_each_requests_own_id(handlers: AppServer) -> None:
    ids = [handlers.post({"do": "same"}, headers={"x-request-id": id}).headers["x-request-id"] for id in "12"]
    assert ids == ["1", "2"]


@pytest.mark.parametrize("do", ["wait", "wait amid"])
def test_a_handler_hears_that_its_client_has_gone(handlers: AppServer, do: str) -> None:
    with socket.create_connection(("127.0.0.1", handlers.port)) as connection:
        connection.sendall(post_bytes({"do": do}))
        if do == "wait amid":
            said = b""
            while b"one" not in said and (part := connection.recv(1 << 16)):  # the head comes first
                said += part
            assert b"one" in said
    wait_for(lambda: do in handlers.post({"do": "left"}).json(), 10, "the handler's end")


def test_a_body_is_read_within_the_servers_limits(handlers: AppServer) -> None:
    connection = HTTPConnection(handlers.url.removeprefix("http://"))
    connection.putrequest("POST", "/invocations")
    connection.putheader("content-length", str(1 << 40))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


# -- middleware --------------------------------------------------------------------------------------------------


def test_middleware_changes_requests_and_answers_of_all_paths(around: AppServer) -> None:
    found = around.post({"question": "a b", "parameters": {"max_new_tokens": 2}})
    assert (found.json(), found.headers["x-order"]) == ({"generated_text": " a b"}, "after throttle")
    assert (ping(around).status_code, ping(around).headers["x-order"]) == (200, "after throttle")


def test_a_wrong_length_of_middleware_is_put_right(around: AppServer) -> None:
    found = around.post({**BODY}, headers={"x-request-id": "length"})
    assert (found.json(), found.headers["content-length"]) == ({"generated_text": " a b"}, str(len(found.content)))
    assert "request length: custom code's Content-Length is wrong and is not sent" in around.log
    assert len(around.post({**BODY, "stream": True}, headers={"x-request-id": "length"}).text.splitlines()) == 2


def test_streams_pass_through_middleware(around: AppServer) -> None:
    found = around.post({**BODY, "stream": True})
    assert (len(found.text.splitlines()), found.headers["x-order"]) == (2, "after throttle")
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3}
    assert around.post(chat, "/v1/chat/completions").text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("body", "id", "message"), [({"fail": "before"}, "1", "before"), (BODY, "fail", "after")])
def test_middleware_that_raises_is_500_with_awss_body(
    around: AppServer, body: dict[str, Any], id: str, message: str
) -> None:
    found = around.post(body, headers={"x-request-id": id})
    error = "Internal server error in combined_pre_post_process middleware"
    assert (found.status_code, found.json()) == (500, {"error": error, "message": message})


def test_middleware_may_refuse_with_a_status_of_its_own(around: AppServer) -> None:
    found = around.post({"fail": "refuse"})
    error = {"message": "no prompt", "type": "Bad Request", "param": None, "code": 400}
    assert (found.status_code, found.json()) == (400, {"error": error})
    assert (found.headers["x-why"], found.headers["x-order"]) == ("prompt", "throttle")


def test_middleware_that_exits_ends_its_request_alone(around: AppServer) -> None:
    found = around.post({"fail": "exit"})
    assert (found.status_code, found.json()["message"]) == (500, "SystemExit: before")
    assert around.post(BODY).status_code == 200


def test_a_client_that_goes_is_noticed_behind_middleware(tmp_path: Path) -> None:
    properties = write_model(tmp_path, AROUND)
    slow = ("-o", "option.echo_tokens_per_second=1")
    with serve("--engine", "echo", "--properties", str(properties), *slow) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(post_bytes({"inputs": "a b", "parameters": {"max_new_tokens": 100}}))
            wait_for(lambda: _num_requests(server) == 1, 10, "the request")
        wait_for(lambda: _num_requests(server) == 0, 10, "its end")
        assert server.post({**BODY, "parameters": {"max_new_tokens": 1}}).status_code == 200
        assert "Traceback" not in server.log


def _num_requests(server: AppServer) -> int:
    found: int = http.get(server.url + "/load").json()["server_load"]
    return found


# -- precedence --------------------------------------------------------------------------------------------------

ALL = f"""
{STANDARDS}


async def custom_sagemaker_invocation_handler(request):
    return "by name"


def custom_sagemaker_ping_handler():
    return "ping by name"


@standards.custom_invocation_handler
def decorated(request):
    return "decorated"


class Named:
    @staticmethod
    async def method(request):
        return "by variable"
"""


@pytest.mark.parametrize(
    ("text", "variable", "wanted"),
    [
        (ALL.replace("@standards.custom_invocation_handler", ""), "", "by name"),
        (ALL, "", "decorated"),
        (ALL, "model.py:Named.method", "by variable"),
        (ALL, "model:Named.method", "by variable"),
        (ALL, "/v1/chat/completions", "decorated"),
    ],
)
def test_a_variable_beats_a_decorator_which_beats_a_name(tmp_path: Path, text: str, variable: str, wanted: str) -> None:
    properties = write_model(tmp_path, text)
    environment = {"CUSTOM_FASTAPI_INVOCATION_HANDLER": variable} if variable else {}
    with serve("--engine", "echo", "--properties", str(properties), env=environment) as server:
        assert server.post(BODY).json() == wanted
        assert ping(server).json() == "ping by name"


def test_variables_name_what_comes_before_and_after(tmp_path: Path) -> None:
    properties = write_model(tmp_path, AROUND)
    (tmp_path / "mine.py").write_text(
        "async def before(request):\n    request.scope['path'] = '/predictions/model'\n"
        "def after(response):\n    response.headers['x-order'] = 'variable '\n"
    )
    environment = {"CUSTOM_PRE_PROCESS": "mine.py:before", "CUSTOM_POST_PROCESS": f"{tmp_path}/mine.py:after"}
    with serve("--engine", "echo", "--properties", str(properties), env=environment) as server:
        found = server.post(BODY)
        assert (found.status_code, found.headers["x-order"]) == (200, "variable throttle")
    with serve(
        "--engine", "echo", "--properties", str(properties), env={"CUSTOM_POST_PROCESS": "mine.py:after"}
    ) as server:  # the pair of one source: no decorated function before
        assert server.post({"question": "a"}).status_code == 424


def test_another_script_may_be_named(tmp_path: Path) -> None:
    properties = write_model(tmp_path, "")
    (tmp_path / "script.py").write_text("def custom_sagemaker_ping_handler():\n    return 'script'\n")
    environment = {"CUSTOM_SCRIPT_FILENAME": "script.py"}
    with serve("--engine", "echo", "--properties", str(properties), env=environment) as server:
        assert ping(server).json() == "script"


def test_a_class_may_be_the_middleware(tmp_path: Path) -> None:
    text = """
from model_hosting_container_standards.common.fastapi.middleware import custom_middleware


@custom_middleware("pre_post_process")
class Refuse:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/invocations":
            raise KeyError("class")
        await self.app(scope, receive, send)
"""
    with serve("--engine", "echo", "--properties", str(write_model(tmp_path, text))) as server:
        found = server.post(BODY)
        assert (found.status_code, "custom code raised KeyError: 'class'" in found.text) == (500, True)
        assert server.post(BODY, "/predictions/model").status_code == 200


def test_keys_are_checked_before_any_custom_code(tmp_path: Path) -> None:
    properties = write_model(tmp_path, ALL)
    with serve("--engine", "echo", "--properties", str(properties), env={"LMI_API_KEY": "k" * 20}) as server:
        assert http.post(f"{server.url}/invocations", json=BODY).status_code == 401
        key = {"authorization": "Bearer " + "k" * 20}
        assert http.post(f"{server.url}/invocations", json=BODY, headers=key).json() == "decorated"
