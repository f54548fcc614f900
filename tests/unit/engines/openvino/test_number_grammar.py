"""Ranges of numbers, their grammars read as expressions and held against arithmetic."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest

from handler.engines.structured_output.json_grammar import integers, numbers
from tests.one_test import in_one_test

HOLDS = {
    "minimum": lambda value, bound: value >= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


def expression(grammar: str) -> re.Pattern[str]:
    return re.compile(re.sub(r'"([^"]*)"| ', lambda match: re.escape(match[1] or ""), grammar))


def allowed(said: Mapping[str, Any], text: str) -> bool:
    """By its decimals, and as what a client makes of it: a double where it has a point."""
    exact = all(HOLDS[name](Decimal(text), Decimal(str(bound))) for name, bound in said.items())
    assert exact == all(HOLDS[name](json.loads(text), bound) for name, bound in said.items())
    return exact


def held(grammar: str | None, said: Mapping[str, Any], texts: list[str]) -> None:
    assert grammar is not None, said
    found = expression(grammar)
    assert [text for text in texts if bool(found.fullmatch(text)) != allowed(said, text)] == [], said


EDGES = [-1000, -101, -100, -99, -10, -9, -1, 0, 1, 5, 9, 10, 11, 99, 100, 109, 110, 999, 1000]
SMALL = [str(one) for one in sorted({edge + by for edge in EDGES for by in range(-2, 3)} | {*range(-1100, 1101, 7)})]


@in_one_test("low", [None, *EDGES])
def test_integers_are_those_between(low: int | None) -> None:
    for high in [None, *EDGES]:
        said = {name: bound for name, bound in (("minimum", low), ("maximum", high)) if bound is not None}
        if said and (low is None or high is None or low <= high):
            held(integers(said), said, SMALL)


def test_other_integers() -> None:
    held(integers({"minimum": 3, "exclusiveMinimum": 5}), {"exclusiveMinimum": 5}, SMALL)
    held(integers({"minimum": 1.5, "exclusiveMaximum": 3.5}), {"minimum": 2, "maximum": 3}, SMALL)
    held(integers({"minimum": 10**17}), {"minimum": 10**17}, [str(10**17 + n) for n in (-1, 0, 1, 10**18)])
    assert expression(integers({"minimum": -(10**30)}) or "").fullmatch("-5")


def draw(random: random.Random) -> float:
    return random.choice([random.randint(-12, 12), round(random.uniform(-3, 3), random.randint(1, 4)), 0, 1, 0.5])


def test_numbers_are_those_between() -> None:
    """Texts at every bound, and a place beside it."""
    chance = random.Random(1)
    for _ in range(600):
        low, high = sorted((draw(chance), draw(chance)))
        said = {
            chance.choice(["minimum", "exclusiveMinimum"]): low,
            chance.choice(["maximum", "exclusiveMaximum"]): high,
        }
        said.pop(chance.choice([*said, ""]), None)
        texts = {"-0.5", "0", "7", "13", "-13", "0.000001", "-0.000001", "1000000", "-1000000"}
        for bound in (low, high):
            for step in (Decimal(0), Decimal("0.000001"), Decimal("0.001"), Decimal("0.1"), Decimal(1)):
                for value in (Decimal(str(bound)) - step, Decimal(str(bound)) + step):
                    plain = f"{value:f}"
                    texts |= {plain, f"{value:.6f}", f"{value:.4f}"}
                    texts.add(plain.rstrip("0").rstrip(".") if "." in plain else plain)
        texts.discard("-0")
        grammar = numbers(said)
        if low == high and grammar is None:
            continue
        held(grammar, said, sorted(text for text in texts if float(text) or "-" not in text))


@pytest.mark.parametrize("wrong", [True, "3", None, float("inf")], ids=str)
def test_a_bound_that_is_no_number_is_not_known(wrong: Any) -> None:
    assert integers({"minimum": wrong}) is None
    assert numbers({"minimum": 1, "maximum": wrong}) is None


@pytest.mark.parametrize(
    "said",
    [{"minimum": 3, "maximum": 2}, {"exclusiveMinimum": 1, "maximum": 1}, {"minimum": 10**19}],
    ids=json.dumps,
)
def test_where_nothing_is_there_is_no_grammar(said: Mapping[str, Any]) -> None:
    assert integers(said) is None


def test_digits_that_a_double_confuses_are_not_known() -> None:
    assert numbers({"exclusiveMaximum": 123456789.1234567}) is None
    assert numbers({"minimum": 1e15}) is None
    held(numbers({"maximum": 123456789012}), {"maximum": 123456789012}, ["123456789012.001", "123456789011.999"])
