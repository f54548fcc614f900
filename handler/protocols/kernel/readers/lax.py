"""How the original of a dialect reads a value that is not of the field's own JSON type: `8.0`, `"8"`, `1` for true.

The readers of values take JSON's own types alone, and that is the rule of the dialects whose originals are strict: TGI,
TEI and MindIE (serde), and Triton (RapidJSON, but for the texts that its vLLM backend reads). Before them, the others
put the values of their fields right by a rule:

* pydantic's lax mode (docs.pydantic.dev, "Conversion Table"): vLLM's routes, and with them OpenAI's and Anthropic's;
  LMI's chats and its async mode.
* Python's: the prompts of LMI's rolling and dynamic batch, whose handlers check no types.

A value that the rule cannot put right stays as it is, for the reader to refuse by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.protocols.kernel.readers.values import INT64
from handler.protocols.kernel.schema.shapes import Shape

Convert = Callable[[Any], Any]

_MAX_CHARACTERS = 4300  # of a number: Python's own limit, and pydantic's
_INTEGER = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?")
_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


class Rule(NamedTuple):
    """How values become those of a JSON type; each returns what it cannot convert."""

    boolean: Convert
    integer: Convert
    number: Convert


# -- Python's ----------------------------------------------------------------------------------------------------


def _truth(value: Any) -> Any:
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < INT64 else value


def as_int(value: Any) -> Any:
    """Do as Python's `int`, which LMI's handlers call on a prompt's `seed` alone."""
    if not isinstance(value, str | float | bool):
        return value
    try:
        return int(value)
    except (ValueError, OverflowError):
        return value


PYTHON = Rule(_truth, _whole, lambda value: value)
"""Text is left as it is, and so refused: it cannot be compared with a number, and "false" would be true."""


# -- pydantic's --------------------------------------------------------------------------------------------------


def _flag(value: Any) -> Any:
    return _FLAGS.get(value.lower(), value) if isinstance(value, str) else _truth(value)


def _integer(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        return _whole(value)
    match = _INTEGER.fullmatch(value.strip())
    return value if match is None else int(match[1])


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        return value
    text = value.strip()
    if not text.isascii() or "__" in text or text != text.strip("_"):
        return value
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return value
    return number if math.isfinite(number) else value


PYDANTIC = Rule(_flag, _integer, _number)


# -- bodies ------------------------------------------------------------------------------------------------------


def relaxed_by(
    rule: Rule, shapes: Mapping[str, Shape], own: Mapping[str, Convert] = MappingProxyType({})
) -> Callable[[Any], Any]:
    """Return a function that puts the values of an object's fields right; anything else it returns as it is.

    Args:
        shapes: the fields' JSON schemas. It looks at numbers and flags, and at lists and objects of them, no deeper.
        own: fields with a conversion of their own.
    """
    converts = {**{name: found for name, shape in shapes.items() if (found := _of_shape(rule, shape))}, **own}

    def relax(body: Any) -> Any:
        return _convert_items(body, converts) if isinstance(body, dict) else body

    return relax


def _convert_items(values: dict[str, Any], converts: Mapping[str, Convert]) -> dict[str, Any]:
    changed = {}
    for name, value in values.items():
        if (convert := converts.get(name)) is not None and (found := convert(value)) is not value:
            changed[name] = found
    return {**values, **changed} if changed else values


def _of_shape(rule: Rule, shape: Shape) -> Convert | None:
    if (plain := _of_scalar(rule, shape)) is not None:
        return plain
    if (item := _of_scalar(rule, shape.get("items", {}))) is not None:
        return lambda value: _convert_list(value, item) if isinstance(value, list) else value
    fields = {name: found for name, one in shape.get("properties", {}).items() if (found := _of_scalar(rule, one))}
    if fields:
        return lambda value: _convert_items(value, fields) if isinstance(value, dict) else value
    if (each := _of_scalar(rule, shape.get("additionalProperties") or {})) is not None:
        return lambda value: _convert_items(value, dict.fromkeys(value, each)) if isinstance(value, dict) else value
    return None


def _convert_list(values: list[Any], convert: Convert) -> list[Any]:
    converted = [convert(value) for value in values]
    return converted if any(new is not old for new, old in zip(converted, values, strict=True)) else values


def _of_scalar(rule: Rule, shape: Shape) -> Convert | None:
    kinds = shape.get("type", "boolean" if isinstance(shape.get("const"), bool) else [])
    named = [kinds] if isinstance(kinds, str) else kinds
    return next((getattr(rule, kind) for kind in named if kind in Rule._fields), None)
