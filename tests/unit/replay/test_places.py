"""Values that are right, but in another place of a response: a replay finds each."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from proof.replay.comparison import Class, class_of, traits
from proof.replay.content import NEAR
from proof.replay.exchange import Request, Response
from proof.replay.noise import Noise

NAMES = ("label", "tokens", "score", "5 stars", "1", "é è", "document_id", "vector")


def replayed(reference: bytes, target: bytes, route: str = "/predict") -> Class:
    request = Request("1", route, {}, json.dumps({"inputs": ["one", "two"]}).encode())
    both = [Response(200, "application/json", body) for body in (reference, target)]
    found = Noise(NEAR).real(request, traits(request), both[0], both[1], None, both[0])
    return class_of(asyncio.run(found))


def drawn(draw: random.Random, depth: int = 3) -> Any:
    """Draw a value. Numbers are far from each other."""
    if not depth or draw.random() < 0.2:
        return draw.choice([draw.randrange(90), draw.randrange(1, 90) / 7, f"word {draw.randrange(90)}", None, True])
    if draw.random() < 0.5:
        return [drawn(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {name: drawn(draw, depth - 1) for name in draw.sample(NAMES, draw.randrange(1, 4))}


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from containers(part)


def moved(value: Any, draw: random.Random) -> Any:
    """Return a copy in which one value has another place, or two have changed places."""
    copy = json.loads(json.dumps(value))
    two = draw.choices([*containers(copy)], k=2)
    if two[0] is not two[1] and all(isinstance(part, list) for part in two) and two[0] and draw.random() < 0.5:
        item = two[0].pop(draw.randrange(len(two[0])))
        if not any(part is two[1] for part in containers(item)):
            two[1].insert(draw.randrange(len(two[1]) + 1), item)
        return copy
    keys = [draw.choice([*part] if isinstance(part, dict) else range(len(part))) if part else None for part in two]
    if None not in keys:
        values = [part[key] for part, key in zip(two, keys, strict=True)]
        if not any(part is one for one in two for other in values for part in containers(other)):
            two[0][keys[0]], two[1][keys[1]] = values[1], values[0]
    return copy


@pytest.mark.parametrize("seed", range(20))
def test_a_value_in_another_place_is_found(seed: int) -> None:
    draw = random.Random(seed)
    missed = []
    for _ in range(60):
        value = [drawn(draw) for _ in range(3)]
        other = moved(value, draw)
        if other != value and replayed(json.dumps(value).encode(), json.dumps(other).encode()) in (
            Class.EQUAL,
            Class.TIE,
        ):
            missed.append((value, other))
    assert missed == []


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        ({"labels": {"5 stars": 0.55, "1 star": 0.35}}, {"labels": {"5 stars": 0.35, "1 star": 0.55}}),
        ([{"very good": 0.9}, {"very bad": 0.1}], [{"very bad": 0.9}, {"very good": 0.1}]),
        ([{"cat": 0.5}, {"dog": 0.5}], [{"dog": 0.5}, {"cat": 0.5}]),
        ({"tokens": [[1, 2], [3]]}, {"tokens": [[1], [2, 3]]}),
        ({"calls": [{"call": {"name": "f"}}, {}]}, {"calls": [{}, {"call": {"name": "f"}}]}),
        ([[100.0, 3.5], [0.5, -0.5]], [[100.0, 3.5], [-0.5, 0.5]]),
        ([{"document_id": "a"}, {"document_id": "b"}], [{"document_id": "b"}, {"document_id": "a"}]),
    ],
)
def test_a_name_a_list_or_a_field_of_another_item_is_found(reference: Any, target: Any) -> None:
    assert replayed(json.dumps(reference).encode(), json.dumps(target).encode()) is Class.TEXT


def test_members_whose_names_are_content_may_have_any_order() -> None:
    assert replayed(b'{"a b": 0.9, "c d": 0.1}', b'{"c d": 0.1, "a b": 0.9}') is Class.EQUAL


def test_a_number_on_a_line_of_its_own_is_found_but_not_the_number_of_an_event() -> None:
    assert replayed(b'{"a": 1}\n42\n', b'{"a": 1}\n43\n') is Class.FRAMING
    first, second = (b'id: %d\ndata: {"a": 1}\n\nid: 9\ndata: {"a": 2}\n\n' % number for number in (7, 8))
    assert replayed(first, second) is Class.EQUAL
