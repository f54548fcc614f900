"""Turns of prompts that share a prefix, if only the prefix used last is stored."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from handler.core.values import Pooling
from handler.engines.base import EngineRequest
from handler.engines.openvino.scorers import Scorer, Scores, Work

PREFIX_STEPS = 5


class OnePrefixScorer(Scorer):
    """Takes `PREFIX_STEPS` for a prefix unless it is the one used last, and then a step for the rest of a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: Sequence[int] = ()

    def check(self, num_tops: int) -> None:
        raise NotImplementedError

    def _load(self) -> None:
        """There is no model."""

    def _score(self, model: None, prompt: EngineRequest) -> Work:
        prefix = prompt.ids[: prompt.pooling.num_shared]
        if prefix != self.stored:
            for _ in range(PREFIX_STEPS):
                yield None
            self.stored = prefix
        yield Scores(prompt.key)


def question(key: int, state: int, num_shared: int = 1) -> EngineRequest:
    return EngineRequest(key, [state, key], Pooling("labels", labels=("A",), label_ids=(0,), num_shared=num_shared))


@pytest.fixture
def scorer() -> OnePrefixScorer:
    """A scorer whose model is loaded."""
    scorer = OnePrefixScorer()
    scorer.add(question(99, 99))
    while scorer.step(idle=True) is None:
        pass
    return scorer


def run(scorer: Scorer, *, num_steps: int) -> list[int]:
    """Return the keys of the prompts that end within a number of steps, in order."""
    results = [scorer.step(idle=True) for _ in range(num_steps)]
    return [scores.key for scores in results if scores is not None]


def test_states_that_displace_each_other_are_not_computed_for_every_question(scorer: OnePrefixScorer) -> None:
    for state in (1, 2):
        for index in range(10):
            scorer.add(question(10 * state + index, state))
    keys = run(scorer, num_steps=2 * 20)
    assert keys == [*range(10, 15), *range(20, 25), *range(15, 20), *range(25, 30)]


def test_other_questions_wait_for_one_turn_of_a_long_list(scorer: OnePrefixScorer) -> None:
    for key in range(30):
        scorer.add(question(key, 1))
    scorer.add(question(50, 2))
    scorer.add(question(51, 3, num_shared=0))
    assert run(scorer, num_steps=PREFIX_STEPS + 5) == [*range(5)]
    assert run(scorer, num_steps=PREFIX_STEPS + 1) == [50]
    assert run(scorer, num_steps=PREFIX_STEPS + 1) == [51]
    assert run(scorer, num_steps=PREFIX_STEPS + 5) == [*range(5, 10)]


def test_a_turn_goes_on_if_its_first_question_is_cancelled(scorer: OnePrefixScorer) -> None:
    for key in range(3):
        scorer.add(question(key, 1))
    scorer.add(question(50, 2))
    assert run(scorer, num_steps=2) == []
    scorer.cancel(0)
    assert run(scorer, num_steps=PREFIX_STEPS + 1) == [1]
    assert run(scorer, num_steps=PREFIX_STEPS + 1) == [50]
    assert run(scorer, num_steps=PREFIX_STEPS + 1) == [2]
    assert run(scorer, num_steps=3) == []
