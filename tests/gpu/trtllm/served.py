"""TensorRT-LLM's adapter in a process of its own, on the double."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from handler import engines
from handler.config.config import Config
from handler.core.values import Delta, Request, Sampling
from handler.engines.base import EngineConfig
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, State
from handler.scheduler.batcher import Batcher
from tests.doubles import using


class Served:
    def __init__(self, engine: EngineSupervisor, config: EngineConfig) -> None:
        self.engine = engine
        self.batcher = Batcher(engine, max_active=16)
        self.tokenizer = engines.load_tokenizer("trtllm", config)

    def submit(self, **sampling: Any) -> int:
        prompt = "Once upon a time"
        return self.batcher.submit(Request(prompt, Sampling(**sampling)), self.tokenizer.encode(prompt))

    def run(self, seconds: float = 30) -> dict[int, list[Delta]]:
        found: dict[int, list[Delta]] = {}
        deadline = time.monotonic() + seconds
        while not self.batcher.idle:
            assert time.monotonic() < deadline, "it does not end"
            for delta in self.batcher.step(timeout=0.5):
                found.setdefault(delta.id, []).append(delta)
        return found


@contextlib.contextmanager
def served(model: Path, manners: str, timeout: float = 60.0, **options: Any) -> Iterator[Served]:
    config = EngineConfig(Config(max_rolling_batch_size=16, engine_options=options), model=model)
    with using.tensorrt_llm(manners):
        engine = EngineSupervisor(Spec("trtllm", config), timeout=timeout, load_timeout=60)
        try:
            while engine.state is State.LOADING:
                engine.step(timeout=1)
            yield Served(engine, config)
        finally:
            engine.close()
