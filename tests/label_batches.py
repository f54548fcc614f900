"""A batch of 32: requests for labels at the positions of a known text, among streams of which one is cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import pytest

from handler.core.values import Pooling, Sampling
from handler.engines.base import EngineRequest, Output, Step

NUM_READS, SIZE = 24, 32


class Engine(Protocol):
    """An engine, in this process or in another."""

    def add(self, request: EngineRequest) -> None: ...
    def cancel(self, key: int) -> None: ...


class Text(NamedTuple):
    """A prompt and its greedy response.

    Attributes:
        logprobs: the log-probability of each id but the first `len(ids) - len(logprobs)`, by transformers.
        num_prompt: number of ids before the response.
    """

    ids: list[int]
    logprobs: list[float]
    num_prompt: int


def reads(texts: Sequence[Text]) -> Iterator[tuple[Text, int]]:
    """Yield positions of texts, spread over all of them, the last position of each first."""
    for round in range(NUM_READS):
        for text in texts:
            step = max(1, len(text.logprobs) * len(texts) // NUM_READS)
            if round * step < len(text.logprobs):
                yield text, len(text.ids) - 1 - round * step


def check_batch(engine: Engine, step: Callable[[], Iterable[Step]], texts: Sequence[Text], *streams: Sampling) -> None:
    """Run the batch, and compare labels and greedy streams with the texts.

    Args:
        step: returns the engine's next steps.
        streams: parameters of the streams beside it, which take turns. They have seeds or are greedy.
    """
    places = [place for place, _ in zip(reads(texts), range(NUM_READS), strict=False)]
    assert len(places) == NUM_READS
    for key, (text, at) in enumerate(places, 1):
        label_ids = (text.ids[at], *{3, 4, 5} - {text.ids[at]})
        shared = (0, at // 2, at - 1)[key % 3] if at else 0
        pooling = Pooling("labels", labels=tuple(map(str, label_ids)), label_ids=label_ids, num_shared=shared)
        engine.add(EngineRequest(key, text.ids[:at], pooling))
    started = {key: streams[key % len(streams)] for key in range(NUM_READS + 1, SIZE + 1)}
    for key, sampling in started.items():
        text, length = texts[key % len(texts)], 200 if key == SIZE else sampling.max_new_tokens
        engine.add(EngineRequest(key, text.ids[: text.num_prompt], sampling._replace(max_new_tokens=length)))
    vectors, tokens = run(engine, step)
    for key, (text, at) in enumerate(places, 1):
        chosen, *others, highest = vectors[key]
        assert chosen == pytest.approx(text.logprobs[at - len(text.ids)], abs=1e-3), (key, at)
        assert max(chosen, *others) <= highest
        assert highest == chosen or at < text.num_prompt
    for key, sampling in started.items():
        text = texts[key % len(texts)]
        if key != SIZE and not sampling.do_sample:
            assert tokens[key] == text.ids[text.num_prompt :][: len(tokens[key])]
    drawn = {(key % len(texts), sampling): tokens[key] for key, sampling in started.items() if key != SIZE}
    for key, sampling in started.items():
        assert key == SIZE or tokens[key] == drawn[key % len(texts), sampling]


def run(engine: Engine, step: Callable[[], Iterable[Step]]) -> tuple[dict[int, list[float]], dict[int, list[int]]]:
    """Run the batch, and cancel the last stream after the first token. Return numbers of labels, and ids of streams."""
    vectors: dict[int, list[float]] = {}
    tokens: dict[int, list[int]] = {key: [] for key in range(1, SIZE + 1)}
    running = {*range(1, SIZE)}
    while running:
        for output in outputs(step()):
            assert not output.error, output.error
            tokens[output.key] += output.ids
            if output.extras is not None:
                vectors[output.key] = [*(output.extras.vector or ())]
            running -= {output.key} if output.finish else set()
        if any(tokens.values()):
            engine.cancel(SIZE)
    return vectors, tokens


def outputs(steps: Iterable[Step]) -> Iterator[Output]:
    for step in steps:
        columns = zip(step.keys, step.ids, step.logprobs, strict=True)
        yield from (Output(key, (id,), (logprob,)) for key, id, logprob in columns)
        yield from step.others
