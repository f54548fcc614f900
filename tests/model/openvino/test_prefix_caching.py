"""Equal beginnings of prompts are computed once, and answers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from handler.config.config import Config
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.openvino.engine import OpenVino

pytestmark = pytest.mark.model

GREEDY = Sampling(max_new_tokens=8, ignore_eos=True, logprobs=False)
TOKENS_PER_STEP = 32


def answers(model: Path, prompts: list[list[int]], enable_prefix_caching: bool | None) -> list[tuple[int, list[int]]]:
    """Return each answer's number of steps and ids, asked one after the other."""
    config = Config(dtype="fp32", max_num_batched_tokens=TOKENS_PER_STEP, enable_prefix_caching=enable_prefix_caching)
    engine = OpenVino(EngineConfig(config, model=model))
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
    engine.close()
    return found


def test_an_equal_beginning_is_computed_once(model: Path) -> None:
    turn = list(range(100, 230))
    other, next_turn = list(range(99, 229)), [*turn, *range(500, 520)]
    prompts = [turn, turn, next_turn, other]
    cached, computed = answers(model, prompts, True), answers(model, prompts, None)
    assert [ids for _, ids in cached] == [ids for _, ids in computed]
    saved = [without - with_cache for (with_cache, _), (without, _) in zip(cached, computed, strict=True)]
    assert saved == [0, 4, 4, 0], "steps of 32 tokens"
