"""Chats with thoughts, messages and responses under DJL, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy import thoughts
from tests.djl.servers import DjlServer, djl, versions

pytestmark = pytest.mark.djl

ECHO = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo", "option.rolling_batch": "auto"}


@pytest.fixture(scope="module")
def server() -> Iterator[DjlServer]:
    with djl(versions()[-1], {**ECHO, **thoughts.OPTIONS}) as server:
        yield server


@pytest.mark.parametrize("name", thoughts.CASES)
def test_thoughts_come_apart(server: DjlServer, name: str) -> None:
    case = thoughts.CASES[name]
    headers = {"X-Amzn-SageMaker-Custom-Attributes": case.attributes}
    found = server.post(case.body, headers=headers)
    assert found.status_code == 200, found.text
    assert case.whole(found.json()) == [thoughts.THOUGHT, thoughts.TEXT]
    streamed = server.post({**case.body, "stream": True}, headers=headers)
    assert streamed.headers["content-type"] == case.stream_type
    assert case.streamed(streamed.text) == [thoughts.THOUGHT, thoughts.TEXT]
