"""Answers and schemas of an attacker: a comparison takes steps in proportion to them, or a bounded number."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from proof.replay.comparison import Seen, findings, framing_text
from proof.replay.content import fits, merged
from proof.replay.exchange import Response
from tests.unit.replay.test_comparison import GREEDY, SAMPLED, answer

Value = dict[str, Any]


class Odd(dict[str, Any]):
    """An object that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Odd.compared += 1
        return super().__eq__(other)


class Calls:
    """Counts the calls of Python's functions, and fails after too many."""

    def __init__(self, most: int = 10_000_000) -> None:
        self.number = 0
        self._most = most

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.number += event == "call"
        if self.number > self._most:
            sys.setprofile(None)
            pytest.fail(f"more than {self._most:,} calls")


def test_many_shapes_are_merged_in_linear_time() -> None:
    """Each of a hostile answer's objects has a name of its own."""
    number = 2000
    Odd.compared = 0
    with Calls(20 * number):
        found = merged([Odd({f"a{at}": "number"}) for at in range(number)])
    assert len(found) == number
    assert Odd.compared < 20 * number


@pytest.mark.parametrize("spread", ["types", "names", "indexes", "ids", "places"])
def test_hostile_answers_are_compared_in_linear_time(spread: str) -> None:
    def made(number: int, end: str) -> Response:
        documents: dict[str, list[Value]] = {
            "types": [{"type": f"t{at}", "a": end} for at in range(number)],
            "names": [{f"a{at}": 1} for at in range(number)],
            "indexes": [{"choices": [{"index": at, "text": "a"}]} for at in range(number)],
            "ids": [{"id": f"{at}"} for at in range(number)],
            "places": [{"a": {f"a{at}_id": f"{at}" for at in range(number)}}, {}],
        }
        return answer(*documents[spread], {"end": end})

    for wanted in (GREEDY, SAMPLED):
        calls = []
        for number in (200, 800):
            with Calls() as counted:
                findings(made(number, "a"), made(number, "b"), wanted, Seen())
            calls.append(counted.number)
        assert calls[1] < 5 * calls[0], calls


HOSTILE: dict[str, tuple[Value, Any]] = {
    "references that double": (
        {
            "$defs": {
                **{f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(60)},
                "a60": {"type": "integer"},
            },
            "$ref": "#/$defs/a0",
        },
        "x",
    ),
    "a pattern of names": ({"patternProperties": {"(x+)+y": {}}, "additionalProperties": False}, {"x" * 60: 1}),
    "all different": ({"uniqueItems": True}, [{"a": at} for at in range(5000)]),
    "many empty schemas": ({"allOf": [{"items": {}}] * 5000}, [0] * 5000),
}


@pytest.mark.parametrize("schema", HOSTILE)
def test_a_hostile_schema_takes_a_bounded_number_of_steps(schema: str) -> None:
    wanted, value = HOSTILE[schema]
    text = json.dumps(value)
    with Calls(3_000_000):
        assert fits(text, wanted)


def test_framing_is_told_in_linear_time() -> None:
    """An expression whose parts could each take the same text would take for ever."""
    text = "data:     " * 11 + "!"
    assert framing_text(text) == f"<{len(text)} characters>"
    for known in ("data: [DONE]\n\n", "\n\nevent: message_stop\ndata: ", "id: 0\nretry: 0\n\ndata:", "]", "\r\n"):
        assert framing_text(known) == json.dumps(known)
