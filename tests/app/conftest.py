"""The echo engine's server, on a thread of each worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.server import serve
from tests.servers import LiveServer


@pytest.fixture(scope="session")
def echo_server() -> Iterator[LiveServer]:
    with serve("--engine", "echo") as server:
        yield server
