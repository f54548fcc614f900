"""References in schemas, against the resolver of jsonschema."""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import quote

import pytest
from jsonschema import Draft202012Validator

from handler.core.values import StructuredOutput
from handler.engines.llamacpp.parameters import grammar
from handler.engines.structured_output.references import with_plain_references

NAMES = ("plain", "a/b", "a~b", "~1", "Box<string>", "Ä", "a b", "%20", "0", "")


def pointer(name: str, *, encoded: bool) -> str:
    escaped = name.replace("~", "~0").replace("/", "~1")
    return quote(escaped, safe="~") if encoded else escaped


def schemas() -> list[tuple[Any, Any]]:
    """Schemas with a reference to a constant, and the constant."""
    found: list[tuple[Any, Any]] = []
    for name in NAMES:
        for container in ("definitions", "$defs"):
            for encoded in (False, True):
                if "%" in name and not encoded:
                    continue  # another name, once it is decoded
                path = f"#/{container}/{pointer(name, encoded=encoded)}"
                found.append(({container: {name: {"const": name}}, "properties": {"x": {"$ref": path}}}, name))
    listed = {"anyOf": [{"const": 1}, {"const": 2}]}
    found.append(({"$defs": {"a": listed}, "properties": {"x": {"$ref": "#/$defs/a/anyOf/1"}}}, 2))
    chain = {"$ref": "#/$defs/a~1b"}
    found.append(({"$defs": {"a/b": {"const": 3}, "c d": chain}, "properties": {"x": {"$ref": "#/$defs/c%20d"}}}, 3))
    return found


@pytest.mark.parametrize(("schema", "constant"), schemas())
def test_a_reference_becomes_one_of_plain_names(schema: Any, constant: Any) -> None:
    before = json.dumps(schema)
    plain = with_plain_references(schema)
    assert json.dumps(schema) == before
    assert not set("~%") & set(plain["properties"]["x"]["$ref"])
    for given in (schema, plain):
        assert Draft202012Validator(given).is_valid({"x": constant})
        assert not Draft202012Validator(given).is_valid({"x": "other"})
    assert with_plain_references(plain) == plain


@pytest.mark.parametrize("container", ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
def test_names_of_schemas_may_be_those_of_keywords(container: str) -> None:
    named = {name: {"$ref": "#/not/properties/a~1b"} for name in ("default", "enum", "const", "examples", "$ref")}
    plain = with_plain_references({"not": {"properties": {"a/b": {"const": 4}}}, container: named})
    assert [plain[container][name] for name in named] == [{"$ref": "#/$defs/definition0"}] * len(named)


@pytest.mark.parametrize("definitions", [None, [], [{"const": 5}], 3, "text", True])
def test_definitions_that_are_no_object_do_not_matter(definitions: Any) -> None:
    schema = {"$defs": definitions, "not": {"a/b": {"const": 5}}, "anyOf": [{"$ref": "#/not/a~1b"}]}
    plain = with_plain_references(schema)
    assert plain["$defs"] == {"definition0": {"const": 5}}
    assert plain["anyOf"] == [{"$ref": "#/$defs/definition0"}]


def test_many_references_take_little_work() -> None:
    """Each name is tried once, however many are taken."""
    tried: list[str] = []

    class Taken(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            tried.append(str(name))
            return super().__contains__(name)

    number = 300
    definitions = Taken({f"x/{index}": True for index in range(number)} | {"definition3": {}})
    schema = {"$defs": definitions, "anyOf": [{"$ref": f"#/$defs/x~1{index}"} for index in range(number)]}
    plain = with_plain_references(schema)
    assert len(plain["$defs"]) == 2 * number + 1
    assert plain["$defs"]["definition3"] == {}
    assert sum(name.startswith("definition") for name in tried) == number + 1


def test_what_refers_to_itself_stays_finite_and_data_stays_as_it_is() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#/$defs/a~1b"}}}
    schema = {"$defs": {"a/b": tree}, "$ref": "#/$defs/a~1b", "default": {"$ref": "#/$defs/a~1b"}}
    plain = with_plain_references(schema)
    assert plain["$ref"] == plain["$defs"]["definition0"]["properties"]["child"]["$ref"] == "#/$defs/definition0"
    assert plain["default"] == schema["default"]
    for reference in ("#/$defs/none~1", "#/$defs/a%2", "other.json#/a~1b", "#a~1"):
        assert with_plain_references({"$ref": reference}) == {"$ref": reference}


def test_large_definitions_are_refused_and_deep_schemas_are_left_to_others() -> None:
    many = {f"{number}/": {"$ref": f"#/$defs/{number + 1}~1", "default": "x" * 9000} for number in range(50)}
    with pytest.raises(ValueError, match="lead to too much"):
        with_plain_references({"$defs": many, "$ref": "#/$defs/0~1"})
    deep: Any = {}
    for _ in range(5000):
        deep = {"not": deep}
    assert with_plain_references(deep) is deep


def test_random_trees_of_references_mean_the_same() -> None:
    draw = random.Random(5)
    for _ in range(200):
        names = draw.sample(NAMES, 4)
        parts: list[dict[str, Any]] = [{"const": name} for name in names[:2]]
        parts += [{"anyOf": [{"$ref": f"#/$defs/{pointer(draw.choice(names[:2]), encoded=True)}"}]} for _ in range(2)]
        definitions = dict(zip(names, parts, strict=True))
        last = f"#/$defs/{pointer(draw.choice(names), encoded=True)}" + "/anyOf/0" * draw.choice([0, 1])
        schema = {"$defs": definitions, "$ref": last}
        target = definitions
        if "/anyOf" in last and not any(last.startswith(f"#/$defs/{pointer(n, encoded=True)}/") for n in names[2:]):
            continue
        plain = with_plain_references(schema)
        for value in (*names, "other"):
            assert Draft202012Validator(schema).is_valid(value) == Draft202012Validator(plain).is_valid(value), target


def test_llama_server_gets_plain_references() -> None:
    schema = {"$defs": {"a/b": {"const": 1}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b"}}}
    sent = grammar(StructuredOutput("json_schema", json.dumps({**schema, "additionalProperties": False})))
    assert sent["json_schema"]["properties"]["x"] == {"$ref": "#/$defs/definition0"}
    with pytest.raises(ValueError, match="does not define the \\$ref '#/\\$defs/a~1c'"):
        grammar(StructuredOutput("json_schema", '{"$ref": "#/$defs/a~1c"}'))
