"""Readers of plain JSON values. Each returns a Python value, or raises ValueError with what would be right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from handler.protocols.kernel.schema.readers import accepts

INT32 = (1 << 31) - 1
INT64 = (1 << 63) - 1

MAX_NAME = 256  # characters of what an answer repeats all the time: a model's name, a request's id
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 2048

_STRINGS = {
    "type": "array",
    "maxItems": MAX_STOPS,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
}
STRING_OR_STRINGS = [_STRINGS["items"], _STRINGS]

_LEAST_NORMAL, _MOST = 1.1754943508222875e-38, 3.4028234663852886e38  # of 32-bit floats


@accepts(type="boolean")
def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


@accepts(type="string")
def string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def integer(least: int, most: int = INT32) -> Callable[[Any], int]:
    @accepts(type="integer", minimum=least, maximum=most)
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be an integer from {least} to {most}")
        return value

    return read


def number(least: float, most: float = math.inf, *, above: bool = False, below: bool = False) -> Callable[[Any], float]:
    """Read a finite number in [least, most], without `least` when `above`, without `most` when `below`.

    Engines compute in 32 bits: a number that is 0 there, such as 1e-50, is 0 here too.
    """
    wanted = f"must be a number {'above' if above else 'of at least'} {least:g}"
    if most < math.inf:
        wanted += f" and {'below' if below else 'at most'} {most:g}"
    bounds = {"exclusiveMinimum" if above else "minimum": least, "exclusiveMaximum" if below else "maximum": most}

    @accepts(type="number", **{name: bound for name, bound in bounds.items() if math.isfinite(bound)})
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(wanted)
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        result = 0.0 if abs(result) < _LEAST_NORMAL else result
        if not math.isfinite(result) or abs(result) > _MOST or result < least or result > most:
            raise ValueError(wanted)
        if (above and result == least) or (below and result == most):
            raise ValueError(wanted)
        return result

    return read


@accepts(anyOf=STRING_OR_STRINGS)
def strings(value: Any) -> tuple[str, ...]:
    """Read a list of strings; one string stands for a list of one."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOPS:
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
    for item in items:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"must hold non-empty strings of at most {MAX_STOP_CHARACTERS} characters")
    return tuple(items)


@accepts(type="array", maxItems=MAX_STOPS, items={"type": "integer", "minimum": 0, "maximum": INT32})
def token_ids(value: Any) -> tuple[int, ...]:
    read = integer(0)
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        raise ValueError(f"must be a list of at most {MAX_STOPS} token ids")
    try:
        return tuple(read(item) for item in value)
    except ValueError:
        raise ValueError("must hold token ids, which are integers of at least 0") from None


@accepts(type="object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100})
def logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Read {"token id": number to add to its logit}, as OpenAI and vLLM have it; zeros are dropped."""
    wanted = "must be an object of token ids, each with a number from -100 to 100"
    if not isinstance(value, dict):
        raise ValueError(wanted)
    bias = number(-100, 100)
    try:
        biases = {integer(0)(int(id)): bias(item) for id, item in value.items() if id.isascii() and id.isdecimal()}
    except ValueError:
        raise ValueError(wanted) from None
    if len(biases) < len(value):
        raise ValueError(f"{wanted}, none of them twice")
    return tuple((id, item) for id, item in sorted(biases.items()) if item)
