"""The model directory that all tests of this package serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))
