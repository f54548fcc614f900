"""Other origins: CORS, and requests whose Host header names another machine."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.http.security import Access, AllowedHosts, read_access
from handler.protocols.registry import routes
from tests.app.server import serve
from tests.one_test import in_one_test
from tests.servers import LiveServer, dechunked, http, post_bytes, raw

# -- CORS: off, on for some, on for all; and that a stream's chunks are what they are without it -----------------------


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


@pytest.mark.parametrize(
    ("task", "path", "body"),
    [("text-generation", "/generate", ASK), ("text-embedding", "/embed", {"inputs": "a b"})],
    ids=["tgi", "tei"],
)
def test_a_page_may_read_each_header_of_a_response(task: str, path: str, body: dict[str, object]) -> None:
    with serve("--engine", "echo", "-o", f"option.task={task}", "--allow-origin", "*") as server:
        response = http.post(server.url + path, json=body, headers={"origin": HOME})
    assert response.status_code == 200
    own = {name for name in response.headers if name.startswith("x-")}
    assert own - {"x-request-id"} == {*routes("tgi", Task(task))[path].response_headers}
    assert own <= {*response.headers["access-control-expose-headers"].split(", ")}


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


# -- allowed hosts -----------------------------------------------------------------------------------------------------
# DNS rebinding: without keys and on loopback, only requests whose Host header names this machine are answered.


OWN = [
    "", "localhost", "localhost:8080", "LocalHost:1", "127.0.0.1", "127.0.0.1:8080", "127.8.9.10:80", "[::1]",
    "[::1]:8080", "localhost:", "localhost.:80",
]  # fmt: skip
FOREIGN = [
    "evil.example", "evil.example:8080", "localhost.evil.example", "evil.localhost.example", "10.0.0.1", "[::2]:80",
    "128.0.0.1", "127.0.0.1.evil.example", "2130706433", "0.0.0.0", "localhost@evil.example", "localhost:80:80",
    "[::1", "a b", ":80", "\u00e9",
]  # fmt: skip


def hosts(*allowed: str, keys: tuple[str, ...] = (), host: str = "127.0.0.1", at: str = "127.0.0.1") -> AllowedHosts:
    return AllowedHosts.of(Access(keys=keys, hosts=frozenset(allowed)), host, at)


@in_one_test("header", OWN)
@in_one_test("at", ["127.0.0.1", "127.0.1.1", "::1"])
def test_names_of_this_machine(at: str, header: str) -> None:
    assert hosts(at=at).admits(header)


@in_one_test("header", FOREIGN)
@in_one_test("at", ["127.0.0.1", "127.0.1.1", "::1"])
def test_other_names(at: str, header: str) -> None:
    assert not hosts(at=at).admits(header)


def test_the_host_that_it_was_told_to_listen_on() -> None:
    assert hosts(host="MyMachine", at="127.0.1.1").admits("mymachine:8080")


@in_one_test(
    "other",
    [hosts("*"), hosts(keys=("one",)), hosts(at="0.0.0.0", host="0.0.0.0"), hosts(at="::"), hosts(at="10.0.0.1")],
)
def test_where_any_is_served(other: AllowedHosts) -> None:
    """A rebound page knows no key; a container, which listens on all addresses, has names that it cannot know."""
    assert all(other.admits(header) for header in OWN + FOREIGN)


@pytest.mark.parametrize(("keys", "at"), [((), "127.0.0.1"), (("one",), "127.0.0.1"), ((), "0.0.0.0")])
def test_those_that_are_named_are_served_beside(keys: tuple[str, ...], at: str) -> None:
    """Naming some says that others are not wanted, wherever it listens."""
    some = hosts("a.example", "10.0.0.1", "fe80::1", keys=keys, at=at)
    assert all(some.admits(header) for header in [*OWN, "A.example", "a.example:80", "10.0.0.1:80", "[fe80::1]:80"])
    assert not any(some.admits(header) for header in ["b.a.example", "b.example", "10.0.0.2"])


@pytest.mark.parametrize("header", ["evil.example:8080", "evil.example", "[fe80::1]:80", "[fe80::1]"])
def test_the_refusal_names_the_option_that_would_serve_it(header: str) -> None:
    option, name = AllowedHosts.refusal(header).split()[-2:]
    assert option == "--allow-host"
    assert hosts(*read_access(hosts=[name], environ={}).hosts).admits(header)


def test_what_the_command_line_takes() -> None:
    assert read_access(hosts=["A.example", "[::2]", "*", "10.0.0.1"], environ={}).hosts == {
        "a.example", "::2", "*", "10.0.0.1"
    }  # fmt: skip
    for wrong in ("", "http://a.example", "a.example:80", "a.example/x", "a b", "*.example"):
        with pytest.raises(ConfigError, match="--allow-host"):
            read_access(hosts=[wrong], environ={})


# -- the server --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serve("--engine", "echo", "--allow-host", "models.example") as server:
        yield server


def ask(server: LiveServer, host: str | None, path: str = "/ping", method: str = "GET") -> bytes:
    line = "" if host is None else f"Host: {host}\r\n"
    return raw(server, f"{method} {path} HTTP/1.1\r\n{line}Connection: close\r\n\r\n".encode(), until=b"never")


@in_one_test("host", ["localhost:9000", "127.0.0.1", "[::1]:8080", "", None])
def test_local_requests_are_answered_also_through_a_forwarded_port(echo_server: LiveServer, host: str | None) -> None:
    assert ask(echo_server, host)[9:12] == b"200"


@in_one_test(
    ("method", "path"),
    [("GET", "/ping"), ("POST", "/invocations"), ("GET", "/"), ("OPTIONS", "/invocations"), ("GET", "/x")],
)
def test_a_rebound_page_is_told_no_on_every_route(echo_server: LiveServer, method: str, path: str) -> None:
    found = ask(echo_server, "evil.example:8080", path, method)
    assert found[9:12] == b"403"
    assert b"--allow-host evil.example" in found
    assert b'"type":"ForbiddenException"' in found


def test_a_host_that_is_allowed_is_answered(server: LiveServer) -> None:
    assert [ask(server, host)[9:12] for host in ("models.example", "localhost", "other.example")] == [
        b"200", b"200", b"403"
    ]  # fmt: skip


def test_all_addresses_are_unaffected() -> None:
    with serve("--engine", "echo", "--host", "0.0.0.0") as server:
        found = http.get(f"http://127.0.0.1:{server.port}/ping", headers={"host": "container.internal"})
        assert found.status_code == 200
