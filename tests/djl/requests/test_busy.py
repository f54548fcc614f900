"""All servers of the engine openai are busy: DJL's clients get that status, in each mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.djl.servers import djl, versions
from tests.doubles import tiny
from tests.process.engines.openai.server import HEAD, Server, event, listening, status

pytestmark = pytest.mark.djl

MODES = {
    "rolling": {"option.rolling_batch": "scheduler"},
    "dynamic": {"option.rolling_batch": "disable"},
    "dynamic streaming": {"option.rolling_batch": "disable", "option.enable_streaming": "true"},
    "async": {"option.async_mode": "true", "option.rolling_batch": "disable"},
}
PLACES = [(version, mode) for mode in MODES for version in versions(since="0.31" if mode == "async" else "0")]
TRIES = 10
BUSY = (status(503, "no room", "Retry-After: 7\r\nConnection: close\r\n"),)


def commits_early(version: str) -> bool:
    """Whether Java settles the status 0.1 s after a request has come, answered or not: on a busy machine it is 200."""
    return version < "0.29"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    with listening(owner="lmi-handler") as server:
        server.models["data"][0]["max_model_len"] = tiny.CONTEXT
        yield server


@pytest.mark.parametrize(("version", "mode"), PLACES)
def test_busy_servers_are_told_by_the_status(upstream: Server, tmp_path: Path, version: str, mode: str) -> None:
    properties = {
        "option.entryPoint": "handler.entry",
        "option.llm_engine": "openai",
        "option.model_id": str(tiny.make(tmp_path / "tiny")),
        "option.base_url": upstream.url,
        **MODES[mode],
    }
    streams = (False,) if mode.startswith("dynamic") else (False, True)
    with djl(version, properties) as server:
        for stream in streams:
            body = {"inputs": "a", "stream": stream} if stream else {"inputs": "a"}
            upstream.always = BUSY
            for _ in range(TRIES):
                answer = server.post(body)
                assert "the lmi server is busy: it answered 503" in answer.text
                if answer.status_code == 503:
                    break
                assert commits_early(version), answer.text
            assert answer.status_code == 503, answer.text
            upstream.always = (HEAD + event(300, finish="length"),)
            assert server.post(body).status_code == 200, "the next one finds room"
