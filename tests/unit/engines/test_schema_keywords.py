"""Which keyword of a schema is found to be lost; that it would be, the engines' own tests show."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from handler.engines.structured_output import schema_keywords
from handler.engines.structured_output.schema_keywords import XgrammarSupport, cyclic_reference, ignored
from tests.one_test import in_one_test
from tests.unit.engines.schema_cases import CASES, Case

ALL = XgrammarSupport(bounds=True, others=True)
NEITHER = XgrammarSupport(bounds=False, others=False)


@in_one_test("case", CASES, ids=lambda case: json.dumps(case.schema)[:80])
def test_a_keyword_is_found(case: Case) -> None:
    assert (ignored(case.schema, ALL) or "") == case.lost


@in_one_test("case", [case for case in CASES if case.lost_openvino], ids=lambda case: case.lost_openvino)
def test_what_an_older_one_loses_is_found(case: Case) -> None:
    assert ignored(case.schema, NEITHER) == case.lost_openvino


def test_what_allows_everything_is_not_lost() -> None:
    idle = {
        "uniqueItems": False,
        "required": [],
        "dependentRequired": {},
        "patternProperties": {},
        "propertyNames": True,
    }
    assert ignored({"type": ["array", "object"], **idle}, NEITHER) is None
    assert ignored(idle, NEITHER) is None


def deep(levels: int, inside: Any) -> Any:
    for _ in range(levels):
        inside = {"type": "array", "items": inside}
    return inside


def test_depth_is_no_matter() -> None:
    found = ignored(deep(5000, {"not": {}}), ALL)
    assert found is not None
    assert found.startswith("...")
    assert found.endswith("items.items.not")
    assert len(found) < 200


def test_references_may_go_round() -> None:
    assert ignored({"$ref": "#"}, ALL) is None
    tree = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "string"}]}
    assert ignored({"$defs": {"tree": tree}, "$ref": "#/$defs/tree", "type": "string"}, ALL) is None
    assert ignored({"$defs": {"tree": tree}, "$ref": "#/$defs/tree", "type": "array"}, ALL) == "type beside $ref"
    assert ignored({"$ref": "#/nowhere"}, ALL) is None  # which xgrammar refuses


def test_many_branches_are_looked_at_once() -> None:
    """Each refers twice to the next: 2 to the power of 60 ways."""
    steps = {str(n): {"type": "string", "anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}
    last = {"60": {"type": "string", "not": {}}}
    assert ignored({"$defs": {**steps, **last}, "$ref": "#/$defs/0"}, ALL) == "$defs.60.not"


ODD: list[Any] = [None, True, 0, 1.5, "", "#/x", [], [1], [[]], {}, {"type": 1}, {"a": []}, ["string", 1]]


def test_what_is_no_schema_raises_nothing() -> None:
    """xgrammar says what is wrong with it."""
    chance = random.Random(0)
    names = sorted({name for case in CASES if isinstance(case.schema, dict) for name in case.schema})
    for _ in range(20_000):
        some = {name: chance.choice(ODD) for name in chance.sample(names, 3)}
        ignored(some if chance.random() < 0.5 else {"type": chance.choice(["object", "array", "string"]), **some}, ALL)
    for odd in ODD:
        ignored(odd, ALL)


TYPED: dict[str, Callable[[int], Any]] = {
    "a chain of references": lambda n: {
        **{str(k): {"type": "string", "$ref": f"#/{k + 1}"} for k in range(n)}, str(n): {"type": "string"},
        "type": "string", "$ref": "#/0",
    },
    "many references to many branches": lambda n: {
        "anyOf": [{"type": "string", "$ref": "#/a"}] * n, "a": {"anyOf": [{"type": "string"}] * n}
    },
    "many references to many values": lambda n: {
        "anyOf": [{"type": "integer", "$ref": "#/a"}] * n, "a": {"enum": [*range(n)]}
    },
    "branches in branches": lambda n: nested(n, lambda inside: {"type": "string", "anyOf": [inside]}),
    "objects in objects": lambda n: nested(n, lambda inside: {"type": "object", "properties": {"a": inside}}),
    "many properties": lambda n: {"type": "object", "properties": {str(k): {} for k in range(20 * n)}},
}  # fmt: skip


def nested(depth: int, around: Callable[[Any], Any]) -> Any:
    found: Any = {"type": "string"}
    for _ in range(depth):
        found = around(found)
    return found


def lookups(monkeypatch: pytest.MonkeyPatch, schema: Any) -> int:
    """How often the types of a subschema are looked up."""
    count = 0
    real = schema_keywords._names

    def names(value: Any) -> list[str]:
        nonlocal count
        count += 1
        return real(value)

    monkeypatch.setattr(schema_keywords, "_names", names)
    ignored(schema, ALL)
    monkeypatch.undo()
    return count


@pytest.mark.parametrize("name", TYPED)
def test_types_are_looked_up_within_a_budget(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A schema's text has at most 16,384 characters, so it has some hundred subschemas of these."""
    schema = json.loads(json.dumps(TYPED[name](300)))
    assert lookups(monkeypatch, schema) <= 20_000
    began = time.process_time()
    ignored(schema, ALL)
    assert time.process_time() - began < 0.1


def test_a_type_that_is_too_costly_to_look_up_is_refused_by_its_name() -> None:
    assert ignored(TYPED["many references to many branches"](30), ALL) is None
    schema = json.loads(json.dumps(TYPED["many references to many branches"](300)))
    assert str(ignored(schema, ALL)).endswith(".type beside $ref")


@in_one_test(
    ("schema", "reference"),
    [
        ({"$ref": "#"}, "#"),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"$ref": "#"}]}]}, "#"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#/$defs/a"),
        ({"properties": {"a": {"$ref": "#"}}, "items": {"$ref": "#"}}, None),
        ({"$defs": {"a": {"type": "string"}}, "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/missing"}]}, None),
    ],
)
def test_a_reference_that_leads_back_to_itself_is_found(schema: Any, reference: str | None) -> None:
    assert cyclic_reference(schema) == reference
