"""The engines openai and grpc in front of servers that load longer than option.model_loading_timeout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.config.config import Config
from handler.engines.base import EngineConfig
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import State
from handler.serving.engine import start_engine
from tests.doubles import tiny
from tests.doubles.grpc_servers import listening as grpc_listening
from tests.process.engines.openai.server import listening, status
from tests.servers import PATIENCE, wait_for

LIMIT = 1.0
"""The least option.model_loading_timeout. A server that is not ready is asked every 0.5 s."""


class Loading(NamedTuple):
    """A server that is loading its model."""

    url: str
    num_asked: Callable[[], int]
    finish: Callable[[], None]


@contextlib.contextmanager
def by_url() -> Iterator[Loading]:
    with listening() as server:
        models, server.models = server.models, status(503, "loading")
        yield Loading(server.url, lambda: server.num_asked, lambda: setattr(server, "models", models))


@contextlib.contextmanager
def by_grpc() -> Iterator[Loading]:
    with grpc_listening() as server:
        server.health = {"healthy": False, "message": "loading"}
        ready = type(server).usual_health
        yield Loading(server.url, lambda: server.num_asked, lambda: setattr(server, "health", ready))


@pytest.mark.parametrize(("engine", "loading"), [("openai", by_url), ("grpc", by_grpc)])
def test_a_server_that_is_still_loading_is_waited_for(
    engine: str, loading: Callable[[], contextlib.AbstractContextManager[Loading]], tmp_path: Path
) -> None:
    with loading() as server:
        options: dict[str, Any] = {
            "base_url": (server.url,),
            "base_url_kind": "vllm",
            "base_url_connect_timeout": 5.0,
            "base_url_timeout": PATIENCE,
        }
        config = Config(model_loading_timeout=LIMIT, engine_options=options)
        found = start_engine(config, Spec(engine, EngineConfig(config, tiny.make(tmp_path))))
        with contextlib.closing(found):

            def stepped(done: bool) -> bool:
                found.step(0.05)
                return done

            wait_for(lambda: stepped(server.num_asked() > 2 * LIMIT / 0.5), PATIENCE, "it is not asked again")
            server.finish()
            wait_for(lambda: stepped(found.ready), PATIENCE, "it does not become ready")
            assert (found.state, found.restarts) == (State.READY, 0)
