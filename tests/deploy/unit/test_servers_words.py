"""What comes from a server: a redirect gets no token, and a terminal no control characters."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from deploy.cli import operate
from deploy.cli.main import print_error
from deploy.cli.views import out, say, table
from deploy.errors import DeployError
from deploy.operations import logs
from deploy.preflight.checks import over_the_network
from handler.core.terminal import escaping


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def redirecting(to: str = "") -> Iterator[tuple[str, list[str | None]]]:
    """A server that redirects, or answers if it has no address, and the Authorization of its requests."""
    came: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            came.append(self.headers.get("Authorization"))
            self.send_response(307 if to else 200)
            if to:
                self.send_header("Location", to)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", came
        server.shutdown()


def test_a_redirect_of_a_registry_gets_no_token() -> None:
    with redirecting() as (store, stored), redirecting(store) as (registry, asked):
        assert over_the_network("GET", registry, {"Authorization": "Bearer token", "Accept": "a/b"}) == (200, b"")
    assert (asked, stored) == (["Bearer token"], [None])


@pytest.mark.parametrize("where", ["error", "advice", "log", "line", "table"])
def test_a_terminal_gets_no_control_characters(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, said = Terminal(), "a\x1b]0;title\x07"
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")  # without colours
    with escaping():
        match where:
            case "error":
                print_error(DeployError(said))
            case "advice":
                print_error(DeployError("failed", said))
            case "log":
                operate.show_line(logs.LogLine(0, "AllTraffic/i-1", said))
            case "table":
                out().print(table(["a"], [[said]]))
            case _:
                say(Console(file=terminal, width=80, color_system=None), said)
    assert r"a\u001b]0;title" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()
