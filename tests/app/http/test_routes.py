"""Routes beside inference: /tokenize, the headers of refusals, and the files of the pages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.core.errors import InvalidPayload, ServingError
from handler.core.framing import Framing
from handler.http.routes import ASSETS
from handler.http.server import StartingApp
from handler.protocols import registry
from handler.protocols.anthropic.dialect import AnthropicCountTokens
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Dialect, ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat, FrontEndErrors, Headers
from handler.protocols.lmi.api import LmiErrors
from handler.protocols.tgi.native import CHAT_TOKENIZE, TOKENIZE
from handler.serving.admission import TOKENIZER_THREADS
from handler.serving.model import ServedModel
from handler.serving.request.stages import MOST_TOKENIZING
from handler.serving.request.task import RequestTask
from tests.app.server import AppServer, serve
from tests.servers import PATIENCE, http, raw
from tests.services import echo_service
from tests.stepped import requests_ended

# -- tokenizing --------------------------------------------------------------------------------------------------------
# /tokenize, /chat_tokenize and count_tokens beside inference: how many at a time, and what is counted of them.


CHAT = {"messages": [{"role": "user", "content": "a"}]}


async def ask(service: ServedModel, schema: Dialect, body: Any) -> tuple[int, Any]:
    finished = asyncio.Event()

    def on_bytes(task: RequestTask) -> None:
        if task.finished:
            finished.set()

    task = service.open({}, schema, on_bytes=on_bytes)
    task.begin(task.run(json.dumps(body).encode()))
    if not task.finished:
        await finished.wait()
    answer = task.take_whole()
    return answer.status, json.loads(answer.body)


def test_what_is_beyond_the_bound_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "handler.request")

    async def story() -> None:
        service = await echo_service()
        free, tokenize = threading.Event(), service.preprocessor.encoder.tokenize

        def held(*arguments: Any) -> Any:
            free.wait(PATIENCE)
            return tokenize(*arguments)

        monkeypatch.setattr(service.preprocessor.encoder, "tokenize", held)
        service.admission.tokenize_inline = 0  # on threads
        first = [asyncio.ensure_future(ask(service, TOKENIZE, {"inputs": "a"})) for _ in range(MOST_TOKENIZING)]
        await asyncio.sleep(0.01)
        said = {"error": "Model is overloaded", "error_type": "overloaded"}
        assert await ask(service, TOKENIZE, {"inputs": "a"}) == (429, said)
        assert await ask(service, CHAT_TOKENIZE, CHAT) == (429, said)
        assert (await ask(service, AnthropicCountTokens(), {**CHAT, "model": "model"}))[0] == 529
        free.set()
        assert [status for status, _ in await asyncio.gather(*first)] == [200] * MOST_TOKENIZING
        assert (await ask(service, TOKENIZE, {"inputs": "a"}))[0] == 200, "their places are free again"
        assert (await ask(service, TOKENIZE, {"inputs": ""}))[0] == 422
        counts = [requests_ended(service.metrics, outcome) for outcome in ("ok", "overloaded", "refused")]
        assert counts == [MOST_TOKENIZING + 1, 3, 1]
        service.close()

    asyncio.run(story())
    outcomes = [record.getMessage().split("outcome=")[1].split()[0] for record in caplog.records]
    assert sorted(outcomes) == ["ok"] * (MOST_TOKENIZING + 1) + ["overloaded"] * 3 + ["refused"]


@pytest.mark.parametrize(("schema", "beside"), [(TOKENIZE, 0), (CHAT_TOKENIZE, 1)])
def test_a_long_answer_is_made_in_parts_that_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch, schema: Dialect, beside: int
) -> None:
    encoded: list[Any] = []
    encode = Framing.encode

    def note(self: Framing, value: Any) -> bytes:
        encoded.append(value)
        return encode(self, value)

    monkeypatch.setattr(Framing, "encode", note)
    words = [f"w{number % 997}" for number in range(10_000)]
    text = " ".join(words)
    body = {"inputs": text} if schema is TOKENIZE else {"messages": [{"role": "user", "content": text}]}

    async def story() -> tuple[int, Any]:
        service = await echo_service()
        answer = await ask(service, schema, body)
        service.close()
        return answer

    status, value = asyncio.run(story())
    assert status == 200
    tokens = value["tokenize_response"] if beside else value
    said = [token["text"].strip() for token in tokens]
    assert said == (["user:", *words, "assistant:"] if beside else words)
    data = (value["templated_text"] if beside else text).encode()
    assert all(data[token["start"] : token["stop"]].decode() == token["text"] for token in tokens)
    sizes = [len(part) for part in encoded if isinstance(part, list)]
    assert sum(sizes) == len(tokens)
    assert max(sizes) <= 1024, "JSON is made while the GIL is held, which the event loop needs"


@pytest.mark.parametrize(("size", "owner"), [(70_000, "ann"), (500_001, "bob")], ids=["short", "of another key"])
def test_long_prompts_of_one_client_do_not_hold_up_another(size: int, owner: str) -> None:
    async def story() -> list[int]:
        service = await echo_service()
        free, done = threading.Event(), list[int]()

        def work(size: int) -> None:
            free.wait(PATIENCE)
            done.append(size)

        calls = [*[(500_000, "ann")] * 20, (size, owner)]
        works = [asyncio.ensure_future(service.admission.run(one, partial(work, one), whose)) for one, whose in calls]
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*works)
        service.close()
        return done

    assert asyncio.run(story()).index(size) <= TOKENIZER_THREADS + 1


# -- error headers -----------------------------------------------------------------------------------------------------
# A header that a dialect's errors declare stands on each of its refusals, wherever the request was turned away.


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

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
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
        ("GET", "/metrics/x", 404),
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


# -- the files of the pages: vendored libraries are their packages' own ------------------------------------------------


STATIC = ASSETS["/page/icon.svg"].parent
VENDOR = {name.removeprefix("/page/vendor/"): path for name, path in ASSETS.items() if "/vendor/" in name}


def test_vendored_files_are_those_of_the_packages() -> None:
    text = (STATIC / "vendor" / "README.txt").read_text()
    sums = dict(re.findall(r"^(\S+) .* ([0-9a-f]{64})$", text, re.MULTILINE))
    assert sums == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in VENDOR.items()}
    for name in VENDOR:
        assert (STATIC / "vendor" / f"{re.split('[./]', name)[0]}.LICENSE.txt").is_file()


def test_the_pages_are_small() -> None:
    of_docs = (STATIC / "docs.html", STATIC / "docs.js")
    shared = [STATIC / name for name in ("client.js", "dom.js", "icon.svg", "style.css", "theme.js")]
    chat = {*ASSETS.values(), STATIC / "index.html"}.difference(of_docs)
    assert sum(path.stat().st_size for path in chat) < 400_000
    assert sum(path.stat().st_size for path in (*of_docs, *shared)) < 40_000
