"""Guided decoding, as far as a double needs it: the answer is one of a few texts that the guide allows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy

try:
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # before Python 3.11
    import sre_parse as parser


def texts(guide: Any) -> list[str]:
    """Texts that satisfy it.

    Raises:
        ValueError: the guide makes no sense.
    """
    if guide.regex is not None:
        return _of_regex(guide.regex)
    if guide.json_object:
        return ["{}"]
    if guide.json is not None:
        schema = json.loads(guide.json) if isinstance(guide.json, str) else guide.json
        return [json.dumps(_of_schema(schema))]
    if guide.grammar is not None:
        found = re.fullmatch(r'\s*root\s*::=\s*((?:"[^"]*"\s*\|?\s*)+)', guide.grammar)
        if found is None:
            raise ValueError("the grammar is not valid")
        return re.findall(r'"([^"]*)"', found[1])
    raise ValueError("structural tags are not played")


def allow(logits: Any, ids: Sequence[int], allowed: Sequence[Sequence[int]], end: int) -> Any:
    """Only ids that lead to one of the allowed sequences; after one, the end."""
    done = list(ids)
    following = {sequence[len(done)] for sequence in allowed if list(sequence[: len(done)]) == done != list(sequence)}
    if done and done[-1] == end:
        raise RuntimeError("the guide's matcher has ended already")
    keep = sorted(following) if following else [end]
    found = numpy.full_like(logits, -numpy.inf)
    found[keep] = logits[keep]
    return found


def _of_schema(schema: Any) -> Any:
    if not isinstance(schema, dict):
        raise ValueError("the JSON schema is not an object")
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {name: _of_schema(one) for name, one in schema.get("properties", {}).items()}
        case "array":
            return [_of_schema(schema.get("items", {"type": "null"}))] * int(schema.get("minItems", 0))
        case "string":
            return "text"
        case "integer":
            return 7
        case "number":
            return 1.5
        case "boolean":
            return True
        case "null" | None:
            return None
    raise ValueError(f"unknown type {schema['type']!r} in the JSON schema")


def _of_regex(pattern: str) -> list[str]:
    try:
        tree = parser.parse(pattern)
    except re.error as error:
        raise ValueError(f"the regular expression is not valid: {error}") from None
    found = [text for text in _expanded(list(tree)) if re.fullmatch(pattern, text)]
    if not found:
        raise ValueError("the regular expression is beyond this double")
    return found


def _expanded(nodes: list[Any]) -> list[str]:
    found = [""]
    for operation, value in nodes:
        found = [before + after for before in found for after in _node(str(operation), value)]
    return found


def _node(operation: str, value: Any) -> list[str]:
    match operation:
        case "LITERAL":
            return [chr(value)]
        case "IN":
            return _node(str(value[0][0]), value[0][1])
        case "RANGE":
            return [chr(value[0])]
        case "CATEGORY":
            return {"CATEGORY_DIGIT": ["7"], "CATEGORY_SPACE": [" "]}.get(str(value), ["a"])
        case "ANY" | "NOT_LITERAL":
            return ["a"]
        case "SUBPATTERN":
            return _expanded(list(value[-1]))
        case "BRANCH":
            return [text for branch in value[1] for text in _expanded(list(branch))]
        case "MAX_REPEAT" | "MIN_REPEAT":
            return [text * max(value[0], 1) for text in _expanded(list(value[2]))]
    return [""]
