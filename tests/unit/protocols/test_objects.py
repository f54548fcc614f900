"""Declared values: what is read is what the API document shows, and each other name or value is told by its path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from handler.core.errors import InvalidParameter, ServingError
from handler.protocols.anthropic import types as anthropic
from handler.protocols.decisions import openai, systemone
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.objects import (
    AS_IS,
    Closed,
    Declaration,
    ListOf,
    Obj,
    Optional,
    Scope,
    Variant,
    WithValue,
    among,
    leaf,
    members,
    reader_of,
)
from handler.protocols.kernel.path import InvalidField, Path
from handler.protocols.kernel.readers import NamedValue, boolean, string
from handler.protocols.kernel.schema import nullable, schema_of_reader
from handler.protocols.responses import types

CONTEXT = replace(ServerContext("echo"), no_media={"image": ""})
VALUES: tuple[Any, ...] = (None, True, 5, 0.5, "", "a", [], ["a"], {}, {"a": 1}, [{"type": "other"}])
PART = {"type": "input_text", "text": "a"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
INPUT = [
    {"role": "user", "content": [PART, IMAGE, {"type": "input_json", "data": {"a": 1}}]},
    {"type": "message", "role": "assistant", "phase": "commentary", "content": [{"type": "refusal", "refusal": "b"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "n", "status": "done"},
    {"type": "custom_tool_call_output", "call_id": "1", "output": [PART]},
]
QUESTIONS = [
    {"type": "predicate", "name": "q", "instructions": "a"},
    {"type": "choice", "instructions": [PART], "choices": [{"value": "a"}, {"value": True, "description": "b"}]},
    {"type": "score", "instructions": "a", "levels": [{"label": "low"}, {"label": "high"}]},
]
BY_ID = {
    "a": {"type": "noul", "instructions": "b", "criteria": {"true": "c", "false": None}},
    "b": {"type": "choice", "criteria": {"x": None, "y": {"z": 1}}},
    "c": {"type": "score", "instructions": None, "criteria": ["d", {"e": 1}]},
}
ITEMS = [
    {"type": None, "id": "a", "role": "user", "content": "a", "phase": "b", "status": "completed"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "n", "caller": None},
    {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "a"},
    {"type": "function_call_output", "call_id": "1", "output": "b", "name": "f"},
    {"type": "custom_tool_call_output", "call_id": "2", "output": "b"},
    {"type": "reasoning", "summary": [], "content": "c", "encrypted_content": "d"},
    {"type": "agent_message", "author": "a", "recipient": "b", "content": "c"},
    {"type": "compaction", "encrypted_content": "a", "created_by": "b"},
    {"type": "compaction_trigger", "id": "a"},
]
CACHED = {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "a", **CACHED}
SEEN = {"type": "image", "source": {"type": "base64", "data": "AAAA"}, "transformations": {"oversized_image": None}}
TOOL = {"name": "f", "input_schema": {"a": 1}, "strict": True, "defer_loading": False, "allowed_callers": ["direct"]}
OF_USER = [
    TEXT,
    SEEN,
    {"type": "tool_result", "tool_use_id": "1", "content": [TEXT, SEEN, {"type": "tool_reference", "tool_name": "f"}]},
    {"type": "compaction", "content": "b", "signature": "s", "tool_changes": [], **CACHED},
]
OF_ASSISTANT = [
    TEXT,
    {"type": "thinking", "thinking": "a", "signature": "s"},
    {"type": "redacted_thinking", "data": "b"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}, **CACHED},
]
OF_SYSTEM = [
    {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}, **CACHED},
    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
]
MESSAGES = [
    {"role": "user"},
    {"role": "system", "clear_at": "never", "output_config": {"effort": "low"}},
]
THINKING = {
    "type": "enabled",
    "budget_tokens": 5,
    "display": "updates",
    "block_binding": {"prefix_mismatch_behavior": "error"},
}
CONFIG = {
    "effort": "low",
    "format": {"type": "json_schema", "schema": {"a": 1}},
    "task_budget": {"type": "tokens", "total": 5, "remaining": 4},
}
USES, TOKENS = {"type": "tool_uses", "value": 2}, {"type": "input_tokens", "value": 2}
CLEARING = {
    "type": "clear_tool_uses_20250919",
    "trigger": TOKENS,
    "keep": USES,
    "clear_at_least": TOKENS,
    "exclude_tools": ["a"],
    "clear_tool_inputs": ["b"],
}
FUNCTION = {"name": "f", "parameters": {"a": 1}, "strict": True}
COMPACT = {"type": "compact_20260112", "trigger": TOKENS, "instructions": "a", "pause_after_compaction": True}
DECLARED: dict[str, tuple[Declaration, Any]] = {
    "input": (openai.INPUT, INPUT),
    "questions": (openai.QUESTIONS, QUESTIONS),
    "questions by id": (systemone.QUESTIONS, BY_ID),
    "images": (systemone.IMAGES, [IMAGE["image_url"], {"url": IMAGE["image_url"], "detail": "low"}]),
    "items": (ListOf(types.ITEM, "items", 9), ITEMS),
    "messages": (ListOf(anthropic.MESSAGE, "messages"), MESSAGES),
    "user": (anthropic.CONTENTS["user"], OF_USER),
    "assistant": (anthropic.CONTENTS["assistant"], OF_ASSISTANT),
    "system": (anthropic.CONTENTS["system"], OF_SYSTEM),
    "tools": (ListOf(anthropic.TOOL, "tools"), [{"type": "custom", "description": "a", **TOOL}]),
    "functions": (ListOf(types.TOOLS_BY_TYPE["function"], "tools"), [{"description": "a", **FUNCTION}]),
    "custom tools": (ListOf(types.TOOLS_BY_TYPE[types.CUSTOM], "tools"), [{"name": "f", "description": "a"}]),
    "tool_choice": (WithValue(anthropic.TOOL_CHOICE), {"type": "any", "disable_parallel_tool_use": True}),
    "thinking": (WithValue(anthropic.THINKING), THINKING),
    "output_config": (WithValue(anthropic.OUTPUT_CONFIG), CONFIG),
    "compaction": (WithValue(anthropic.SUMMARIZE), {"type": "summarize", "instructions": "a"}),
    "clearing": (WithValue(anthropic.EDITS[anthropic.CLEAR_TOOL_USES]), CLEARING),
    "compact": (WithValue(anthropic.EDITS[anthropic.COMPACT]), COMPACT),
}
FREE = {"data", "criteria", "input", "input_schema", "parameters", "schema", "caller", "cache_control"}
"""Names of values that are not declared any further."""


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all members of a value, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from paths(item, (*at, key))


def spoilt(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The value with each member replaced by each of `VALUES` or removed, and with a further member in each object."""
    for at in paths(value):
        for item in (*VALUES, KeyError):
            changed = json.loads(json.dumps(value))
            parent = changed
            for key in at[:-1]:
                parent = parent[key]
            if item is KeyError:
                del parent[at[-1]]
            elif isinstance(parent[at[-1]], dict) and item == {"a": 1}:
                parent[at[-1]]["an_unknown_name"] = 1
            else:
                parent[at[-1]] = item
            yield at, changed


