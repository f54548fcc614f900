"""SageMaker Runtime's emulator before a server, as `lmi deploy local` has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import Runtime
from tests.deploy.local.servers import Loop
from tests.servers import LiveServer

OTHER = "Endpoint other of account 000000000000 not found."
"""What SageMaker says of one that there is not."""


@contextlib.contextmanager
def emulated(server: LiveServer, **endpoint: Any) -> Iterator[str]:
    """The runtime's URL; the endpoint is called `local`."""
    server.wait_ready()
    loop = Loop()
    try:
        with loop.serving(Runtime(Endpoint(server.url, **endpoint)).app()) as url:
            yield url
    finally:
        loop.close()
