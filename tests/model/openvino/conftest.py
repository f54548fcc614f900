"""The demo model as OpenVINO's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from handler.engines.openvino.model import prepare_model


@pytest.fixture(scope="session")
def model(demo_model: Path) -> Path:
    return prepare_model(str(demo_model), "auto")
