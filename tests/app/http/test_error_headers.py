"""A header that a dialect's errors declare stands on each of its refusals, wherever the request was turned away."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.core.errors import InvalidPayload, ServingError
from handler.http.startup import StartingApp
from handler.protocols import registry
from handler.protocols.kernel.dialect import Dialect, ParsedRequest, ServerContext
from handler.protocols.kernel.errors import ErrorFormat, FrontEndErrors, Headers
from handler.protocols.lmi.api import LmiErrors
from tests.app.server import AppServer, serve
from tests.servers import http, raw

KEY = {"authorization": "Bearer secret"}
HEADER = "x-trial"


def _named(self: ErrorFormat, error: ServingError) -> Headers:
    return ((HEADER, f"{type(self).__name__} {self.status(error)}"),)


class TrialErrors(FrontEndErrors):
    def headers(self, error: ServingError) -> Headers:
        return ((HEADER, "trial"),)


class Trial(Dialect):
    """One route, which refuses every body."""

    name = "trial"
    errors = TrialErrors()

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        raise InvalidPayload("never")


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    options = ("--api-key", "secret", "-o", "max_request_size=1000", "--allow-host", "127.0.0.1")
    with contextlib.ExitStack() as stack:
        with mock.patch.dict(registry.ROUTES, {"/trial": Trial()}):  # other modules' servers start beside this one
            server = stack.enter_context(serve("--engine", "echo", *options))
        yield server


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all errors declare the header, those too that have headers already."""
    for format in _formats(ErrorFormat):
        if "headers" in vars(format):
            monkeypatch.setattr(format, "headers", _named)


def _formats(format: type[ErrorFormat]) -> Iterator[type[ErrorFormat]]:
    yield format
    for below in format.__subclasses__():
        yield from _formats(below)


PATHS = ["/invocations", "/", "/trial", *(path for path in registry.ROUTES if "{" not in path)]
REFUSALS: dict[str, dict[str, Any]] = {
    "no JSON": {"content": b"{"},
    "no known field": {"json": {"nothing": 1}},
    "media type": {"content": b"a", "headers": {"content-type": "audio/wav"}},
    "encoding": {"content": b"{}", "headers": {"content-encoding": "br"}},
    "too large": {"content": b" " * 1001},
    "no key": {"json": {}, "headers": {"authorization": "Bearer wrong"}},
    "method": {"method": "PUT"},
    "host": {"json": {}, "headers": {"host": "evil.example"}},
    "forgery": {"content": b"a=1", "headers": {"origin": "http://evil.example", "content-type": "text/plain"}},
    "route": {"json": {}, "headers": {"x-amzn-sagemaker-custom-attributes": "route=/nowhere"}},
}


def _ask(server: AppServer, path: str, method: str = "POST", headers: Any = None, **more: Any) -> httpx.Response:
    return http.request(method, f"{server.url}{path}", headers={**KEY, **(headers or {})}, **more)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("refusal", REFUSALS)
def test_every_refusal_on_every_route_has_its_dialects_headers(server: AppServer, refusal: str) -> None:
    refused = 0
    for path in PATHS:
        answer = _ask(server, path, **REFUSALS[refusal])
        if answer.status_code == 200 and "event-stream" not in answer.headers["content-type"]:
            continue  # this dialect takes it
        found = answer.headers.get_list(HEADER)
        assert len(found) == 1, f"{path}: {answer.status_code} has the header {len(found)} times: {answer.text}"
        assert re.fullmatch(r"\w+Errors \d{3}", found[0]), f"{path}: {found[0]}"
        refused += 1
    assert refused >= (1 if refusal == "route" else len(PATHS) - 3)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/models/other", 404),
        ("GET", "/v2/models/other", 404),
        ("POST", "/v2/models/other/generate", 404),
        ("GET", "/adapters", 400),
        ("PUT", "/ping", 405),
    ],
)
def test_so_has_a_route_without_inference(server: AppServer, method: str, path: str, status: int) -> None:
    answer = _ask(server, path, method)
    assert (answer.status_code, HEADER in answer.headers) == (status, True), answer.text


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("head", [b"\x00 no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"x" * 70_000 + b"\r\n\r\n"])
def test_so_has_a_head_that_cannot_be_read(server: AppServer, head: bytes) -> None:
    assert f"\r\n{HEADER}: ServerErrors 4".encode() in raw(server, head, until=b"}")


@pytest.mark.usefixtures("named")
def test_so_has_a_server_that_starts() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body is not read")

    asyncio.run(_call(StartingApp("model"), {"path": "/invocations", "headers": []}, receive, send))
    assert (HEADER.encode(), b"FrontEndErrors 503") in sent[0]["headers"]


async def _call(app: StartingApp, *arguments: Any) -> None:
    await app(*arguments)


def test_one_line_in_a_dialects_errors_is_enough(server: AppServer) -> None:
    for refusal in ("no JSON", "no known field", "media type", "too large", "no key", "method"):
        answer = _ask(server, "/trial", **REFUSALS[refusal])
        assert answer.headers[HEADER] == "trial", (refusal, answer.text)


def test_lmis_errors_alone_have_a_header_of_lmi(monkeypatch: pytest.MonkeyPatch, server: AppServer) -> None:
    monkeypatch.setattr(LmiErrors, "headers", lambda self, error: ((HEADER, "lmi"),))
    for body in ({"inputs": 1}, {"inputs": "a", "parameters": {"top_p": 2}, "stream": True}):
        assert server.post(body, headers=KEY).headers[HEADER] == "lmi"
        assert HEADER not in server.post(body, "/generate", headers=KEY).headers
    assert HEADER not in server.post({"inputs": "a"}, headers=KEY).headers
