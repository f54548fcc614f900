"""The model behind all agents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.agents.scripted import Model, scripted


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with scripted(tmp_path_factory.mktemp("model")) as model:
        yield model
