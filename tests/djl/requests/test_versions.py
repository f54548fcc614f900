"""The DJL Serving that runs the handler is LMI's release, unless option.lmi_version names another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.djl.servers import DjlServer, djl, newer, versions

pytestmark = pytest.mark.djl

ECHO = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo"}
ROLLING = {**ECHO, "option.rolling_batch": "scheduler"}
SAMPLED: dict[str, Any] = {"inputs": "a b", "parameters": {"temperature": 0.7, "max_new_tokens": 2}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a " * 40}]}


@pytest.fixture(scope="module", params=versions())
def rolling(request: pytest.FixtureRequest) -> Iterator[tuple[str, DjlServer]]:
    with djl(request.param, ROLLING, own_release=True) as found:
        yield request.param, found


def test_a_temperature_samples_as_in_the_djl_serving_that_runs_the_handler(rolling: tuple[str, DjlServer]) -> None:
    version, server = rolling
    names = server.post(SAMPLED).headers.get("x-lmi-ignored-parameters")
    if newer(version, "0.28"):  # which lets the header pass
        assert names == (None if newer(version, "0.32") else "parameters.temperature")
    assert ("option.lmi_version=0.32" in server.log) is not newer(version, "0.32")


def test_a_chat_has_its_length(rolling: tuple[str, DjlServer]) -> None:
    version, server = rolling
    assert (server.post(CHAT).json()["usage"]["completion_tokens"] > 30) is newer(version, "0.32")


@pytest.mark.parametrize("version", versions())
def test_a_dynamic_batch_has_its_texts(version: str) -> None:
    off = {"option.rolling_batch": "disable"} if newer(version, "0.28") else {}  # which 0.25 steps all the same
    with djl(version, {**ECHO, **off}, own_release=True) as server:
        (found,) = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 2}}).json()
        assert found["generated_text"] == ("a b a b" if newer(version, "0.29") else " a b")


@pytest.mark.parametrize("version", versions("0.33"))
def test_async_mode_has_its_schema(version: str) -> None:
    properties = {**ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}
    with djl(version, properties, own_release=True) as server:
        answer = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 1, "details": True}}).json()
        assert answer["details"]["prefill"] == []
        assert "inputs" not in answer["details"]


@pytest.mark.parametrize("version", versions())
def test_the_option_beats_it(version: str) -> None:
    with djl(version, {**ROLLING, "option.lmi_version": "0.28"}) as server:
        assert server.post(CHAT).json()["usage"]["completion_tokens"] == 30
    with djl(version, {**ROLLING, "option.lmi_version": "0.36"}) as server:
        assert server.post(CHAT).json()["usage"]["completion_tokens"] > 30
