"""An engine in its own process behind a batcher, as the hosts have it, and the few verbs that points speak."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from handler import engines
from handler.core.media import MediaSource, Medium
from handler.core.values import Adapter, Delta, Finish, Request, Sampling
from handler.engines.base import NO_MEDIA, EngineConfig, Tokenizer
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, State
from handler.scheduler.batcher import Batcher
from handler.serving.media.loader import place_media
from tests.process_tree import descendants

PROMPT = "Once upon a time"


class Skip(Exception):
    """A point that says nothing here, and why."""


@dataclass
class Answer:
    """All deltas of one sequence."""

    deltas: list[Delta]

    @property
    def ids(self) -> list[int]:
        return [token.id for delta in self.deltas for token in delta.tokens]

    @property
    def logprobs(self) -> list[float | None]:
        return [token.logprob for delta in self.deltas for token in delta.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for delta in self.deltas for token in delta.tokens)

    @property
    def finish(self) -> Finish | None:
        return self.deltas[-1].finish

    @property
    def error(self) -> str:
        return str(self.deltas[-1].error or "")


class Served:
    def __init__(self, config: EngineConfig, load_timeout: float) -> None:
        self.config = config
        self.engine = EngineSupervisor(Spec("trtllm", config), load_timeout=load_timeout)
        try:
            while self.engine.state is State.LOADING:
                self.engine.step(timeout=1)
            self.tokenizer: Tokenizer = engines.load_tokenizer("trtllm", config)
        except BaseException:
            self.engine.close()
            raise
        self.capabilities = engines.capabilities("trtllm", config)
        self.unsupported = self.capabilities.unsupported
        self.batcher = Batcher(self.engine, max_active=config.options.max_rolling_batch_size)

    def needs(self, *fields: str) -> None:
        for field in fields:
            if field in self.unsupported:
                raise Skip(f"lacks {field}: {self.unsupported[field]}")

    def submit(self, prompt: str = PROMPT, adapter: Adapter | None = None, **sampling: Any) -> int:
        sampling.setdefault("max_new_tokens", 16)
        request = Request(prompt, Sampling(**sampling), adapter=adapter)
        return self.batcher.submit(request, self.tokenizer.encode(prompt))

    def look(self, text: str, *images: Medium, **sampling: Any) -> int:
        """Submit a chat of one message, with its images first."""
        if why := self.capabilities.no_media.get("image", NO_MEDIA):
            raise Skip(f"takes no images: {why}")
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        prompt = self.tokenizer.encode_chat([{"role": "user", "content": content}])
        sources = (MediaSource("image", b"", "", "messages"),) * len(images)
        request = Request(prompt.text, Sampling(**{"max_new_tokens": 16, **sampling}), media=sources)
        return self.batcher.submit(request, place_media(request, prompt, images, self.tokenizer.media_tokens))

    def run(self, seconds: float = 120) -> dict[int, Answer]:
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + seconds
        while not self.batcher.idle:
            assert time.monotonic() < deadline, f"no end after {seconds} s"
            for delta in self.batcher.step(timeout=0.5):
                found.setdefault(delta.id, Answer([])).deltas.append(delta)
        return found

    def one(self, prompt: str = PROMPT, **sampling: Any) -> Answer:
        id = self.submit(prompt, **sampling)
        return self.run()[id]

    def workers(self) -> list[int]:
        """MPI's, which a daemon of Open MPI's has started, in process groups of their own with Open MPI 5."""
        if self.engine.pid is None:
            return []
        return [pid for pid, command in descendants(self.engine.pid).items() if "mpi4py" in command]


@contextlib.contextmanager
def served(config: EngineConfig, load_timeout: float) -> Iterator[Served]:
    found = Served(config, load_timeout)
    try:
        yield found
    finally:
        found.engine.close(grace=10)


def kill(pid: int) -> None:
    import signal

    os.kill(pid, signal.SIGKILL)
