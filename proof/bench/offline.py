"""Measure the bare engine, without HTTP, text or clients, to compare a server with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import NamedTuple

from handler.core.values import Finish, Sampling
from handler.engines import load, load_tokenizer
from handler.engines.base import Engine, EngineRequest, Output, Step, Tokenizer
from handler.engines.process.engine_process import Spec
from proof.bench.client import prompt
from proof.bench.processes import WARM_UP_PROMPT, WARM_UP_TOKENS, Worker


@dataclass(frozen=True)
class Work:
    """The same work as a closed loop of `clients`: as many sequences at once, the same prompts, the same lengths.

    With `seconds`, the prompts of `requests` repeat.
    """

    clients: int
    requests: int
    tokens: int
    prompt_words: int
    first: int = 0
    seconds: float | None = None


class Run(NamedTuple):
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Offline:
    """An engine in a process of its own, as in the server; idle between measurements."""

    def __init__(self, spec: Spec) -> None:
        self._worker = Worker("the engine without a server", _process, spec)
        self.close = self._worker.close

    def wait_ready(self) -> None:
        self._worker.receive()

    def measure(self, work: Work) -> Run:
        self._worker.send(work)
        run = self._worker.receive()
        assert isinstance(run, Run)
        return run


def _process(pipe: Connection, spec: Spec) -> None:
    """Load the engine, report it, then measure on request until the pipe closes."""
    engine, tokenizer = load(*spec), load_tokenizer(*spec)
    pipe.send("ready")
    keys = itertools.count(1)
    while True:
        try:
            work = pipe.recv()
        except EOFError:
            engine.close()
            return
        warm_up = replace(work, tokens=WARM_UP_TOKENS, requests=1, seconds=None, first=WARM_UP_PROMPT)
        run(engine, warm_up, _encode(tokenizer, warm_up), keys)
        pipe.send(run(engine, work, _encode(tokenizer, work), keys))


def _encode(tokenizer: Tokenizer, work: Work) -> list[list[int]]:
    """Encode all prompts before the measurement, which is of the engine alone."""
    numbers = range(work.first, work.first + work.clients * work.requests)
    return [tokenizer.encode(prompt(number, work.prompt_words)).ids for number in numbers]


def run(engine: Engine, work: Work, prompts: list[list[int]], keys: Iterator[int]) -> Run:
    """Keep `work.clients` sequences running until all are done; each must have its full length."""
    sampling = Sampling(max_new_tokens=work.tokens, ignore_eos=True)
    lengths: dict[int, int] = {}
    num_tokens = 0
    began = time.monotonic()
    waiting = _prompts(work, prompts, began)
    for ids in itertools.islice(waiting, work.clients):
        engine.add(EngineRequest(key := next(keys), ids, sampling))
        lengths[key] = 0
    while lengths:
        for output in _outputs(engine.step()):
            num_tokens += len(output.ids)
            lengths[output.key] += len(output.ids)
            if output.finish is None:
                continue
            if output.finish is not Finish.LENGTH or lengths.pop(output.key) != work.tokens:
                raise RuntimeError(f"the engine ended a sequence early: {output}")
            if (ids_next := next(waiting, None)) is not None:
                engine.add(EngineRequest(key := next(keys), ids_next, sampling))
                lengths[key] = 0
    return Run(num_tokens, time.monotonic() - began)


def _outputs(step: Step) -> Iterator[Output]:
    """Yield a step's outputs, in columns or not."""
    for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
        yield Output(key, (id,), (logprob,))
    yield from step.others


def _prompts(work: Work, prompts: list[list[int]], began: float) -> Iterator[list[int]]:
    if work.seconds is None:
        yield from prompts
        return
    for ids in itertools.cycle(prompts):
        if time.monotonic() >= began + work.seconds:
            return
        yield ids
