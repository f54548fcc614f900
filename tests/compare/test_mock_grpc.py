"""`tests.compare.mock_grpc` is a server for the engine grpc: each request has its tokens, and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from handler.config.config import Config
from handler.core.values import Finish, Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.grpc.engine import GrpcEngine
from tests.doubles import tiny
from tests.process.engines.openai.test_bad_servers import run
from tests.servers import free_port


def test_each_request_gets_a_token_a_step(tmp_path: Path) -> None:
    port = free_port()
    mock = subprocess.Popen([sys.executable, "-m", "tests.compare.mock_grpc", str(port), "--pace", "200"])
    options = {
        "base_url": (f"grpc://127.0.0.1:{port}",),
        "base_url_kind": "vllm",
        "base_url_connect_timeout": 5.0,
        "base_url_timeout": 30.0,
    }
    try:
        engine = GrpcEngine(EngineConfig(Config(engine_options=options), model=tiny.make(tmp_path)))
        for key in range(1, 9):
            engine.add(EngineRequest(key, [301], Sampling(max_new_tokens=key)))
        found = run(engine, *range(1, 9))
        engine.close()
    finally:
        mock.kill()
        mock.wait()
    assert {key: len(result.ids) for key, result in found.items()} == {key: key for key in range(1, 9)}
    assert {result.finish for result in found.values()} == {Finish.LENGTH}
