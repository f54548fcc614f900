"""What a server says to its operator."""

from __future__ import annotations

import signal
from typing import Any
from unittest import mock

import pytest

from handler.http.security import Access
from handler.http.server import HttpServer, _reader
from handler.plugins.aws import Handlers
from handler.plugins.functions import Formatters


def test_a_stop_tells_how_long_answers_may_take(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    app: Any = mock.Mock(num_requests=2)
    HttpServer(app, Access(), keep_alive_timeout=75).signalled(signal.SIGTERM)
    assert "SIGTERM: stopping; responses to finish: 2, within 20 s; a second signal ends them at once" in caplog.text


@pytest.mark.parametrize(
    ("handlers", "named"),
    [(Handlers(invoke=print), "your custom handler"), (Handlers(ping=print), ""), (None, "")],
)
def test_what_reads_a_body_is_named(handlers: Handlers | None, named: str) -> None:
    assert _reader(Formatters(handlers=handlers)) == named
