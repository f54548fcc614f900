"""The parts of structural tags (xgrammar's documentation)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from handler.core.values import StructuredOutput

Tag = Mapping[str, Any]


def with_schemas(tag: Tag, replace: Callable[[Tag], Tag]) -> Tag:
    """Return a tag's format with each part that is a JSON schema replaced."""
    if tag["type"] == "json_schema":
        return replace(tag)
    parts: dict[str, Any] = {
        name: [with_schemas(part, replace) for part in tag[name]] for name in ("elements", "tags") if name in tag
    }
    if "content" in tag:
        parts["content"] = with_schemas(tag["content"], replace)
    return {**tag, **parts}


def contents(structured_output: StructuredOutput) -> Iterator[StructuredOutput]:
    """Give each schema, expression and grammar of a structural tag as structured output of its own."""
    waiting = [json.loads(structured_output.value)["format"]]
    while waiting:
        tag = waiting.pop()
        match tag["type"]:
            case "json_schema" | "qwen_xml_parameter":
                yield StructuredOutput("json_schema", json.dumps(tag["json_schema"], ensure_ascii=False))
            case "regex":
                yield StructuredOutput("regex", tag["pattern"])
            case "grammar":
                yield StructuredOutput("grammar", tag["grammar"])
        waiting += [part for name in ("elements", "tags") for part in tag.get(name, ())]
        waiting += [tag["content"]] if "content" in tag else []


def without_text(structured_output: StructuredOutput) -> StructuredOutput:
    """Return the rule without the text that may come before what it rules."""
    if not structured_output.allows_text:
        return structured_output
    tag = json.loads(structured_output.value)
    tag["format"]["at_least_one"] = True
    return StructuredOutput(structured_output.kind, json.dumps(tag, ensure_ascii=False))