@pytest.mark.parametrize(("declared", "value"), DECLARED.values(), ids=DECLARED)
def test_what_is_read_fits_the_document_and_what_is_not_is_told(declared: Declaration, value: Any) -> None:
    schema = Draft202012Validator(declared.shape)
    root = Path(("root",))
    assert schema.is_valid(value)
    declared.read(value, root, Scope(CONTEXT, {}))
    told = []
    for at, changed in spoilt(value):
        unknown: dict[str, None] = {}
        try:
            result = declared.read(changed, root, Scope(CONTEXT, unknown))
        except InvalidField as error:
            told.append((at, error.keys[1:]))
        except ServingError:  # of a reader of media or of names
            told.append((at, at))
        else:
            assert schema.is_valid(changed), (at, changed)
            is_declared = "an_unknown_name" in str(changed) and not FREE & {*at}
            of_tool = "'unknown': {'tools[].an_unknown_name'" in str(result)  # the chat reports it
            assert is_declared == (of_tool or any("an_unknown_name" in name for name in unknown)), at
    assert len(told) > 15
    for at, refused in told:  # of the object that has the member, of one around it, or of the member
        common = min(len(at) - 1, len(refused))
        assert refused[:common] == at[:common]


def test_a_kind_is_chosen_by_its_tag() -> None:
    kinds = {"a": Obj({"x": leaf(string)}), "b": Obj({"y": among("c", "d", None)}, extra="is no field; use y")}
    declared = ListOf(Variant("type", kinds, default="a", refused={"e": "not here"}), "things", maximum=3, minimum=1)
    scope = Scope(CONTEXT, {})

    def read(*items: Any) -> Any:
        return declared.read([*items], Path(("items",)), scope)

    assert read({"x": "1", "z": 1}, {"type": "b"}) == [{"type": "a", "x": "1"}, {"type": "b", "y": None}]
    assert [*scope.unknown] == ["items[].z"]
    for items, message in (
        ((), "items: must be a non-empty list of things"),
        (({"x": "1"},) * 4, "items: has 4 things; the maximum is 3"),
        (({"type": "e"},), 'items[0].type: "e" is not supported: not here'),
        (({"type": ["a"]},), 'items[0].type: ["a"] is not supported: must be a or b'),
        (({"x": 5},), "items[0].x: must be a string"),
        (({"type": "b", "y": "e"},), "items[0].y: must be c or d"),
        (({"type": "b", "z": 1},), "items[0].z: is no field; use y"),
    ):
        with pytest.raises(InvalidField) as raised:
            read(*items)
        assert raised.value.message == message


