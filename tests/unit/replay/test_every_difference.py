"""A replay finds each difference of a recorded answer of every dialect, or there is a reason why it is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from proof.replay.comparison import Class
from tests.unit.replay.mutations import (
    DIALECTS,
    Mutant,
    Recorded,
    found,
    mutants,
    recorded,
    why_equal,
    why_sampled,
)

_OF_SHAPE = {"rename", "add", "retype"}


def mutants_of(dialect: str) -> Iterator[tuple[Recorded, Mutant]]:
    """Yield one mutant for each kind of difference in all answers of a dialect."""
    known: set[Any] = set()
    for one in recorded(dialect):
        yield from ((one, mutant) for mutant in mutants(one, known))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_difference_of_a_greedy_answer_is_found(dialect: str) -> None:
    missed, operations = [], Counter[str]()
    for one, mutant in mutants_of(dialect):
        operations[mutant.operation] += 1
        if found(one, mutant, greedy=True) is Class.EQUAL and not why_equal(one, mutant):
            missed.append((mutant.operation, mutant.place, mutant.old, mutant.new))
    assert missed == []
    assert {"delete", "empty", "retype", "change", "rename", "repeat"} <= set(operations)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_difference_of_the_shape_of_a_sampled_answer_is_found(dialect: str) -> None:
    missed = []
    for one, mutant in mutants_of(dialect):
        whole = mutant.operation == "repeat" and len(one.documents.values) == 1 == len(mutant.place)
        if one.answer.status >= 400 or not (mutant.operation in _OF_SHAPE or whole):
            continue
        if found(one, mutant, greedy=False) is Class.EQUAL and not why_sampled(one, mutant):
            missed.append((mutant.operation, mutant.place, mutant.old, mutant.new))
    assert missed == []
