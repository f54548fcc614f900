"""A model that is served step by step on a scripted engine, as under DJL, without Java and djl_python."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import pytest

from handler.config.loader import read_config
from handler.djl import batches
from handler.djl.batches import DynamicBatch, Item, Piece, RollingBatch
from handler.djl.worker_loop import WorkerLoop
from handler.engines.base import EngineInfo
from handler.engines.echo.engine import EchoTokenizer
from handler.engines.process.supervisor import LoopHooks, State
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.plugins.functions import Formatters
from handler.protocols.kernel.context import ServerContext
from handler.protocols.registry import choose
from handler.scheduler.lora import AdapterHome, AdapterRegistry
from handler.serving.metrics.prometheus import Metrics
from handler.serving.model import ServedModel
from handler.serving.preprocessor import Preprocessor
from handler.serving.request_log import RequestLog
from handler.serving.sessions import Sessions
from handler.serving.stored_responses import ResponseStore
from tests.doubles.scripted_engine import Scripted

INFO = EngineInfo("scripted", "1", "none", "none", 100)


@dataclass
class Clock:
    """A clock that stands still, but for `tick` seconds a look."""

    now: float
    tick: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Readable(Scripted):
    """A scripted engine in the place of a supervised one: it always has something to say."""

    state = State.READY
    reason = ""
    restarts = 0
    reports = ()

    def __init__(self, info: EngineInfo) -> None:
        super().__init__()
        self.info = info
        self._ends = socket.socketpair()
        self._ends[1].send(b"x")

    def attach(self, host: LoopHooks) -> None:
        host.watch(self._ends[0].fileno())
        host.on_change(self.state)

    def close(self) -> None:
        for end in self._ends:
            end.close()


class Bench:
    """A rolling batch over a scripted engine, and the Java side's list of requests. The fixture `benches` closes it."""

    opened: ClassVar[list[Bench]] = []

    def __init__(
        self,
        mode: str = "auto",
        *,
        info: EngineInfo = INFO,
        formatters: Formatters | None = None,
        validator: StructuredOutputValidator | None = None,
        sessions: Sessions | None = None,
        store: ResponseStore | None = None,
        request_log: RequestLog | None = None,
        context: ServerContext | None = None,
        owner_header: str | None = None,
        **options: Any,
    ) -> None:
        self.engine = Readable(info)
        self.loop = WorkerLoop()
        overrides = ["option.llm_engine=echo", f"option.rolling_batch={mode}"]
        config = replace(read_config(overrides=overrides, environ={}).checked(), owner_header=owner_header)

        async def make() -> ServedModel:
            preprocessor = Preprocessor(
                choose(config),
                context or ServerContext(engine="scripted"),
                EchoTokenizer(),
                lambda: self.engine.info,
                formatters or Formatters(),
                validator,
                sessions,
                store,
                whole=mode == "disable",
            )
            model = ServedModel(
                config,
                self.engine,  # type: ignore[arg-type]
                preprocessor,
                AdapterHome(AdapterRegistry()),
                stepped=True,
                request_log=request_log,
            )
            model.start()
            await model.availability.opened
            return model

        self.model = self.loop.run(make())
        self.batcher = self.model.driver.batcher
        self.batch = RollingBatch(self.model, self.loop, **options)
        Bench.opened.append(self)

    def dynamic(self, seconds: float) -> DynamicBatch:
        return DynamicBatch(self.model, self.loop, seconds)

    def step(self, *bodies: Any, size: int | None = None) -> list[Piece]:
        """One step in which `bodies` are new."""
        live = self.batch.num_requests
        new = {live + index: item(body) for index, body in enumerate(bodies)}
        return self.batch.step(live + len(bodies) if size is None else size, new)

    def silent_step(self, *bodies: Any) -> list[Piece]:
        """One step in which no request has anything to say."""
        with mock.patch.object(batches, "IDLE", 0.03):
            return self.step(*bodies)

    def finish(self, pieces: list[Piece]) -> list[bytes]:
        """The whole bodies of the requests of a first step."""
        bodies = [piece.data for piece in pieces]
        live = [index for index, piece in enumerate(pieces) if not piece.last]
        while live:
            pieces = self.step()
            assert len(pieces) == len(live)
            for index, piece in zip(live, pieces, strict=True):
                bodies[index] += piece.data
            live = [index for index, piece in zip(live, pieces, strict=True) if not piece.last]
        return bodies

    def close(self) -> None:
        self.batch.reset()
        self.loop.poll()
        self.model.preprocessor.encoder.validator = None  # the tests' own
        self.model.close()
        self.loop.poll()
        self.loop.close()


@pytest.fixture(autouse=True)
def benches() -> Iterator[None]:
    with mock.patch.object(batches, "IDLE", 5.0):  # a step of a busy machine is late, not empty
        yield
    while Bench.opened:
        Bench.opened.pop().close()


def requests_ended(metrics: Metrics, outcome: str) -> float | None:
    """Return the number of requests that have ended with an outcome."""
    return metrics.registry.get_sample_value("lmi_requests_total", {"outcome": outcome})


def item(body: Any, **headers: str) -> Item:
    return Item(body if isinstance(body, bytes) else json.dumps(body).encode(), headers)


def ask(text: str | list[str], tokens: int, **more: Any) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": tokens}, **more}


def text_of(body: bytes) -> str:
    text: str = json.loads(body.splitlines()[-1])["generated_text"]
    return text
