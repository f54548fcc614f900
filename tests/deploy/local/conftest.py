from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.emulator.store import Store
from tests.deploy.local.servers import Local, Loop
from tests.deploy.local.servers import local as make_local


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def local(loop: Loop, tmp_path: Path) -> Iterator[Local]:
    """The emulator with everything as it is by default, and `tmp_path/s3` as S3."""
    with make_local(loop, Store(tmp_path / "s3")) as made:
        yield made
