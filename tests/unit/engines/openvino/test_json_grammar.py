"""JSON schemas as grammars without white space: which are taken, and that the answers are what the schema says."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.openvino.model import prepare_model
from handler.engines.openvino.structured_output import OpenVinoCheck, genai_arguments
from handler.engines.structured_output.json_grammar import json_grammar, literal
from tests.one_test import in_one_test

LIST = {
    "$defs": {
        "node": {
            "type": "object",
            "title": "Node",
            "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/node",
}


def is_list(value: Any) -> bool:
    return value is None or (set(value) == {"v", "next"} and isinstance(value["v"], bool) and is_list(value["next"]))


def has(value: Any, required: set[str], optional: set[str]) -> bool:
    """The properties are there, in the schema's order, each a boolean."""
    names = [name for name in ("a", "b", "c") if name in value]
    return (
        list(value) == names
        and required <= set(names) <= required | optional
        and all(v in (True, False) for v in value.values())
    )


def three(*required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in "abc"},
        "required": list(required),
        "additionalProperties": False,
    }


ODD = ["a", 'b"\\', 3, None, {"x": [1, "é😀\n\0"]}]

ENDING: list[tuple[Any, Callable[[Any], bool]]] = [
    (three("a", "b", "c"), lambda value: has(value, {"a", "b", "c"}, set())),
    (three(), lambda value: has(value, set(), {"a", "b", "c"})),
    (three("b"), lambda value: has(value, {"b"}, {"a", "c"})),
    ({"type": "object", "additionalProperties": False}, lambda value: value == {}),
    ({"type": "integer"}, lambda value: isinstance(value, int)),
    ({"type": "number"}, lambda value: isinstance(value, (int, float))),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 2}, lambda value: -3 <= value < 2),
    ({"type": "integer", "minimum": 0}, lambda value: value >= 0),
    ({"type": "integer", "minimum": 3}, lambda value: value >= 3),
    ({"type": "number", "minimum": 0, "maximum": 1}, lambda value: 0 <= value <= 1),
    ({"type": "number", "exclusiveMinimum": -0.5}, lambda value: value > -0.5),
    ({"type": ["integer", "boolean"], "maximum": 3}, lambda value: isinstance(value, bool) or value <= 3),
    ({**three("a"), "additionalProperties": True}, lambda value: has(value, {"a"}, {"b", "c"})),
    ({"type": ["integer", "null"]}, lambda value: value is None or isinstance(value, int)),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, lambda value: value == []),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3}, lambda value: len(value) in (2, 3)),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 1}, lambda value: len(value) <= 1),
    ({"type": "string", "minLength": 2, "maxLength": 3}, lambda value: 2 <= len(value) <= 3),
    ({"enum": ODD}, lambda value: value in ODD),
    ({"const": [1, {"a": "b"}]}, lambda value: value == [1, {"a": "b"}]),
    ({"oneOf": [{"const": 1}, {"type": "boolean"}]}, lambda value: value in (1, True, False)),
    (LIST, is_list),
]  # fmt: skip
"""Schemas whose answers end soon even where each token is drawn by lot."""


@in_one_test("schema", [schema for schema, _ in ENDING], ids=json.dumps)
def test_these_are_known(schema: Any) -> None:
    assert json_grammar(schema) is not None
    assert set(genai_arguments(StructuredOutput("json_schema", json.dumps(schema)))) == {"grammar"}


@in_one_test(
    "schema",
    [
        {"type": "string", "pattern": "a+"},
        {"type": "string", "format": "date"},
        {"type": "foo"},
        {"type": "array", "prefixItems": [{}]},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}},
        {"$ref": "#/$defs/missing"},
        False,
    ],
    ids=json.dumps,
)
def test_what_is_beyond_it_is_left_to_xgrammar(schema: Any) -> None:
    assert json_grammar(schema) is None
    structured_output = StructuredOutput("json_schema", json.dumps(schema))
    assert genai_arguments(structured_output) == {"json_schema": structured_output.value}


@in_one_test(
    "schema",
    [
        {"type": "integer", "multipleOf": 3},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "number", "minimum": 1e15},
        {"type": ["string", "integer"], "minItems": 3, "minimum": 3},
        {"allOf": [{"type": "string"}, {"minLength": 3}]},
        {"not": {}},
        {"enum": []},
        {"anyOf": [{"type": "string"}], "minLength": 2},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"$ref": "http://elsewhere/"},
    ],
    ids=json.dumps,
)
def test_what_is_beyond_both_is_refused(schema: Any) -> None:
    assert json_grammar(schema) is None
    with pytest.raises(ValueError, match="cannot be followed"):
        genai_arguments(StructuredOutput("json_schema", json.dumps(schema)))


