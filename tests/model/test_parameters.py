"""The column of OpenVINO in docs/wire/, on the demo model: what is supported, the engine takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import parameter_matrix as matrix
from tests.app.server import serve
from tests.parameter_matrix import (
    ALL,
    CHAT_VALUES,
    MINDIE_VALUES,
    TGI_VALUES,
    check,
    check_chat,
    check_guide,
    check_tgi,
)
from tests.servers import LiveServer

pytestmark = pytest.mark.model


@pytest.mark.parametrize("name", CHAT_VALUES)
def test_chat_on_openvino(model_server: LiveServer, name: str) -> None:
    check_chat(model_server, "openvino", name)


@pytest.mark.parametrize("name", matrix.OBEYS)
def test_answers_follow_their_guides_on_openvino(model_server: LiveServer, name: str) -> None:
    check_guide(model_server, name)


@pytest.mark.parametrize("name", ALL)
def test_openvino(model_server: LiveServer, name: str) -> None:
    check(model_server, "openvino", name)


@pytest.mark.parametrize("name", TGI_VALUES)
def test_tgi_on_openvino(model_server: LiveServer, name: str) -> None:
    check_tgi(model_server, "openvino", name)


@pytest.fixture(scope="module")
def mindie_server(demo_model: Path) -> Iterator[LiveServer]:
    with serve(str(demo_model), "-o", "option.root_schema=mindie") as server:
        yield server


@pytest.mark.parametrize("name", MINDIE_VALUES)
def test_mindie(mindie_server: LiveServer, name: str) -> None:
    check_tgi(mindie_server, "openvino", name, heading=matrix.MINDIE)
