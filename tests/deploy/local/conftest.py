from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.local.servers import Local, Loop
from tests.deploy.local.servers import local as make_local


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def local(loop: Loop) -> Iterator[Local]:
    """The emulator with everything as it is by default."""
    with make_local(loop) as made:
        yield made
