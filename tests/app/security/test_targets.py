"""Request lines and Host headers that no client of the server sends (RFC 9112, section 3.2)."""

from __future__ import annotations

import random

import pytest

from tests.app.server import serve
from tests.one_test import in_one_test
from tests.servers import LiveServer, raw

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT")
PARTS = ("*", "/", "?", "#", ":", ";", "%", "%00", "%2e", "..", "\\", "@", "[", "]", "a", "ping", "v1/models", "http://",
         "127.0.0.1", ":80", "\x00", "\x7f", "é", "~")  # fmt: skip


def status(server: LiveServer, target: str, method: str = "GET", headers: str = "Host: 127.0.0.1\r\n") -> int:
    head = f"{method} {target} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n"
    answer = raw(server, head.encode("latin-1"), until=b"never")
    assert answer.startswith(b"HTTP/1.1 "), answer
    return int(answer[9:12])


def test_no_target_is_an_error_of_the_server(echo_server: LiveServer) -> None:
    draw = random.Random(1)
    drawn = ["".join(draw.choices(PARTS, k=draw.randint(0, 5))) for _ in range(300)]
    found = {(method, target): status(echo_server, target, method) for target in drawn for method in METHODS[:1]}
    found |= {(method, target): status(echo_server, target, method) for target in drawn[:40] for method in METHODS}
    found |= {(method, part): status(echo_server, part, method) for part in PARTS for method in METHODS}
    assert {pair: code for pair, code in found.items() if not 200 <= code < 500} == {}
    assert {200, 400, 404, 405} <= set(found.values())


@in_one_test(
    ("method", "target", "expected"),
    [
        ("OPTIONS", "*", 200),  # a health check of proxies
        ("GET", "*", 400),
        ("OPTIONS", "*?a", 400),
        ("GET", "**", 400),
        ("GET", "http://127.0.0.1/ping", 200),
        ("GET", "http://127.0.0.1", 200),
        ("GET", "http://user@127.0.0.1/ping", 400),
        ("GET", "127.0.0.1:80", 400),
        ("GET", "ping", 400),
        ("GET", "?a", 400),
    ],
)
def test_a_target_is_a_path_or_a_url_or_the_asterisk_of_options(
    echo_server: LiveServer, method: str, target: str, expected: int
) -> None:
    assert status(echo_server, target, method) == expected


@in_one_test(
    "headers",
    [
        "Host: 127.0.0.1\r\nHost: 127.0.0.1\r\n",
        "Host: 127.0.0.1\r\nhost: evil.example\r\n",
        "Host: \r\nHost: 127.0.0.1\r\n",
        "Host: 127.0.0.1, evil.example\r\n",
        "Host: 127.0.0.1/evil.example\r\n",
        "Host: user@127.0.0.1\r\n",
        "Host: 127.0.0.1:80:80\r\n",
        "Host: [::1\r\n",
    ],
)
def test_a_host_that_a_proxy_may_read_otherwise_is_refused(echo_server: LiveServer, headers: str) -> None:
    assert status(echo_server, "/ping", headers=headers) == 400
    assert status(echo_server, "/ping", headers=headers.replace("Host", "X-Host").replace("host", "x-host")) == 200


def test_the_host_of_a_url_counts_and_not_that_of_the_header(echo_server: LiveServer) -> None:
    """A cache or a proxy in front reads it so."""
    url = "http://{}/v1/models"
    assert status(echo_server, url.format("evil.example")) == 403
    assert status(echo_server, url.format("localhost:1"), headers="Host: evil.example\r\n") == 200
    assert status(echo_server, "/v1/models", headers="Host: evil.example\r\n") == 403


@pytest.mark.parametrize(("method", "target", "expected"), [("OPTIONS", "*", 200), ("OPTIONS", "/v1/models", 401)])
def test_the_asterisk_needs_no_key(method: str, target: str, expected: int) -> None:
    with serve("--engine", "echo", "--api-key", "k") as server:
        assert status(server, target, method) == expected
