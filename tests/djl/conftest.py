"""Leaves the oldest DJL to the night, but for the tables of requests and of the worker's messages."""

from __future__ import annotations

import pytest

from tests.djl import jars

_EACH = ("test_requests.py", "test_wire.py")
"""What Java and the worker say to one another differs most by the version."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if jars.VERSIONS[0] in item.name and item.path.name not in _EACH:
            item.add_marker(pytest.mark.nightly)
