"""The work of finding the types of a tool's parameters: bounded, whatever its client's schema says."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.grammar import ToolSchema
from tests.one_test import in_one_test
from tests.unit.protocols.assistant.tool_texts import BEGUN


def cpu_time(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


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
    properties = {f"a{number}": {"$ref": "#/$defs/all"} for number in range(num_properties)}
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
    took = min(cpu_time(lambda: read(format, tools, begin + argument * 3)) for _ in range(3))
    assert took < 0.1, "without a bound it is seconds"


def test_all_of_a_schema_is_found_as_far_as_its_work_goes() -> None:
    deep = ToolSchema(diamonds(8, 8))
    assert deep.types(deep.property(deep.root, "a")) == {"integer"}
    huge = ToolSchema(wide(1000, 100_000))
    found: list[frozenset[str]] = []
    took = cpu_time(lambda: found.extend(huge.types(huge.property(huge.root, f"a{n}")) for n in range(1000)))
    assert found[0] >= {"integer", "any"}
    assert found[-1] == {"any"}, "the work that this tool may cost has been done"
    assert took < 1, "without a bound it is a minute"
