"""The schemas in structural tags, as the engines find and replace them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler.core.values import StructuredOutput
from handler.engines.openvino.structured_output import genai_arguments
from handler.engines.structured_output.xgrammar import with_schemas, without_text
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.grammar import calls, calls_in_text
from handler.protocols.kernel.readers import structural_tag

FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
DATE = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def rule(name: str, *schemas: dict[str, Any]) -> StructuredOutput:
    return structural_tag(calls(FORMATS[name].notations[""], map(tool, schemas), single=False))


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "deepseek_v3"])
def test_each_schema_is_replaced_where_it_stands(name: str) -> None:
    tag = json.loads(rule(name, FLAG, DATE).value)["format"]
    found: list[Any] = []

    def number(part: Any) -> dict[str, Any]:
        found.append(part["json_schema"])
        return {"type": "const_string", "value": "x"}

    replaced = json.dumps(with_schemas(tag, number))
    assert found == [FLAG, DATE]
    assert replaced.count('{"type": "const_string", "value": "x"}') == 2
    assert "json_schema" not in replaced


def test_openvino_has_our_own_grammar_where_there_is_one() -> None:
    (text,) = genai_arguments(rule("hermes", FLAG, DATE)).values()
    ours, theirs = (tag["content"] for tag in json.loads(text)["format"]["tags"])
    assert ours["grammar"].startswith("root ::= ")
    assert theirs == {"type": "json_schema", "json_schema": DATE}
    with pytest.raises(ValueError, match=r"properties\.a\.uniqueItems cannot be followed"):
        genai_arguments(rule("hermes", FLAG, UNIQUE))


def test_a_check_leaves_out_the_text_before_a_call() -> None:
    format = calls_in_text(FORMATS["hermes"].notations[""], [tool(FLAG)], ["f"], single=False)
    free = structural_tag(format, allows_text=True)
    ruled = without_text(free)
    assert json.loads(ruled.value)["format"] == {**format, "at_least_one": True}
    assert not ruled.allows_text
    assert without_text(ruled) is ruled
