"""Clients that offer HTTP/2 with each request: the JDK's own HttpClient, by default, and `curl --http2`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.servers import LiveServer

pytestmark = pytest.mark.clients

PROGRAM = Path(__file__).parent / "scripts" / "HttpClientRequests.java"
ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


def test_javas_http_client_makes_ten_of_ten_requests(echo_server: LiveServer) -> None:
    """Whole answers, streams and GETs on one client, which keeps its connection; a line of a prompt stays in it."""
    done = subprocess.run(["java", str(PROGRAM), echo_server.url], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    whole, stream, plain = '200 {"generated_text":" a b a"}', "200 3 lines", "200 [a, Upgrade:, x, b]"
    assert done.stdout.splitlines() == [whole, stream, '200 {"status":"Healthy","state":"ready"}', plain, whole] * 2


def test_curl_with_two_urls(echo_server: LiveServer) -> None:
    command = ["curl", "--silent", "--show-error", "--http2", "--verbose", "--data", json.dumps(ASK)]
    urls = [f"{echo_server.url}/invocations", f"{echo_server.url}/predictions/model"]
    done = subprocess.run([*command, *urls], capture_output=True, text=True, timeout=120)
    assert done.stdout == '{"generated_text":" a b a"}' * 2
    assert done.stderr.count("> Upgrade: h2c") >= 1
    assert "Re-using existing connection" in done.stderr
