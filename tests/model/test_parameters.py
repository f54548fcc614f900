"""The parameters of docs/wire/ on the demo model: OpenVINO takes those that the tables do not refuse."""

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


def test_the_models_own_defaults_hold_where_a_chat_names_none(demo_model: Path) -> None:
    """Of all tokens the most likely: so the engine has got the override's `top_k`, and a client may say otherwise."""
    override = 'option.override_generation_config={"top_k": 1, "max_new_tokens": 12}'
    with serve(str(demo_model), "-o", override) as server:

        def answers(**fields: object) -> set[str]:
            asked = {"messages": [{"role": "user", "content": "Tell me a story."}], **fields}
            replies = [server.post({**asked, "seed": seed}, "/v1/chat/completions").json() for seed in range(4)]
            assert all(reply["usage"]["completion_tokens"] <= 12 for reply in replies)
            return {reply["choices"][0]["message"]["content"] for reply in replies}

        greedy = answers(temperature=0)
        assert answers() == answers(max_tokens=50) == greedy
        assert len(greedy) == 1
        assert len(answers(top_k=0)) > 1
