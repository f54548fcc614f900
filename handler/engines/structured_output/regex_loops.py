"""Finds the repeated groups of a regular expression: one behind a long prefix may be costly where no trial gets to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from handler.core.values import StructuredOutput

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]|[^()\[\\]+|.", re.DOTALL)
_QUANTIFIER = re.compile(r"[*+]|\{[^}]*\}")


def loops(expression: str) -> Iterator[str]:
    """Give each repeated group as an expression of its own, those within groups first."""
    open_at: list[int] = []
    for piece in _PIECE.finditer(expression):
        if piece[0] == "(":
            open_at.append(piece.start())
        elif piece[0] == ")" and open_at:
            start = open_at.pop()
            if quantifier := _QUANTIFIER.match(expression, piece.end()):
                yield expression[start : quantifier.end()]


def loops_of(structured_output: StructuredOutput) -> Sequence[StructuredOutput]:
    """Give the repeated groups of an expression, or of a schema's patterns, also in structural tags."""
    if structured_output.kind == "regex":
        expressions = [structured_output.value]
    elif structured_output.kind in ("json_schema", "structural_tag"):
        expressions = list(_patterns(json.loads(structured_output.value)))
    else:
        return ()
    found = dict.fromkeys(loop for expression in expressions for loop in loops(expression))
    return [StructuredOutput("regex", loop) for loop in found]


def _patterns(schema: Any) -> Iterator[str]:
    """Find everything that may be a pattern; what is none is a value that looks like one."""
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case dict() as found:
                if isinstance(pattern := found.get("pattern"), str):
                    yield pattern
                if isinstance(patterns := found.get("patternProperties"), dict):
                    yield from patterns
                waiting += found.values()
            case list() as found:
                waiting += found
