"""The engine: log-probabilities, equal beginnings of prompts, and the usage of its KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from handler.config.config import Config
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest, EngineStatistics
from handler.engines.openvino.engine import OpenVino, prepare

pytestmark = pytest.mark.model

# -- log-probabilities come where they are asked for, and change no token ----------------------------------------------


TOKENS_PER_STEP = 32
PROMPT = list(range(100, 120))
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=12, ignore_eos=True),
    "penalties": Sampling(max_new_tokens=12, ignore_eos=True, repetition_penalty=1.3),
    "drawn": Sampling(max_new_tokens=12, ignore_eos=True, do_sample=True, seed=7, temperature=1.5, top_p=0.9),
    "one of few": Sampling(max_new_tokens=12, ignore_eos=True, do_sample=True, seed=7, temperature=1.5, top_k=20),
    "beams": Sampling(max_new_tokens=4, ignore_eos=True, num_beams=2),
}


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[OpenVino]:
    engine = OpenVino(EngineConfig(Config(dtype="fp32", max_num_batched_tokens=TOKENS_PER_STEP), model=model))
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


# -- equal beginnings of prompts are computed once, and answers stay the same ------------------------------------------


GREEDY = Sampling(max_new_tokens=4, ignore_eos=True, logprobs=False)


def answers(engine: OpenVino, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
    """Return each answer's number of steps and ids, asked one after the other."""
    found = []
    for key, prompt in enumerate(prompts):
        engine.add(EngineRequest(key, prompt, GREEDY))
        ids: list[int] = []
        steps = 0
        while len(ids) < GREEDY.max_new_tokens:
            step = engine.step()
            steps += 1
            ids += [*step.ids, *(id for output in step.others for id in output.ids)]
        found.append((steps, ids))
    return found


def test_an_equal_beginning_is_computed_once(engine: OpenVino, model: Path) -> None:
    turn = list(range(100, 166))
    other, next_turn = list(range(99, 165)), [*turn, *range(500, 520)]
    prompts = [turn, turn, next_turn, other]
    config = Config(dtype="fp32", max_num_batched_tokens=TOKENS_PER_STEP, enable_prefix_caching=True)
    caching = OpenVino(EngineConfig(config, model=model))
    cached, computed = answers(caching, prompts), answers(engine, prompts)
    caching.close()
    assert [ids for _, ids in cached] == [ids for _, ids in computed]
    saved = [without - with_cache for (with_cache, _), (without, _) in zip(cached, computed, strict=True)]
    assert saved == [0, 2, 2, 0], "steps of 32 tokens"


# -- the usage of OpenVINO's KV cache, where it has a size -------------------------------------------------------------


def usage_of_a_request(engine: OpenVino) -> float | None:
    """Return it after the request's first step; before it and afterwards the engine says the same."""
    idle = engine.statistics()
    engine.add(EngineRequest(1, list(range(100, 200)), Sampling(max_new_tokens=4, ignore_eos=True)))
    engine.step()
    usage = engine.statistics().kv_cache_usage
    while not engine.step().others:
        pass
    assert engine.statistics() == idle
    return usage


def test_a_cache_with_a_size_is_used_while_a_request_runs() -> None:
    engine = OpenVino(EngineConfig(Config(kv_cache_gib=1), model=prepare("demo", EngineConfig())))
    assert engine.statistics() == EngineStatistics(kv_cache_usage=0.0)
    assert 0 < (usage_of_a_request(engine) or 0) < 0.1
    engine.close()


def test_a_cache_without_a_size_has_no_usage(engine: OpenVino) -> None:
    assert engine.statistics() == EngineStatistics()
    assert usage_of_a_request(engine) is None
