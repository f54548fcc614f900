"""Steps that waited together lose, repeat and reorder nothing of any sequence."""

from __future__ import annotations

import random

import pytest

from handler.core.values import Finish
from handler.engines.base import Output, Step
from handler.scheduler.engine import join


def random_steps(rng: random.Random) -> list[Step]:
    """Steps of a few sequences, each with a token in the columns, an output, or nothing; some of them end."""
    steps = []
    alive = set(range(5))
    for number in range(rng.randrange(1, 6)):
        step = Step([], [], [], [])
        for key in sorted(alive):
            token = 100 * key + number
            kind = rng.choice(["column", "column", "column", "output", "end", "nothing"])
            if kind == "column":
                step.keys.append(key)
                step.ids.append(token)
                step.logprobs.append(-float(number))
            elif kind != "nothing":
                finish = Finish.STOP if kind == "end" else None
                step.others.append(Output(key, (token,), (-float(number),), finish))
            if kind == "end":
                alive.remove(key)
        steps.append(step)
    return steps


def histories(steps: list[Step]) -> dict[int, list[tuple[int, float | None] | Finish]]:
    """What each sequence gets, in order; a step's columns come before its other outputs."""
    found: dict[int, list[tuple[int, float | None] | Finish]] = {}
    for step in steps:
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            found.setdefault(key, []).append((id, logprob))
        for output in step.others:
            history = found.setdefault(output.key, [])
            history += zip(output.ids, output.logprobs, strict=True)
            history += [] if output.finish is None else [output.finish]
    return found


def test_joined_steps_bring_each_sequence_the_same_in_the_same_order() -> None:
    rng = random.Random(0)
    for _ in range(500):
        steps = random_steps(rng)
        joined = join(steps)
        assert histories([joined]) == histories(steps)
        assert len(set(joined.keys)) == len(joined.keys)
        assert not {output.key for output in joined.others} & set(joined.keys), "a sequence comes in one way"


def test_a_sequences_tokens_become_one_output() -> None:
    steps = [Step([1, 2], [10, 20], [0.0, 0.0], []), Step([1], [11], [None], [])]
    assert join(steps) == Step([2], [20], [0.0], [Output(1, [10, 11], [0.0, None])])


def test_the_end_of_a_sequence_comes_with_the_tokens_before_it() -> None:
    end = Output(1, (11,), (-1.0,), Finish.LENGTH)
    steps = [Step([1], [10], [0.0], []), Step([], [], [], [end])]
    assert join(steps).others == [Output(1, [10, 11], [0.0, -1.0], Finish.LENGTH)]


@pytest.mark.parametrize(
    "last",
    [
        Output(1, (11,), (-1.0,), Finish.LENGTH, tops=[[(11, -1.0)]]),
        Output(1, (), (), Finish.ERROR, error="it broke"),
    ],
    ids=["more than tokens", "a failure"],
)
def test_what_brings_more_than_tokens_comes_after_those_before_it(last: Output) -> None:
    steps = [Step([1], [10], [0.0], []), Step([], [], [], [last])]
    assert join(steps).others == [Output(1, [10], [0.0]), last]
