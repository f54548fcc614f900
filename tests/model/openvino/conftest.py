"""The demo model as OpenVINO's files, and a core for what computes with it in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.engines.base import EngineConfig
from handler.engines.openvino.model import prepare
from tests.servers import one_core


@pytest.fixture(scope="session")
def model(demo_model: Path) -> Path:
    return prepare(str(demo_model), EngineConfig())


@pytest.fixture(scope="module", autouse=True)
def own_core() -> Iterator[None]:
    """Have engines compute on one core, as those of servers do."""
    with one_core():
        yield
