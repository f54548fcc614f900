"""TensorRT-LLM's adapter on the double: in the process of the test, where one can look inside, or in one of its own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler import engines
from handler.config.config import Config
from handler.core.media import MediaSource, Medium
from handler.core.values import Adapter, Delta, Finish, Request, Sampling
from handler.engines.base import EngineConfig, EngineRequest, Output
from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import EngineSupervisor, State
from handler.engines.trtllm import engine as trtllm
from handler.scheduler.batcher import Batcher
from handler.serving.media.loader import place_media
from tests.doubles import using

PROMPT = "Once upon a time"


class Answer(NamedTuple):
    """One sequence, all its outputs put together."""

    ids: list[int]
    logprobs: list[float | None]
    finish: Finish | None
    error: str | None
    outputs: list[Output]


class Loaded:
    """An engine, and the verbs that tests speak."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = trtllm.load(config)
        self.capabilities = trtllm.capabilities(config)
        self.unsupported = self.capabilities.unsupported
        self.tokenizer: HfTokenizer = trtllm.load_tokenizer(config)
        self.eos = [3, 4]
        self._key = 100
        self._seen: dict[int, list[Output]] = {}

    @property
    def double(self) -> Any:
        """The double's executor."""
        return self.engine._llm.engine

    def add(self, prompt: str | Sequence[int] = PROMPT, adapter: Adapter | None = None, **sampling: Any) -> int:
        self._key += 1
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        sampling.setdefault("max_new_tokens", 12)
        self.engine.add(EngineRequest(self._key, ids, Sampling(**sampling), adapter))
        return self._key

    def look(self, text: str, *images: Medium, **sampling: Any) -> int:
        """Add a chat of one message, with its images first."""
        self._key += 1
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        prompt = self.tokenizer.encode_chat([{"role": "user", "content": content}])
        sources = tuple(MediaSource("image", b"", "", f"messages[0].content[{at}]") for at in range(len(images)))
        sampling = {"max_new_tokens": 12, "ignore_eos": True, **sampling}
        request = Request(prompt.text, Sampling(**sampling), media=sources)
        placed = place_media(request, prompt, images, self.tokenizer.media_tokens)
        assert placed.media is not None
        self.engine.add(EngineRequest(self._key, placed.ids, request.sampling, media=placed.media.file))
        return self._key

    def run(self, *keys: int, seconds: float = 20) -> dict[int, list[Output]]:
        """Step until all of these have ended."""
        deadline = time.monotonic() + seconds
        while not all(map(self._ended, keys)):
            assert time.monotonic() < deadline, "it does not end"
            step = self.engine.step()
            for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
                self._seen.setdefault(key, []).append(Output(key, [id], [logprob]))
            for output in step.others:
                self._seen.setdefault(output.key, []).append(output)
        return {key: self._seen.pop(key) for key in keys}

    def _ended(self, key: int) -> bool:
        return any(output.finish is not None for output in self._seen.get(key, ()))

    @property
    def heard_of(self) -> set[int]:
        """Requests with outputs that nobody has asked for."""
        return set(self._seen)

    def one(self, prompt: str | Sequence[int] = PROMPT, adapter: Adapter | None = None, **sampling: Any) -> Answer:
        key = self.add(prompt, adapter, **sampling)
        return joined(self.run(key)[key])

    def text(self, **sampling: Any) -> str:
        assert self.tokenizer.vocabulary is not None
        pieces = self.tokenizer.vocabulary.pieces
        return b"".join(pieces[id] for id in self.one(**sampling).ids if id not in self.eos).decode()


def joined(outputs: Sequence[Output]) -> Answer:
    return Answer(
        [id for output in outputs for id in output.ids],
        [logprob for output in outputs for logprob in output.logprobs],
        outputs[-1].finish,
        outputs[-1].error,
        list(outputs),
    )


@contextlib.contextmanager
def loaded(model: Path, manners: str = "", **options: Any) -> Iterator[Loaded]:
    """The double's own count of misuses must be nothing in the end."""
    with using.tensorrt_llm(manners):
        found = Loaded(EngineConfig(Config(max_rolling_batch_size=16, **options), model))
        try:
            yield found
            import tensorrt_llm

            assert tensorrt_llm.MISUSES == []
        finally:
            found.engine.close()


def one_eos(model: Path, target: Path) -> Path:
    """The same model, with one EOS id."""
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    return target


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
