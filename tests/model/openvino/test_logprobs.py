"""Log-probabilities come where they are asked for, and change no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.config.config import Config
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.openvino.engine import OpenVino

pytestmark = pytest.mark.model

PROMPT = list(range(100, 120))
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=12, ignore_eos=True),
    "penalties": Sampling(max_new_tokens=12, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5),
    "drawn": Sampling(max_new_tokens=12, ignore_eos=True, do_sample=True, seed=7, temperature=1.5, top_p=0.9),
    "one of few": Sampling(max_new_tokens=12, ignore_eos=True, do_sample=True, seed=7, temperature=1.5, top_k=20),
    "beams": Sampling(max_new_tokens=4, ignore_eos=True, num_beams=2),
}


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[OpenVino]:
    engine = OpenVino(EngineConfig(Config(dtype="fp32"), model=model))
    yield engine
    engine.close()


def answer(engine: OpenVino, sampling: Sampling) -> tuple[list[int], list[float | None]]:
    engine.add(EngineRequest(1, PROMPT, sampling))
    ids: list[int] = []
    logprobs: list[float | None] = []
    while True:
        step = engine.step()
        ids += step.ids
        logprobs += step.logprobs
        for output in step.others:
            ids += output.ids
            logprobs += output.logprobs
            if output.finish is not None:
                return ids, logprobs


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tokens_are_the_same_without_log_probabilities(engine: OpenVino, kind: str) -> None:
    ids, logprobs = answer(engine, SAMPLINGS[kind])
    assert all(logprob is not None and logprob < 0 for logprob in logprobs)
    assert answer(engine, SAMPLINGS[kind]._replace(logprobs=False)) == (ids, [None] * len(ids))
