"""Embeddings, thoughts and stateful sessions through DJL, in each mode that has them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.server import serve
from tests.deploy import thoughts
from tests.djl.servers import DjlServer, djl, versions
from tests.servers import http, options

pytestmark = pytest.mark.djl

# -- embeddings --------------------------------------------------------------------------------------------------------
# Embeddings, rerank and labels through DJL in each of its modes, with `route=` for what is not at /invocations.


ASYNC = {"option.rolling_batch": "disable", "option.async_mode": "true"}
LMIS = {"option.async_mode": "true", "option.lmi_version": "0.36"}
MODES = {
    "rolling": {"option.rolling_batch": "auto"},
    "async": ASYNC,
    "async schema": {**ASYNC, **LMIS},
    "dynamic": {"option.rolling_batch": "disable", "batch_size": "4", "max_batch_delay": "10"},
}
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "text-embedding": [
        ("", {"inputs": "a b"}),
        ("", {"inputs": ["a b", "c"]}),
        ("", {"inputs": "a b", "truncate": True}),
        ("/v1/embeddings", {"input": ["a b"], "encoding_format": "base64"}),
        ("/embed", {"inputs": "a b"}),
    ],
    "rerank": [("", {"query": "a", "texts": ["b", "c d"]})],
    "text-classification": [("/predict", {"inputs": [["a"], ["b", "c"]]})],
}


PLACES = [
    *((version, "text-embedding", mode) for mode in MODES for version in versions("0.31" if "async" in mode else "0")),
    (versions()[0], "rerank", "rolling"),
    (versions()[-1], "text-classification", "dynamic"),
]


@pytest.mark.parametrize(("version", "task", "mode"), PLACES)
def test_djl_answers_as_the_embedded_server_in_dialects(version: str, task: str, mode: str) -> None:
    handler = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo", "option.task": task}
    release = LMIS if mode == "async schema" else {}
    own_options = options(f"option.task={task}", *(f"{key}={value}" for key, value in release.items()))
    with djl(version, {**handler, **MODES[mode]}) as server, serve("--engine", "echo", *own_options) as own:
        for route, body in CALLS[task]:
            headers = {ATTRIBUTES: f"route={route}"} if route else {}
            found, expected = (
                http.post(f"{one.url}/invocations", json=body, headers=headers, timeout=60) for one in (server, own)
            )
            assert (found.status_code, found.json()) == (200, expected.json())
            if not route and body == {"inputs": "a b"}:
                assert isinstance(found.json()[0], list) is (mode == "async schema")
        refused = server.post({"messages": []})
        assert refused.status_code >= 400
        assert "must be" in refused.text or "has no" in refused.text


# -- chats with thoughts, messages and responses under DJL, whole and streamed -----------------------------------------


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


# -- stateful sessions through DJL, in each mode that has them ---------------------------------------------------------


SESSIONS_ECHO = {
    "option.entryPoint": "handler.entry",
    "option.llm_engine": "echo",
    "option.enable_stateful_sessions": "true",
}
ROLLING = {**SESSIONS_ECHO, "option.rolling_batch": "auto"}
SESSIONS_ASYNC = {**SESSIONS_ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}
SESSIONS_LMIS = {
    **{key: value for key, value in SESSIONS_ASYNC.items() if "sessions" not in key},
    "option.lmi_version": "0.36",
}
"""Async mode with LMI's schema, which has sessions by default and a status of its own for what is wrong with one."""
CASES = [
    *(pytest.param(version, ROLLING, id=f"{version}-rolling") for version in versions("0.28")),
    *(pytest.param(version, SESSIONS_ASYNC, id=f"{version}-async") for version in versions("0.31")),
    *(pytest.param(version, SESSIONS_LMIS, id=f"{version}-lmis-async") for version in versions("0.33")),
    *(pytest.param(version, SESSIONS_ECHO, id=f"{version}-dynamic") for version in versions()),
]
HEADER = "X-Amzn-SageMaker-Session-Id"


@pytest.mark.parametrize(("version", "properties"), CASES)
def test_two_clients_open_use_and_close(version: str, properties: dict[str, str], tmp_path: Path) -> None:
    with djl(version, {**properties, "option.sessions_path": str(tmp_path)}) as server:
        one, two = (_open(server) for _ in range(2))
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([one, two])
        assert _ask(server, one) == _ask(server, two) == 200
        closed = server.post({"requestType": "CLOSE"}, headers={HEADER: one})
        assert (closed.status_code, closed.headers["X-Amzn-SageMaker-Closed-Session-Id"]) == (200, one)
        refused = 424 if properties is SESSIONS_LMIS else 400
        assert (_ask(server, one), _ask(server, two), _ask(server, "nobody")) == (refused, 200, refused)


def test_what_a_djl_serving_leaves_the_next_one_removes() -> None:
    """Whether Java kills the worker or lets it end."""
    left: list[Path] = []
    for _ in range(2):
        with djl(versions()[-1], ROLLING) as server:
            id = _open(server)
            (directory,) = Path("/dev/shm/sagemaker_sessions").glob(f"djl-*/{id}")
            assert not any(path.exists() for path in left)
            left = [directory.parent]
    shutil.rmtree(directory.parent)


def _open(server: DjlServer) -> str:
    found = server.post({"requestType": "NEW_SESSION"}, headers={HEADER: "NEW_SESSION"})
    assert found.status_code == 200
    id, _, expires = found.headers["X-Amzn-SageMaker-New-Session-Id"].partition("; Expires=")
    assert found.headers[HEADER] == f"{id}; Expires={expires}"
    return id


def _ask(server: DjlServer, session: str) -> int:
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}
    found = server.post(body, headers={HEADER: session})
    if found.status_code == 200:
        assert found.text.rstrip("]\n").endswith(' a b"}')  # a dynamic batch has the prompt before it, by version
    else:
        assert f"session not found: {session}" in found.text
    return found.status_code
