"""Stateful sessions through DJL, in each mode that has them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.djl.servers import DjlServer, djl, versions

pytestmark = pytest.mark.djl

ECHO = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo", "option.enable_stateful_sessions": "true"}
ROLLING = {**ECHO, "option.rolling_batch": "auto"}
ASYNC = {**ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}
LMIS = {**{key: value for key, value in ASYNC.items() if "sessions" not in key}, "option.lmi_version": "0.36"}
"""Async mode with LMI's schema, which has sessions by default and a status of its own for what is wrong with one."""
CASES = [
    *(pytest.param(version, ROLLING, id=f"{version}-rolling") for version in versions("0.28")),
    *(pytest.param(version, ASYNC, id=f"{version}-async") for version in versions("0.31")),
    *(pytest.param(version, LMIS, id=f"{version}-lmis-async") for version in versions("0.33")),
    *(pytest.param(version, ECHO, id=f"{version}-dynamic") for version in versions()),
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
        refused = 424 if properties is LMIS else 400
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
