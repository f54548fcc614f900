"""Rules for answers with calls: which requests have one, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import InvalidParameter
from handler.core.values import StructuredOutput
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.formats.json_calls import HERMES
from handler.protocols.assistant.tools.grammar import calls
from handler.protocols.assistant.tools.parsing import NamedCall
from handler.protocols.assistant.tools.request import Tools, read_tools
from handler.protocols.openai.chat import OpenAiChat
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, with_options
from tests.unit.protocols.assistant.tool_texts import TOOLS, read, write

TEMPLATE = "{% if tools %}<tool_call>{% endif %}"
TAGS = replace(CAPABLE, structural_tags=frozenset({"json"}), chat_template=TEMPLATE)
STRICT = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
PLAIN = {"type": "object"}


def rule(tools: Tools) -> Any:
    assert tools.structured_output is not None
    assert tools.structured_output.kind == "structural_tag"
    return json.loads(tools.structured_output.value)["format"]


def tags(tag: Any) -> list[tuple[str, Any]]:
    return [(each["begin"], each["content"]["json_schema"]) for each in tag["tags"]]


WEATHER = ('<tool_call>\n{"name": "weather", "arguments": ', TOOLS[0]["function"]["parameters"])
TIME = ('<tool_call>\n{"name": "time", "arguments": ', TOOLS[1]["function"]["parameters"])


def test_required_calls_are_in_the_models_format() -> None:
    found = read_tools({"tools": TOOLS[:2], "tool_choice": "required"}, TAGS)
    assert (found.format, rule(found)["type"]) == (HERMES, "tags_with_separator")
    assert (rule(found)["at_least_one"], rule(found)["stop_after_first"]) == (True, False)
    assert tags(rule(found)) == [WEATHER, TIME]
    single = read_tools({"tools": TOOLS[:2], "tool_choice": "required", "parallel_tool_calls": False}, TAGS)
    assert rule(single)["stop_after_first"]


def test_a_named_one_is_a_single_call_of_it() -> None:
    found = read_tools({"tools": TOOLS, "tool_choice": "weather"}, TAGS)
    assert (found.name, found.format, tags(rule(found))) == ("weather", HERMES, [WEATHER])
    assert rule(found)["stop_after_first"]
    assert not isinstance(found.parser(), NamedCall)


def test_strict_ones_rule_the_calls_in_a_text() -> None:
    found = read_tools({"tools": [STRICT, TOOLS[1]]}, TAGS)
    assert found.structured_output is not None
    assert found.structured_output.allows_text
    assert (rule(found)["type"], rule(found)["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert tags(rule(found)) == [WEATHER, (TIME[0], PLAIN)]
    assert found.unheeded == ()
    assert read_tools({"tools": TOOLS}, TAGS).structured_output is None
    assert "strict" not in str(found.shown), "the model does not see it"


@pytest.mark.parametrize(
    ("changes", "body"),
    [
        ({"structural_tags": frozenset()}, {}),
        ({"config": Config(tool_call_parser="pythonic")}, {}),
        ({"config": Config(tool_call_parser="llama3_json")}, {}),
    ],
    ids=["the engine has none", "the format has none", "no mark"],
)
def test_strict_without_a_rule_is_reported(changes: dict[str, Any], body: dict[str, Any]) -> None:
    found = read_tools({"tools": [STRICT], **body}, replace(TAGS, **changes))
    assert (found.structured_output, found.unheeded) == (None, ["tools[].function.strict"])


@pytest.mark.parametrize("changes", [{"structural_tags": frozenset()}, {"config": Config(tool_call_parser="pythonic")}])
def test_without_a_notation_required_calls_are_json(changes: dict[str, Any]) -> None:
    for choice in ("required", "weather"):
        found = read_tools({"tools": TOOLS, "tool_choice": choice}, replace(TAGS, **changes))
        assert (found.format, found.structured_output and found.structured_output.kind) == (None, "json_schema")


def test_a_format_may_have_several_notations() -> None:
    newer, older = (FORMATS["mistral"].notation(template) for template in ("[TOOL_CALLS]x[ARGS]", "[TOOL_CALLS]["))
    assert newer is not None
    assert older is not None
    assert (newer.call, older.block) == (("[TOOL_CALLS]NAME[ARGS]", ""), ("[TOOL_CALLS][", "]"))


def test_what_is_wrong_is_named_in_grammar() -> None:
    with pytest.raises(InvalidParameter, match=r"tools\[0\]\.function\.strict: must be true or false"):
        read_tools({"tools": [{**STRICT, "function": {**STRICT["function"], "strict": 1}}]}, TAGS)
    long = {"type": "object", "properties": {"a" * 20_000: PLAIN}}
    for choice, words in (("auto", "with strict"), ("required", 'for tool_choice="required"')):
        tool = {"type": "function", "function": {"name": "f", "parameters": long, "strict": True}}
        with pytest.raises(InvalidParameter, match=f"tools: {words}, their schemas must have at most"):
            read_tools({"tools": [tool], "tool_choice": choice}, TAGS)


def chat(**body: Any) -> Any:
    messages = [{"role": "user", "content": "a"}]
    return OpenAiChat().parse({"model": "model", "messages": messages, "tools": [STRICT], **body}, TAGS).requests[0]


ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PLAIN}}},
        {"type": "json_schema", "json_schema": PLAIN},
    ),
    "an object": ({"response_format": {"type": "json_object"}}, {"type": "json_schema", "json_schema": PLAIN}),
    "an expression": ({"guided_regex": "a"}, {"type": "regex", "pattern": "a"}),
    "a grammar": ({"guided_grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
    "a choice": (
        {"guided_choice": ["a", "b"]},
        {"type": "or", "elements": [{"type": "const_string", "value": value} for value in "ab"]},
    ),
}


@in_one_test("name", ANSWERS)
def test_an_answer_is_calls_or_follows_its_own_rule(name: str) -> None:
    body, wanted = ANSWERS[name]
    for tools in [STRICT], [TOOLS[0]]:
        request = chat(tools=tools, **body)
        ruled = request.sampling.structured_output
        assert not ruled.allows_text
        calling, answer = json.loads(ruled.value)["format"]["elements"]
        assert answer == wanted
        assert tags(calling) == [WEATHER]
        assert request.names.structured_output == next(iter(body))


def test_calls_that_must_come_leave_no_other_answer() -> None:
    schema = ANSWERS["a schema"][0]
    assert chat(tool_choice="required", **schema).sampling == chat(tool_choice="required").sampling
    assert chat(tool_choice="weather", **schema).sampling == chat(tool_choice="weather").sampling
    assert chat(tool_choice="none", **schema).sampling.structured_output.kind == "json_schema"
    with pytest.raises(InvalidParameter, match="response_format"):
        chat(tool_choice="required", response_format={"type": "json_schema"})
    with pytest.raises(InvalidParameter, match="contradicts"):
        chat(tool_choice="required", guided_regex="a")


@pytest.mark.parametrize(
    "changes",
    [
        {"structural_tags": frozenset()},
        {"config": Config(tool_call_parser="pythonic")},
        {"config": Config(tool_call_parser="llama3_json")},
    ],
    ids=["the engine has none", "the format has none", "no mark"],
)
def test_calls_and_an_answer_without_a_rule_for_both_are_refused(changes: dict[str, Any]) -> None:
    body = {"model": "model", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "guided_regex": "a"}
    with pytest.raises(InvalidParameter, match=r"guided_regex: .* set tool_choice to none or required"):
        OpenAiChat().parse(body, replace(TAGS, **changes))
    plain = with_options(TAGS, tool_call_parser="none")
    found = OpenAiChat().parse(body, plain).requests[0].sampling.structured_output
    assert found == StructuredOutput("regex", "a"), "calls stay in the text"


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('{"a": "<tool_call>"}', 0),
        ('\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', 1),
        ("<tool", 0),
        ("", 0),
    ],
)
def test_an_answer_by_its_own_rule_has_no_calls(text: str, number: int, size: int) -> None:
    found = read_tools({"tools": TOOLS}, TAGS).with_response(StructuredOutput("regex", "a"), "guided_regex")
    parser = found.parser()
    assert parser is not None
    events = read(parser, [text[at : at + size] for at in range(0, len(text), size)])
    assert len([one for one in events if not isinstance(one, str)]) == number
    if not number:
        assert "".join(map(str, events)) == text


def test_strict_alone_rules_calls() -> None:
    assert chat().sampling.structured_output.allows_text
    assert chat().names.structured_output == "tools"
    assert chat(response_format={"type": "text"}).sampling.structured_output.allows_text
    with pytest.raises(InvalidParameter, match=r"ignore_eos=true: .* omit tools\[\]\.function\.strict"):
        chat(ignore_eos=True)


@in_one_test("name", [name for name, format in FORMATS.items() if format.notations])
def test_the_formats_parser_reads_what_its_notation_writes(name: str) -> None:
    for notation in (notation for notation in FORMATS[name].notations.values() if notation.style):
        told = [("weather", {"city": "Köln", "days": 3}), ("time", {})][: 2 if notation.several else 1]
        found = read(FORMATS[name].make(TOOLS), [write(notation, *told)])
        assert [one if isinstance(one, str) else (one[0], json.loads(one[1])) for one in found] == told
        assert not notation.mark or write(notation, *told).startswith(notation.mark)


def test_a_thought_comes_before_calls_in_a_text() -> None:
    context = with_options(replace(TAGS, chat_template=TEMPLATE + "<think></think>"), reasoning_parser="qwen3")
    body = {"model": "model", "messages": [{"role": "user", "content": "a"}], "tools": [STRICT], "presence_penalty": 1}
    request = OpenAiChat().parse(body, context).requests[0]
    assert request.read_prompt is not None
    for prompt, is_open in ("<think>\n", True), ("</think>\n", False):
        sampling = request.read_prompt(request, prompt).sampling
        assert sampling.thoughts is not None
        assert (sampling.thoughts.is_open, sampling.structured_output) == (is_open, request.sampling.structured_output)


@pytest.mark.parametrize("name", ["RANDOM_NUMBER", "NAME", "a.b-c_NUMBER_NAME"])
def test_a_tools_name_is_no_placeholder(name: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": PLAIN}}
    for notation in (notation for format in FORMATS.values() for notation in format.notations.values()):
        rule = calls(notation, [tool], single=True)
        (tag,) = rule["tags"] if "tags" in rule else rule["content"]["tags"]
        number, _, named = notation.call[0].partition("NUMBER")
        literal = tag["content"]["elements"][1]["value"] if "NAME" in named else tag["begin"]
        assert name in literal, "the name comes before the number or after it"
        assert ("NAME" in number) != ("NAME" in named)
        assert str(tag).count("[0-9]{1,4}") == ("NUMBER" in notation.call[0])


def test_a_reference_that_a_list_of_calls_would_lose_is_refused() -> None:
    def tool(reference: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"child": {"$ref": reference}}, "$defs": {"a/b": PLAIN}}
        return {"type": "function", "function": {"name": "f", "parameters": schema}}

    without = replace(TAGS, structural_tags=frozenset())
    for reference in ("#", "#/properties/child", "https://elsewhere/"):
        body = {"tools": [tool(reference)], "tool_choice": "required"}
        with pytest.raises(InvalidParameter, match=rf"a tool's \$ref '{reference}' must begin with"):
            read_tools(body, without)
        assert read_tools(body, TAGS).structured_output, "a structural tag has each schema by itself"
        assert read_tools({**body, "tool_choice": "f"}, without).structured_output, "and so has a single call"
    assert read_tools({"tools": [tool("#/$defs/a~1b")], "tool_choice": "required"}, without).structured_output
