"""Declared values: what is read is what the API document shows, and each other name or value is told by its path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from handler.core.errors import InvalidPayload
from handler.protocols.decisions import openai, systemone
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.objects import Declaration, ListOf, Obj, Scope, Variant, among, leaf
from handler.protocols.kernel.path import InvalidField, Path
from handler.protocols.kernel.readers import string

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
DECLARED = [(openai.INPUT, INPUT), (openai.QUESTIONS, QUESTIONS), (systemone.QUESTIONS, BY_ID)]


def members(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all members of a value, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from members(item, (*at, key))


def spoilt(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The value with each member replaced by each of `VALUES` or removed, and with a further member in each object."""
    for at in members(value):
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


@pytest.mark.parametrize(("declared", "value"), DECLARED, ids=["input", "questions", "questions by id"])
def test_what_is_read_fits_the_document_and_what_is_not_is_told(declared: Declaration, value: Any) -> None:
    schema = Draft202012Validator(declared.shape)
    root = Path(("root",))
    assert schema.is_valid(value)
    declared.read(value, root, Scope(CONTEXT, {}))
    told = []
    for at, changed in spoilt(value):
        unknown: dict[str, None] = {}
        try:
            declared.read(changed, root, Scope(CONTEXT, unknown))
        except InvalidField as error:
            told.append((at, error.keys[1:]))
        except InvalidPayload:  # of a reader of media
            told.append((at, at))
        else:
            assert schema.is_valid(changed), (at, changed)
            is_declared = "an_unknown_name" in str(changed) and not {"data", "criteria"} & {*at}  # the client's names
            assert is_declared == any("an_unknown_name" in name for name in unknown), at
    assert len(told) > 100
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
