"""Abridges regular expressions: one character may stand for each part that can be long, and a trial gets past it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from handler.core.values import StructuredOutput

MARKER = "~"
"""Stands for a part that can be long. Every vocabulary has it as a token."""

LONG = 32
"""Characters, or repetitions, from which a part is long."""

_PIECE = re.compile(
    r"(?P<open>\((?:\?(?:P?<\w+>|[:=!]|<[=!]))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<item>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.)",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(?P<counts>[\d, ]*)\})[?+]?")
_ANY = rf"[^\n\r{MARKER}]"
_ANCHORS = ("^", "$")


_RANGE = re.compile(r"([ -}])-([~-\U0010ffff])")  # with the marker in it


def without_marker(characters: str) -> str:
    """Take the marker out of a set, as `[^a]` or `[ -~]`: else what may be long would go on where it should end."""
    if characters.startswith("[^"):
        return f"{characters[:-1]}{MARKER}]"
    return _RANGE.sub(lambda range: f"{range[1]}-}}" + f"\x7f-{range[2]}" * (range[2] > "\x7f"), characters)


def abridged(expression: str) -> str:
    """Write an expression with `MARKER` as an alternative to each repetition that can be long, and to long texts."""
    levels: list[list[str]] = [[]]  # what each open bracket holds so far
    run: list[str] = []  # items without a repetition, since the last thing of another sort

    def end_run() -> None:
        levels[-1].append(_optional("".join(run)) if len(run) >= LONG else "".join(run))
        run.clear()

    at = 0
    while at < len(expression):
        piece = _PIECE.match(expression, at)
        assert piece is not None, "it matches any character"
        at = piece.end()
        if piece["open"]:
            end_run()
            levels.append([piece[0]])
            continue
        if piece["bar"] or piece[0] in _ANCHORS or (piece["close"] and len(levels) == 1):
            end_run()
            levels[-1].append(piece[0])
            continue
        quantifier = _QUANTIFIER.match(expression, at)
        item = _ANY if piece[0] == "." else without_marker(piece[0]) if piece[0][0] == "[" else piece[0]
        if piece["close"]:
            end_run()
            item = "".join(levels.pop()) + item
        elif quantifier is None:
            run.append(item)
            continue
        end_run()
        if quantifier is not None:
            at = quantifier.end()
            item += quantifier[0]
        levels[-1].append(_optional(item) if quantifier is not None and _is_long(quantifier) else item)
    end_run()
    return "".join(part for level in levels for part in level)


def abridged_parts(structured_output: StructuredOutput) -> Sequence[StructuredOutput]:
    """Abridge an expression, or each of a schema's patterns, also in structural tags, as an expression of its own."""
    if structured_output.kind == "regex":
        expressions = [structured_output.value]
    elif structured_output.kind in ("json_schema", "structural_tag"):
        expressions = list(_patterns(json.loads(structured_output.value)))
    else:
        return ()
    return [StructuredOutput("regex", text) for text in dict.fromkeys(map(abridged, expressions))]


def _optional(part: str) -> str:
    return f"(?:{part}|{MARKER})"


def _is_long(quantifier: re.Match[str]) -> bool:
    if quantifier["counts"] is None:
        return quantifier[0][0] != "?"
    last = quantifier["counts"].split(",")[-1].strip()
    return not last or int(last) >= LONG


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
