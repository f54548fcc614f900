"""CORS: off, on for some, on for all; and that a stream's chunks are what they are without it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.app.server import serve
from tests.servers import LiveServer, dechunked, http, post_bytes, raw

ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}
FORM = b'{"inputs":"a","parameters":{"max_new_tokens":2}}'
HOME = "https://app.example.com"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def some() -> Iterator[LiveServer]:
    origins = ("--allow-origin", HOME, "--allow-origin", "http://localhost:3000")
    with serve("--engine", "echo", *origins, env={"LMI_API_KEY": "k"}) as server:
        yield server


@pytest.fixture(scope="module")
def everyone() -> Iterator[LiveServer]:
    pace = ("-o", "option.echo_tokens_per_second=50")  # a chunk a token
    with serve("--engine", "echo", *pace, "--allow-origin", "*") as server:
        yield server


def cors(found: httpx.Response) -> set[str]:
    return {name for name in found.headers if name.startswith("access-control-")}


def test_off_unless_asked_for(echo_server: LiveServer) -> None:
    found = echo_server.post(ASK, headers={"origin": HOME})
    assert (found.status_code, cors(found), "vary" in found.headers) == (200, set(), False)
    asked = http.options(echo_server.url + "/invocations", headers={"origin": HOME, **PREFLIGHT})
    assert (asked.json(), cors(asked)) == ({}, set())  # as DJL answers OPTIONS


@pytest.mark.parametrize("origin", [HOME, "http://localhost:3000", HOME.upper()])
def test_a_preflight_needs_no_key(some: LiveServer, origin: str) -> None:
    found = http.options(some.url + "/invocations", headers={"origin": origin, **PREFLIGHT})
    assert (found.status_code, found.content) == (204, b"")
    assert found.headers["access-control-allow-origin"] == origin
    assert found.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in found.headers["access-control-allow-methods"]
    assert found.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in found.headers


@pytest.mark.parametrize("origin", ["https://evil.example.com", "null", HOME + ".evil.com", HOME.replace("s:", ":")])
def test_others_are_told_nothing(some: LiveServer, origin: str) -> None:
    found = http.options(some.url + "/invocations", headers={"origin": origin, **PREFLIGHT})
    assert (found.status_code, cors(found)) == (403, set())
    answered = some.post(ASK, headers={"origin": origin, "authorization": "Bearer k"})
    assert (answered.status_code, cors(answered), answered.headers["vary"]) == (200, set(), "origin")


def test_answers_and_refusals_may_be_read(some: LiveServer) -> None:
    for headers, status in (({"authorization": "Bearer k"}, 200), ({}, 401)):
        found = some.post({**ASK, "x": 1}, headers={"origin": HOME, **headers})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (status, HOME)
        exposed = found.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-lmi-ignored-parameters", "x-compute-time", "x-generated-tokens"} <= {*exposed}
        assert {f"x-amzn-sagemaker-{kind}session-id" for kind in ("", "new-", "closed-")} <= {*exposed}
    assert http.get(some.url + "/nowhere", headers={"origin": HOME}).headers["access-control-allow-origin"] == HOME
    assert some.post(ASK).headers["vary"] == "origin"  # a cache must not give it to a page


def test_everyone(everyone: LiveServer) -> None:
    found = everyone.post(ASK, headers={"origin": "https://any.where"})
    assert found.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in found.headers
    assert "vary" not in found.headers
    assert http.options(everyone.url + "/", headers={"origin": "null", **PREFLIGHT}).status_code == 204
    assert http.options(everyone.url + "/invocations", headers={"origin": "null"}).json() == {}  # no preflight


def test_a_stream_is_the_same_but_for_its_head(everyone: LiveServer) -> None:
    request = (
        post_bytes({**ASK, "stream": True}),
        post_bytes({**ASK, "stream": True}, headers="Origin: https://a.b\r\n"),
    )
    plain, crossed = (raw(everyone, one).partition(b"\r\n\r\n") for one in request)
    assert dechunked(plain[2]) == dechunked(crossed[2])
    assert b"access-control-allow-origin: *" in crossed[0]
    assert b"access-control" not in plain[0]


def test_header_names_that_are_none_are_not_sent_back(everyone: LiveServer) -> None:
    headers = {"origin": "https://a.b", **PREFLIGHT, "access-control-request-headers": 'x"<script>'}
    assert "access-control-allow-headers" not in http.options(everyone.url + "/", headers=headers).headers


@pytest.mark.parametrize("path", ["/invocations", "/generate", "/adapters?name=x&src=y"])
def test_a_foreign_page_cannot_send_what_a_form_could(echo_server: LiveServer, path: str) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    foreign = http.post(echo_server.url + path, headers={**form, "origin": HOME}, content=FORM)
    assert (foreign.status_code, foreign.json()["type"]) == (403, "ForbiddenException")
    own = http.post(echo_server.url + path, headers={**form, "origin": echo_server.url}, content=FORM)
    assert own.status_code != 403


def test_an_origin_that_is_let_in_may_send_a_form(everyone: LiveServer) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded", "origin": HOME}
    assert http.post(everyone.url + "/invocations", headers=headers, content=b'{"inputs":"a"}').status_code == 200
