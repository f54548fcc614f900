"""Tools: what requests say of them, how prompts show them, and the types of their parameters."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import InvalidParameter
from handler.core.text import Vocabulary
from handler.core.values import StructuredOutput
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.formats.json_calls import HERMES, LLAMA3_JSON, SMOLLM2
from handler.protocols.assistant.tools.grammar import ToolSchema
from handler.protocols.assistant.tools.parsing import Format
from handler.protocols.assistant.tools.request import Tools, choose_format, lay_out, read_tools
from tests.doubles.steps import steps
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, with_options
from tests.unit.protocols.assistant.tool_texts import BEGUN

# -- what requests say of tools, and how prompts show them -------------------------------------------------------------


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
EMPTY = {"type": "object", "properties": {}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def tools(**body: Any) -> Tools:
    return read_tools(body, CAPABLE)


def refusal(**body: Any) -> str:
    with pytest.raises(InvalidParameter) as caught:
        tools(**body)
    return str(caught.value)


def test_none_are_no_tools() -> None:
    assert tools() == tools(tools=None) == tools(tools=[], tool_choice="auto") == tools(tool_choice="none") == Tools()
    assert tools().parser() is None


def test_auto_shows_them_and_reads_the_models_form() -> None:
    found = tools(tools=[WEATHER, TIME])
    assert found.shown == [WEATHER, {"type": "function", "function": {"name": "time", "parameters": EMPTY}}]
    assert (found.choice, found.format, found.structured_output) == ("auto", SMOLLM2, None)
    assert found.parser() is not None


def test_choice_none_hides_them() -> None:
    found = tools(tools=[WEATHER], tool_choice="none")
    assert (found.shown, found.parser()) == ((), None)


def test_a_named_one_is_a_guide_for_its_arguments() -> None:
    found = tools(tools=[WEATHER, TIME], tool_choice=NAMED)
    assert found.name == "weather"
    assert found.structured_output == StructuredOutput("json_schema", json.dumps(CITY))


def test_its_name_alone_names_it_too() -> None:
    assert tools(tools=[WEATHER, TIME], tool_choice="weather") == tools(tools=[WEATHER, TIME], tool_choice=NAMED)


def test_required_is_a_guide_for_a_list_of_calls() -> None:
    found = tools(tools=[WEATHER, TIME], tool_choice="required")
    assert found.structured_output is not None
    schema = json.loads(found.structured_output.value)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema
    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {"name": {"const": "weather"}, "arguments": CITY}
    assert list(first["properties"]) == first["required"] == ["name", "arguments"]
    assert second["properties"]["arguments"] == EMPTY
    single = tools(tools=[TIME], tool_choice="required", parallel_tool_calls=False)
    assert single.structured_output is not None
    assert json.loads(single.structured_output.value)["maxItems"] == 1
    assert single.single


def allowed(mode: Any, *listed: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(listed)}}


def test_allowed_tools_alone_are_shown_and_called() -> None:
    for mode in ("auto", "required"):
        found = tools(tools=[WEATHER, TIME], tool_choice=allowed(mode, NAMED))
        assert found == tools(tools=[WEATHER], tool_choice=mode)._replace(allowed=frozenset({"weather"}))
        assert [tool["function"]["name"] for tool in found.shown] == ["weather"]
    both = allowed("auto", NAMED, TIME)
    assert tools(tools=[WEATHER, TIME], tool_choice=both).allowed == frozenset({"weather", "time"})


@in_one_test(
    "choice",
    [
        allowed("none", NAMED),
        allowed(["auto"], NAMED),
        allowed("auto"),
        allowed("auto", {"type": "function", "function": {"name": "other"}}),
        allowed("auto", NAMED, {"type": "function", "function": {"name": ["weather"]}}),
        allowed("auto", NAMED, {"type": "custom", "custom": {"name": "weather"}}),
        allowed("auto", NAMED, "weather"),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": NAMED}},
    ],
)
def test_wrong_allowed_tools_are_refused(choice: dict[str, Any]) -> None:
    found = refusal(tools=[WEATHER, TIME], tool_choice=choice)
    assert found.startswith("tool_choice.allowed_tools=")
    assert "must be an object with a 'mode' of auto or required, and with 'tools'" in found
    with pytest.raises(InvalidParameter):
        tools(tool_choice=allowed("auto", NAMED))


def test_definitions_move_to_where_references_look() -> None:
    def using(type: str, name: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": type}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    found = tools(tools=[using("string", "f"), using("string", "g")], tool_choice="required")
    assert found.structured_output is not None
    schema = json.loads(found.structured_output.value)
    assert schema["$defs"] == {"A": {"type": "string"}}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["arguments"]
    both = [using("string", "f"), using("number", "g")]
    assert "define 'A' differently" in refusal(tools=both, tool_choice="required")
    assert both[0]["function"]["parameters"]["$defs"], "the client's own value is left as it is"


def test_unknown_names_are_reported_in_reading() -> None:
    odd = {**TIME, "x": 1, "function": {**TIME["function"], "strict": True, "y": 1}}  # type: ignore[dict-item]
    assert tools(tools=[odd]).unknown == ["tools[].x", "tools[].function.y"]


@in_one_test(
    ("body", "wanted"),
    [
        ({"tools": {}}, "tools={}: must be a list"),
        ({"tools": [TIME] * 1025}, "at most 1024"),
        ({"tools": [TIME, TIME]}, "tools: two tools have the same name"),
        ({"tools": ["f"]}, "tools[0]: must be an object with 'type': 'function'"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]: must be an object with 'type': 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name: must be 1 to 256"),
        ({"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters: must be a JSON"),
        ({"tools": [{"function": {"name": "a", "description": 1}}]}, "tools[0].function.description: must be a"),
        ({"tools": [TIME], "tool_choice": "any"}, 'tool_choice="any": must be none, auto, required, the name of'),
        ({"tools": [TIME], "tool_choice": NAMED}, "that names tools of the request"),
        ({"tools": [TIME], "tool_choice": 1}, "tool_choice=1: must be"),
        ({"tool_choice": "required"}, "requires tools"),
        ({"tools": [TIME], "parallel_tool_calls": 1}, "parallel_tool_calls=1: must be true or false"),
    ],
)
def test_what_is_wrong_is_named_in_reading(body: dict[str, Any], wanted: str) -> None:
    assert wanted in refusal(**body)


@in_one_test(
    ("name", "template", "format"),
    [
        ("auto", "", SMOLLM2),
        ("auto", "{{ messages }}", SMOLLM2),
        ("auto", "{% if tools %}<tool_call>{% endif %}", HERMES),
        ("auto", "{% if tools %}<|python_tag|>", LLAMA3_JSON),
        ("auto", "{% if tools %}{TOOL}", None),
        ("hermes", "{% if tools %}[TOOL_CALLS]", HERMES),
    ],
)
def test_the_format_is_the_options_or_the_templates(name: str, template: str, format: Format | None) -> None:
    context = with_options(replace(CAPABLE, chat_template=template), tool_call_parser=name)
    assert choose_format(context) is format
    if format is None:
        with pytest.raises(InvalidParameter, match=r"set option\.tool_call_parser"):
            read_tools({"tools": [TIME]}, context)
    assert read_tools({"tools": [TIME], "tool_choice": "required"}, context).structured_output is not None


def test_marks_that_are_special_tokens_have_to_be_shown() -> None:
    assert HERMES.special(Vocabulary([b"<tool_call>", b"<end>"], special={0, 1})) == {"<tool_call>"}
    assert LLAMA3_JSON.special(Vocabulary([b"<tool_call>", b"<end>"], special={0, 1})) == frozenset()


def test_a_template_without_a_place_for_tools_gets_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "time", "arguments": {"zone": "é"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
    ]
    written = '<tool_call>[{"name": "time", "arguments": {"zone": "é"}}]</tool_call>'
    plain = (
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": written},
        {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"},
        {"role": "assistant", "content": f"Well.\n{written}"},
    )
    assert lay_out(messages, [], "") == (plain, ())
    (told, *rest), _ = lay_out(messages, [WEATHER], "")
    assert len(rest) == 4
    assert told["role"] == "system"
    assert f"<tools>[{json.dumps(WEATHER['function'])}]</tools>" in told["content"]
    (first, *rest), _ = lay_out([{"role": "system", "content": "Be brief."}], [WEATHER], "")
    assert first == {"role": "system", "content": f"Be brief.\n\n{told['content']}"}
    assert not rest


def test_kimis_templates_get_ids_of_name_and_index_in_the_history() -> None:
    def call(id: str, name: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}

    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call("a", "time"), call("b", "weather")]},
        {"role": "tool", "tool_call_id": "b", "content": "sun"},
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        {"role": "assistant", "content": "", "tool_calls": [call("a", "time")]},
        {"role": "tool", "tool_call_id": "a", "content": "12:01"},
        {"role": "tool", "tool_call_id": "other", "content": "?"},
    ]
    found, _ = lay_out(messages, [], "{{ tools }}<|tool_calls_section_begin|>{{ tool_call['id'] }}")
    assert [[one["id"] for one in message.get("tool_calls", ())] or message["tool_call_id"] for message in found] == [
        ["functions.time:0", "functions.weather:1"], "functions.time:0", "functions.weather:1", ["functions.time:2"],
        "functions.time:2", "other",
    ]  # fmt: skip
    assert messages[1]["tool_call_id"] == "b", "the client's messages stay as they are"


@in_one_test("template", ["{{ tools }}", ""])
@in_one_test(
    ("calls", "results", "order"),
    [
        ("abc", "cab", "120"),
        ("abc", "b", "0"),
        ("ab", "xba", "210"),  # that of another call
        ("aa", "aa", "01"),
        ("", "ba", "01"),
    ],
)
def test_results_are_in_the_order_of_their_calls(template: str, calls: str, results: str, order: str) -> None:
    called = [{"id": id, "type": "function", "function": {"name": "f", "arguments": {}}} for id in calls]
    turn: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": called},
        *({"role": "tool", "tool_call_id": id, "content": str(place)} for place, id in enumerate(results)),
        {"role": "user", "content": "x"},
    ]
    found, _ = lay_out(turn * 2, [], template)
    for half in (found[: len(turn)], found[len(turn) :]):
        assert [re.sub(r"\s*</?tool_response>\s*", "", message["content"]) for message in half[1:]] == [*order, "x"]


def test_ids_have_the_length_that_mistrals_templates_ask_for() -> None:
    call = {"id": "call_0123456789abcdef01234567", "type": "function", "function": {"name": "time", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "a-1"}]},
        {"role": "tool", "content": "noon", "tool_call_id": call["id"]},
    ]
    assert lay_out(messages, [], "{{ tools }}") == (tuple(messages), ())
    (first, second), _ = lay_out(messages, [], "{{ tools }}{% if call.id|length != 9 %}")
    assert [call["id"] for call in first["tool_calls"]] == ["f01234567", "0000000a1"]
    assert second["tool_call_id"] == "f01234567"


def test_tools_have_a_description_where_templates_fail_without_one() -> None:
    tools = [
        {"type": "function", "function": {"name": name, **more}}
        for name, more in (("f", {}), ("g", {"description": "G"}))
    ]
    assert lay_out([], tools, "{{ tools }}")[1] == tuple(tools)
    for printed in ("tool.description", "tool.function.description", "(tool.description | tojson)"):
        _, (first, second) = lay_out([], tools, f"{{{{ tools }}}}{{{{ '// ' + {printed} }}}}")
        assert first["function"] == {"name": "f", "description": ""}
        assert second["function"]["description"] == "G"


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_definitions_that_are_none_are_refused(place: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {**CITY, place: [1]}}}
    assert f"a tool's {place} must be an object" in refusal(tools=[tool], tool_choice="required")


def test_a_template_with_one_call_a_message_gets_several_messages() -> None:
    calls = [{"id": id, "function": {"name": name, "arguments": {}}} for id, name in (("a", "f"), ("b", "g"))]
    results = [{"role": "tool", "content": id, "tool_call_id": id} for id in ("b", "x", "a")]
    asked = {"role": "user", "content": "?"}
    answer: dict[str, Any] = {"role": "assistant", "content": "So.", "tool_calls": calls}
    messages: list[dict[str, Any]] = [asked, answer, *results, asked]
    found, _ = lay_out(messages, [], "{{ tools }}{{ message.tool_calls[0].function.name }}")
    assert [message.get("tool_calls", message["content"]) for message in found] == [
        *("?", [calls[0]], "a", [calls[1]], "b", "x", "?")
    ]
    assert [message["content"] for message in found if "tool_calls" in message] == ["So.", ""]
    for others in ("{{ tools }}{% for call in message.tool_calls %}{{ tool_calls[0] }}", "{{ tools }}tool_calls"):
        assert lay_out(messages, [], others)[0] == (asked, answer, *(results[place] for place in (2, 0, 1)), asked)


def test_a_template_without_text_beside_reasoning_gets_both_as_reasoning() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {}}}
    thoughts = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "Hm.")
    answer: dict[str, Any] = {"role": "assistant", "content": "So.", "tool_calls": [call], **thoughts}
    others: list[dict[str, Any]] = [
        {**answer, "content": ""},
        {"role": "assistant", "content": "So.", "tool_calls": [call]},
        {"role": "assistant", "content": "So.", **thoughts},
    ]
    template = "{{ tools }}{{ message.tool_calls[0] }}"
    refusal = "{%- if message.content and message.thinking %}\n {{- raise_exception('Both') }}{% endif %}"
    found, _ = lay_out([answer, *others], [], template + refusal)
    assert found == ({**answer, "content": "", **dict.fromkeys(thoughts, "Hm.\nSo.")}, *others)
    assert lay_out([answer], [], template)[0] == (answer,)


@pytest.mark.parametrize(
    ("mark", "written"),
    [
        ("<|tool_list_start|>", "So.<|tool_call_start|>[f(a='b\\'\"', c=[True, None]), g()]<|tool_call_end|>"),
        (
            "<|tool_call|>",
            'So.<|tool_call|>[{"name": "f", "arguments": {"a": "b\'\\"", "c": [true, null]}}, '
            '{"name": "g", "arguments": {}}]',
        ),
        ("<function_calls>", "So.<function_calls>f(a='b\\'\"', c=[True, None])\ng()</function_calls>"),
        ("", "So."),
    ],
)
def test_a_template_without_calls_gets_them_as_text(mark: str, written: str) -> None:
    pairs: list[tuple[str, dict[str, Any]]] = [("f", {"a": "b'\"", "c": [True, None]}), ("g", {})]
    calls = [{"id": "a", "function": {"name": name, "arguments": arguments}} for name, arguments in pairs]
    message = {"role": "assistant", "content": "So.", "tool_calls": calls}
    ((found,), _) = lay_out([message], [], "{{ tools }}" + mark)
    assert found["content"] == written
    assert ("tool_calls" in found) == (written == "So.")


# -- the work of finding the types of a tool's parameters: bounded, whatever its client's schema says ------------------


def read(format: str, tools: Any, text: str) -> None:
    parser = FORMATS[format].make(tools)
    parser.feed(text)
    parser.flush()


def itself(count: int) -> dict[str, Any]:
    """A parameter `a` that may be what `a` may be, so many times."""
    return {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * count}}}


def diamonds(width: int, depth: int) -> dict[str, Any]:
    """A parameter that names the next schema so many times, which names the next one as often, and so on."""
    levels = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"} for _ in range(width)]} for level in range(depth)
    }
    return {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": {**levels, f"d{depth}": {"type": "integer"}},
    }


@functools.cache
def wide(num_properties: int, num_members: int) -> dict[str, Any]:
    """Parameters that each may be what a long list has."""
    properties = {f"a{number or ''}": {"$ref": "#/$defs/all"} for number in range(num_properties)}
    members = [{"enum": [number]} for number in range(num_members)]
    return {"type": "object", "properties": properties, "$defs": {"all": {"anyOf": members}}}


SCHEMAS = {
    "itself": functools.partial(itself, 32),
    "diamonds": functools.partial(diamonds, 8, 8),
    "wide": functools.partial(wide, 2, 100_000),
}


@in_one_test("format", FORMATS)
@in_one_test("schema", SCHEMAS)
def test_a_schema_that_names_itself_costs_nothing(format: str, schema: str) -> None:
    tools = [{"type": "function", "function": {"name": "time", "parameters": SCHEMAS[schema]()}}]
    begin, argument, _ = BEGUN[format]
    assert steps(lambda: read(format, tools, begin + argument * 3)) < 200_000, "without a bound it is millions"


def test_all_of_a_schema_is_found_as_far_as_its_work_goes() -> None:
    deep = ToolSchema(diamonds(8, 8))
    assert deep.types(deep.property(deep.root, "a")) == {"integer"}
    huge = ToolSchema(wide(1000, 100_000))
    found: list[frozenset[str]] = []
    took = steps(lambda: found.extend(huge.types(huge.property(huge.root, f"a{n or ''}")) for n in range(1000)))
    assert found[0] >= {"integer", "any"}
    assert found[-1] == {"any"}, "the work that this tool may cost has been done"
    assert took < 500_000, "without a bound it is many millions"