def test_a_schema_nested_beyond_python_is_left_to_xgrammar() -> None:
    schema: Any = {}
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    assert json_grammar(schema) is None


@pytest.mark.parametrize("depth", [64, 65])
def test_how_deep_a_schema_may_be_does_not_depend_on_the_stack(depth: int) -> None:
    """The engine's stack differs from that of the check, whose verdict holds for it."""
    schema: Any = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}

    def below(frames: int) -> str | None:
        return below(frames - 1) if frames else json_grammar(schema)

    assert (below(0) is None) == (below(400) is None) == (depth > 64)


def test_ranges_of_numbers_take_little_time_however_many_there_are() -> None:
    """The engine converts a schema between its steps."""

    def ranges(number: int) -> Any:
        return {
            "anyOf": [
                {"type": "number", "minimum": -98765432.123456, "maximum": 12345678.65 + n} for n in range(number)
            ]
        }

    assert json_grammar(ranges(10)) is not None
    began = time.process_time()
    assert json_grammar(ranges(200)) is None
    assert time.process_time() - began < 0.3
    assert (
        json_grammar({"anyOf": [{"type": "integer", "minimum": n, "maximum": 9 * n} for n in range(200)]}) is not None
    )


def test_a_bound_beyond_a_double_is_a_bound() -> None:
    assert json_grammar({"type": "integer", "maximum": 10**400}) == json_grammar({"type": "integer", "maximum": 10**30})
    assert json_grammar({"type": "number", "maximum": 10**400}) is None


class Drawn:
    """Answers to a guide with each token drawn by lot among those allowed."""

    def __init__(self, trial: OpenVinoCheck) -> None:
        self._trial = trial

    def texts(self, structured_output: StructuredOutput, number: int = 12, max_new_tokens: int = 200) -> Iterator[str]:
        """Those that ended."""
        pipeline = self._trial._blank_pipeline()
        for seed in range(number):
            config = self._trial._config(structured_output, seed, max_new_tokens=max_new_tokens)
            [result] = pipeline.generate([self._trial._prompt()], [config])
            [ids] = result.m_generation_ids
            if ids[-1] == 2:
                yield self._trial._tokenizer.decode(ids[:-1], skip_special_tokens=False)


@pytest.fixture(scope="module")
def drawn(demo_model: Path) -> Drawn:
    return Drawn(OpenVinoCheck(EngineConfig(model=prepare_model(str(demo_model), "auto"))))


@pytest.mark.model
@pytest.mark.parametrize(("schema", "obeys"), ENDING, ids=[json.dumps(schema) for schema, _ in ENDING])
def test_answers_obey_and_are_compact(drawn: Drawn, schema: Any, obeys: Callable[[Any], bool]) -> None:
    found = list(drawn.texts(StructuredOutput("json_schema", json.dumps(schema))))
    assert found
    for answer in found:
        value = json.loads(answer)
        assert obeys(value), answer
        if not isinstance(value, float):
            assert re.sub(r"(?<=\W)-0\b", "0", json.dumps(value, ensure_ascii=False)) == answer or "\\" in answer


@pytest.mark.model
def test_any_object_is_one_where_its_answer_ends(drawn: Drawn) -> None:
    for answer in drawn.texts(StructuredOutput("json_object", ""), number=20):
        assert isinstance(json.loads(answer), dict)


@pytest.mark.model
def test_choices_are_written_as_they_are_whatever_is_in_them(drawn: Drawn) -> None:
    choices = ['"', "\\", "a\nb", "\t", "é", "😀", "\u2028", "$x|y[z]", " "]
    found = set(drawn.texts(StructuredOutput("choice", json.dumps(choices)), number=60))
    assert found <= set(choices)
    assert len(found) > 3


def test_a_literal_is_plain_where_it_can_be() -> None:
    assert literal('yes, "é"') == '"yes, \\U00000022\\U000000e9\\U00000022"'


def test_properties_without_a_type_are_an_objects() -> None:
    schema = {"properties": {"n": {"type": "integer", "minimum": 1, "maximum": 5}}, "required": ["n"]}  # as TGI's docs
    assert json_grammar(schema) == json_grammar({"type": "object", **schema}) is not None
