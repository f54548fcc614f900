"""What llama-server gets of each parameter, and which schemas and grammars are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft4Validator, Draft201909Validator, Draft202012Validator

from handler.core.values import Sampling, StructuredOutput
from handler.engines.llamacpp.parameters import CAPABILITIES, Leg, completion, grammar
from handler.engines.llamacpp.schema import schema_grammar
from tests.parameter_matrix import FIELD_VALUES
from tests.unit.engines.test_url_document import GUIDES, HANDLERS_OWN

LEG = Leg([1], 5)
BASE: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "logprobs": False}
BY_THE_ENGINE = {"max_new_tokens", "min_new_tokens", "stop_token_ids", "presence_penalty", "frequency_penalty"}
"""Fields for which the engine chooses the length, the end and the biases of a completion."""


def test_what_is_not_refused_changes_the_request() -> None:
    plain = completion(Sampling(**BASE), LEG, 64)
    for field in set(Sampling._fields) - CAPABILITIES.unsupported.keys() - HANDLERS_OWN - BY_THE_ENGINE:
        assert completion(Sampling(**{**BASE, field: FIELD_VALUES[field]}), LEG, 64) != plain, field
    stops = Sampling(**BASE, stop_token_ids=(7,))
    assert completion(stops, LEG._replace(without_end=True), 64)["logit_bias"] == [[7, False]]
    penalized = completion(Sampling(**BASE), LEG._replace(bias={7: -0.5}, frequency_penalty=0.25), 64)
    assert (penalized["logit_bias"], penalized["frequency_penalty"]) == ([[7, -0.5]], 0.25)
    guides = {**GUIDES, "regex": "b"}  # the grammar of a choice is that of an expression too
    guided = [
        completion(Sampling(**BASE, structured_output=StructuredOutput(*guide)), LEG, 64) for guide in guides.items()
    ]
    assert len({str(body) for body in (plain, *guided)}) == 1 + len(GUIDES)


def test_choices_and_expressions_become_gbnf() -> None:
    assert grammar(StructuredOutput("choice", '["a\\"b", "é"]')) == {
        "grammar": r'root ::= ("a\U00000022b" | "\U000000e9")'
    }
    assert grammar(StructuredOutput("regex", "[0-9]{2}")) == {"grammar": "root ::= ([0-9]{2,2})"}


A: dict[str, Any] = {"$defs": {"a": {"properties": {"a": {"type": "integer"}}}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"not": {"type": "string"}}, "additionalProperties": False},
        {"type": "integer", "minimum": 3},
        {"enum": [{"not": 1}], "default": {"if": 1}},
        {"type": "array", "uniqueItems": False, "items": {"$ref": "#/$defs/a"}},
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        {"type": "string", "minimum": 3, "uniqueItems": True, "required": ["a"]},
        {"type": "object", "$defs": {"unused": {"not": {}}}, "then": False, "additionalItems": False},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "string", "format": []},
        {"anyOf": [{"const": 1}, {"type": "number"}], "type": "number", "minLength": 0},
        {"allOf": [{"$ref": "#/$defs/a"}, {"required": ["b"], "properties": {"b": {}}}], "required": ["a"]},
        {"allOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
    ],
)  # fmt: skip
def test_schemas_without_ignored_keywords(schema: Any) -> None:
    given = {**A, **schema}
    assert grammar(StructuredOutput("json_schema", json.dumps(given))) == {"json_schema": given}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"anyOf": [{"type": ["null", "number"], "multipleOf": 2}]}, "multipleOf"),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"prefixItems": [{"not": {}}]}, "not"),
        ({"additionalProperties": {"contains": {}}}, "contains"),
        ({"properties": {"a": {"minimum": 3}}}, "minimum"),
        ({"items": {"required": ["a"]}}, "required"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "array", "unevaluatedItems": {"type": "null"}}, "unevaluatedItems"),
        ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "type"),
        ({"properties": {"a": {}}, "anyOf": [{}]}, "properties"),
        ({"$ref": "#/$defs/a", "maxLength": 3}, "maxLength"),
        ({"enum": [1, 2], "type": "string"}, "type"),
        ({"const": 1, "minimum": 2}, "minimum"),
        ({"type": "integer", "allOf": [{"minimum": 3}]}, "allOf"),
        ({"type": "object", "properties": {"a": {}}, "allOf": [{"required": ["a"]}]}, "allOf"),
        ({"allOf": [{"properties": {"a": {}}}, {"additionalProperties": False}]}, "additionalProperties"),
        ({"allOf": [{"properties": {"a": {}}}, {"anyOf": [{}]}]}, "anyOf"),
    ],
)  # fmt: skip
def test_ignored_keywords_are_refused(schema: Any, keyword: str) -> None:
    with pytest.raises(ValueError, match=f"(ignores|does not enforce) '{keyword}'"):
        grammar(StructuredOutput("json_schema", json.dumps({**A, **schema})))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "minLength": "x"}, "'minLength' in the schema must be a whole number of at least 0"),
        ({"type": "string", "minLength": 1.5}, "'minLength' in the schema must be a whole number of at least 0"),
        ({"type": "string", "maxLength": -1}, "'maxLength' in the schema must be a whole number of at least 0"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "'maxLength' in the schema is less than 'minLength'"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "'maxItems' in the schema is less than 'minItems'"),
        ({"type": "array", "minItems": 2001}, "'minItems' in the schema must be at most 2000 for llama-server"),
        ({"type": {}}, "'type' in the schema must be one of string, number"),
        ({"type": "integer", "minimum": "5"}, "'minimum' in the schema must be a number"),
        ({"type": "string", "pattern": 5}, "'pattern' in the schema must be a string"),
        ({"type": "object", "properties": {"a": {}}, "required": [1]}, "'required' in the schema must be a list of"),
    ],
)
def test_a_wrong_value_is_refused_by_its_keyword_and_place(schema: Any, words: str) -> None:
    for given, place in (
        (schema, ""),
        ({"type": "object", "properties": {"a b": {"type": "array", "items": schema}}}, " (at properties.a b.items)"),
        ({"anyOf": [True, schema]}, " (at anyOf[1])"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            grammar(StructuredOutput("json_schema", json.dumps(given)))
        assert str(caught.value).endswith(place) or not place
        assert "(at" in str(caught.value) or not place


@pytest.mark.parametrize("wrong", [5, None, False])
def test_a_place_is_named_only_if_it_is_certain(wrong: Any) -> None:
    """Equal numbers are one object in Python."""
    properties = {"b": {"type": "array", "items": wrong, "prefixItems": [wrong]}, "a": {"const": wrong}}
    with pytest.raises(ValueError, match=r"\A(?!.* \(at properties\.a)"):
        grammar(StructuredOutput("json_schema", json.dumps({"type": "object", "properties": properties})))


def test_a_whole_number_may_have_a_point() -> None:
    for name, kind in (("minLength", "string"), ("maxLength", "string"), ("minItems", "array"), ("maxItems", "array")):
        point, whole = (schema_grammar({"type": kind, name: value}).text for value in (2.0, 2))
        assert point == whole


ENFORCED = {
    "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format",
    "items", "maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum", "oneOf", "pattern", "prefixItems",
    "properties", "required", "type",
}  # fmt: skip


def test_every_other_keyword_of_every_draft_is_refused() -> None:
    drafts = (Draft4Validator, Draft201909Validator, Draft202012Validator)
    known = set[str]().union(*(draft.VALIDATORS for draft in drafts)) - {
        "additionalItems"
    }  # the number of items is fixed
    assert known >= ENFORCED
    for keyword in known - ENFORCED:
        with pytest.raises(ValueError, match=f"(ignores|does not enforce) {re.escape(repr(keyword))}"):
            grammar(StructuredOutput("json_schema", json.dumps({keyword: {"a": False}})))


NESTED = 200


def test_grammars_that_would_crash_the_server_are_refused() -> None:
    def nested(depth: int, inner: str = '"a"') -> StructuredOutput:
        return StructuredOutput("grammar", "root ::= " + "(" * depth + inner + ")" * depth)

    assert grammar(nested(NESTED))
    assert grammar(nested(NESTED, '"((" [(\\](] # ((\n')), "these are no groups"
    with pytest.raises(ValueError, match="more than 200 nested groups"):
        grammar(nested(NESTED + 1))
    with pytest.raises(ValueError, match="more than 200 nested groups"):
        grammar(StructuredOutput("grammar", "root ::= " + '("))" ' * (NESTED + 1)))
    with pytest.raises(ValueError, match="must not exceed 262,144 characters"):
        grammar(StructuredOutput("choice", str([f"{number:09}" for number in range(60_000)]).replace("'", '"')))