def test_an_object_that_is_closed_reports_the_names_in_its_members() -> None:
    scope = Scope(CONTEXT, {})
    declared = Closed("must be an object", {"inner": Obj({"x": Optional(AS_IS, "none")})}, ("a",))
    value = {"type": "a", "inner": {"y": 1}, "other": None}
    assert declared.read(value, Path(("at",)), scope) == {"type": "a", "inner": {"x": "none"}}
    assert [*scope.unknown] == ["at.inner.y"]


SETTINGS = [
    (types.TABLE.parameters["background_options"].read, {"completion_window": "soonest", "continuation_id": "a"}),
    (types.read_reasoning, {"effort": "low", "summary": "auto", "context": "auto", "mode": "standard"}),
    (openai.Decisions.table.parameters["prompt_cache_options"].read, {"mode": "explicit", "ttl": "30m"}),
]


@pytest.mark.parametrize(("reader", "value"), SETTINGS, ids=["background", "reasoning", "prompt cache"])
def test_the_members_of_a_parameter_are_read_as_in_the_document_or_named(reader: Any, value: Any) -> None:
    schema = Draft202012Validator(nullable(schema_of_reader(reader)))
    schema.validate(value)
    for at, changed in spoilt(value):
        if changed.get(at[0]) is None:  # as a missing one
            assert reader(changed).get(at[0]) is None
        elif not schema.is_valid(changed):
            with pytest.raises(ValueError, match=f"'{at[0]}' must be"):
                reader(changed)
    with pytest.raises(ValueError, match="has an unknown name 'other'; the names are"):
        reader({**value, "other": 1})
    assert reader({**value, "other": None}) == reader(value)


def test_a_dialect_writes_the_words_of_a_path_and_a_reason() -> None:
    at = Path(("input",), lambda path, reason: f"{path} {reason}!")
    with pytest.raises(InvalidField) as raised:
        ListOf(Obj({"x": leaf(string)}), "things", maximum=3).read([{"x": 5}], at, Scope(CONTEXT, {}))
    assert raised.value.message == "input[0].x must be a string!"
    assert raised.value.keys == ("input", 0, "x")
    reader = members("must be a thing", x=leaf(string))
    for value, message in (({"x": 5}, "'x' must be a string"), (5, "must be a thing")):
        with pytest.raises(InvalidParameter) as refused:
            NamedValue("field", value).read(reader)
        assert refused.value.message == f"field={json.dumps(value)}: {message}"


def test_a_parameter_shows_its_value_and_names_its_member() -> None:
    inner = Closed("must have an 'inner' with a 'type'", {"n": WithValue(leaf(boolean))}, ("x", "y"))
    declared = Closed("must be an object", {"flag": Optional(leaf(boolean), False), "inner": Optional(inner)})
    read = reader_of(declared)
    assert read({"flag": None, "other": None}) == {"flag": False, "inner": None}
    assert read({"inner": {"type": "y", "n": True}}) == {"flag": False, "inner": {"type": "y", "n": True}}
    for value, message in (
        (5, "must be an object"),
        ({"flag": 5}, "'flag' must be true or false"),
        ({"inner": {"type": ["x"]}}, "must have an 'inner' with a 'type'"),
        ({"inner": {"type": "x"}}, "inner.n=null: must be true or false"),
        ({"other": 1}, "has an unknown name 'other'; the names are flag, inner"),
        ({"inner": {"type": "x", "n": True, "m": 1}}, "has an unknown name 'm'; the names are type, n"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            read(value)
        with pytest.raises(InvalidField) as raised_again:
            WithValue(declared).read(value, Path(("a", 0)), Scope(CONTEXT, {}))
        assert raised_again.value.message == f"a[0]={json.dumps(value)}: {message}"
