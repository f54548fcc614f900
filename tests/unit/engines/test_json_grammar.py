"""JSON schemas as grammars without white space."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.openvino.model import prepare
from handler.engines.openvino.structured_output import OpenVinoCheck, genai_arguments
from handler.engines.structured_output.characters import literal
from handler.engines.structured_output.json_grammar import integers, json_grammar, numbers
from tests.doubles.steps import steps
from tests.one_test import in_one_test

# -- json grammar ------------------------------------------------------------------------------------------------------
# JSON schemas as grammars without white space: which are taken, and that the answers are what the schema says.


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
    ({"type": "string", "pattern": '^["\\\\é]{2}$'}, lambda value: re.fullmatch(r'["\\é]{2}', value) is not None),
    ({"type": "string", "format": "ipv4"}, lambda value: str(IPv4Address(value)) == value),
    ({"type": "string", "format": "date"}, lambda value: value[:4] == "0000" or bool(date.fromisoformat(value))),
    (
        {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
        lambda value: list(value.values()) in ([], [None]),
    ),
    (
        {"patternProperties": {"^[a-c]$": {"type": "null"}}, "minProperties": 1, "maxProperties": 1, "type": "object"},
        lambda value: value and value.keys() <= {*"abc"},
    ),
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
        {"type": "foo"},
        {"type": "array", "prefixItems": [{}]},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "minProperties": 1},
        {"$ref": "#/$defs/missing"},
        False,
    ],
    ids=json.dumps,
)
def test_what_is_beyond_it_is_left_to_xgrammar(schema: Any) -> None:
    assert json_grammar(schema) is None
    structured_output = StructuredOutput("json_schema", json.dumps(schema))
    assert genai_arguments(structured_output) == {"json_schema": structured_output.value}


def test_two_properties_are_not_counted_by_names_that_may_be_repeated() -> None:
    """The grammar could write the same name twice, which is a single property."""
    schema: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "null"}}
    assert json_grammar({**schema, "minProperties": 1}) is not None
    assert json_grammar({**schema, "minProperties": 2}) is None


def test_a_name_follows_a_pattern_of_its_own_or_that_of_all_names_and_not_both() -> None:
    schema: dict[str, Any] = {"type": "object", "patternProperties": {"^[a-c]$": {"type": "null"}}}
    assert json_grammar(schema) is not None
    assert json_grammar({**schema, "propertyNames": {"maxLength": 1}}) is None


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
    with pytest.raises(ValueError, match="is not supported"):
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
    assert json_grammar(ranges(200)) is None
    assert steps(lambda: json_grammar(ranges(200))) < 1_000_000, "without a budget it is 5,000,000"
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
            if ids[-1] in self._trial._eos:
                yield self._trial._tokenizer.decode(ids[:-1], skip_special_tokens=False)


@pytest.fixture(scope="module")
def drawn(demo_model: Path) -> Drawn:
    return Drawn(OpenVinoCheck(EngineConfig(model=prepare(str(demo_model), EngineConfig()))))


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


# -- ranges of numbers, their grammars read as expressions and held against arithmetic ---------------------------------


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
