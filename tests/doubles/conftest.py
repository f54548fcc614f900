"""The double of each version, and the model that it loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles import tiny, using
from tests.doubles.using import Double


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["1.0.0", "1.1.0", "1.2.1", "1.3.0rc29"])
def each(request: pytest.FixtureRequest, model: Path) -> Iterator[Double]:
    with using.tensorrt_llm(f"version={request.param}"):
        found = Double(model)
        yield found
        found.llm.shutdown()


@pytest.fixture
def now(model: Path) -> Iterator[Double]:
    """1.2.1."""
    with using.tensorrt_llm():
        found = Double(model)
        yield found
        found.llm.shutdown()
