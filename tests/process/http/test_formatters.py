"""A formatter that hangs does not hold up the process's end; the start's example leaves the body to a formatter."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from tests.app.test_formatters import BAD, ask
from tests.formatters_model import write_model
from tests.servers import http, serve, wait_for


def test_a_hung_formatter_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with serve("--engine", "echo", "--properties", str(write_model(tmp_path, BAD))) as server:
        with pytest.raises(httpx.ReadTimeout):
            http.post(server.url + "/invocations", json=ask("a", bad_input="sleep600"), timeout=0.5)
        server.send_signal(signal.SIGTERM)
        hint = "-d @body.json  # a body as the input formatter 'read' of model.py reads it\n"
        wait_for(lambda: hint in server.log, 5, "its example is another body")
        wait_for(lambda: "SIGTERM: stopping" in server.log, 5, "it does not hear the signal")
        server.send_signal(signal.SIGTERM)  # the second signal does not wait for what is under way
        assert server.wait(8) == 0  # before the formatter's ten seconds are up
