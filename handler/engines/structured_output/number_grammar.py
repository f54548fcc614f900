"""Converts ranges of numbers to xgrammar's EBNF, without exponents; GenAI's xgrammar accepts numbers outside.

A number with at most `_DECIMALS` decimals is an integer in units of its last decimal, so ranges of integers suffice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

_DIGITS = 19  # before the point, without a bound
_DECIMALS = 6
_EXACT = 15  # digits of a double: no number may be rounded onto an exclusive bound


def integers(limits: Mapping[str, Any]) -> str | None:
    """Write the integers between `minimum`, `exclusiveMinimum`, `maximum` and `exclusiveMaximum` as one element.

    Returns:
        None where a bound is not a number, or no integer lies between them.
    """
    return _between(limits, 0)


def numbers(limits: Mapping[str, Any]) -> str | None:
    """Write numbers with decimals, as `integers`; None also where the bounds have more digits than a double."""
    bounds = [value for value in limits.values() if _is_number(value)]
    available = _EXACT - max((len(str(math.floor(abs(value)))) for value in bounds), default=0)
    needed = max(map(_decimals, bounds), default=0)
    return _between(limits, max(needed, min(_DECIMALS, available))) if needed <= available else None


def _between(limits: Mapping[str, Any], decimals: int) -> str | None:
    bounds = _bounds(limits, decimals)
    return None if bounds is None else either(_signed(*bounds, decimals))


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _decimals(value: float) -> int:
    exponent = Decimal(str(value)).normalize().as_tuple().exponent
    return max(0, -int(exponent))


def _bounds(limits: Mapping[str, Any], decimals: int) -> tuple[int, int] | None:
    """Return the least and the largest number, in units of the last decimal."""
    if not all(map(_is_number, limits.values())):
        return None
    units = {name: Decimal(str(value)).scaleb(decimals) for name, value in limits.items()}
    low, high = 1 - 10 ** (_DIGITS + decimals), 10 ** (_DIGITS + decimals) - 1
    for name, value in units.items():
        if name == "minimum":
            low = max(low, math.ceil(value))
        elif name == "exclusiveMinimum":
            low = max(low, math.floor(value) + 1)
        elif name == "maximum":
            high = min(high, math.floor(value))
        else:
            high = min(high, math.ceil(value) - 1)
    return (low, high) if low <= high else None


def _signed(low: int, high: int, decimals: int) -> Iterator[str]:
    if low < 0:
        yield f'"-" {_Range(max(1, -high), -low, decimals).grammar}'
    if high >= 0:
        yield _Range(max(0, low), high, decimals).grammar


class _Range:
    """Numbers of at least 0, in units of the last decimal, digit by digit.

    No two branches begin with the same digit: where they do, GenAI's xgrammar sometimes allows other numbers.
    """

    def __init__(self, low: int, high: int, decimals: int) -> None:
        self._decimals = decimals
        self._unit = 10**decimals
        self._low, self._high = low, high
        self._digits = len(str(high // self._unit))
        zero = self._end(0)
        others = _branches(lambda digit: self._more(digit, 1), least=1)
        self.grammar = either(others if zero is None else [f'"0" {zero}', *others])

    def _more(self, value: int, length: int) -> str | None:
        """Write the rest after `length` digits before the point; None where no number with them is in the range."""
        inside = [self._contains(value, more) for more in range(self._digits - length + 1)]
        if None in inside:
            end = self._end(value)
            branches = _branches(lambda digit: self._more(value * 10 + digit, length + 1)) if len(inside) > 1 else []
            rests = [*([] if end is None else [end]), *branches]
            return either(rests) if rests else None
        counts = [more for more, is_inside in enumerate(inside) if is_inside]
        return f"{_any(counts[0], counts[-1])} {self._fraction(0, self._unit - 1)}" if counts else None

    def _contains(self, value: int, more: int) -> bool | None:
        """Whether all numbers with these digits and `more` others before the point are in the range; None for some."""
        least = value * 10**more * self._unit
        most = (value + 1) * 10**more * self._unit - 1
        if self._low <= least and most <= self._high:
            return True
        return False if most < self._low or least > self._high else None

    def _end(self, value: int) -> str | None:
        """Write the rest after the last digit before the point."""
        least, most = max(self._low - value * self._unit, 0), min(self._high - value * self._unit, self._unit - 1)
        return self._fraction(least, most) if least <= most else None

    def _fraction(self, low: int, high: int) -> str:
        """Write the point and the decimals; zeros at the end are optional, and so is a point without decimals."""
        if not self._decimals:
            return '""'
        after = either(_branches(lambda digit: self._decimal(digit, 1, low, high)))
        return f'("" | "." {after})' if low == 0 else f'"." {after}'

    def _decimal(self, value: int, length: int, low: int, high: int) -> str | None:
        rest = 10 ** (self._decimals - length)
        least, most = value * rest, (value + 1) * rest - 1
        if most < low or least > high:
            return None
        if low <= least and most <= high:
            return _any(0, self._decimals - length)
        branches = _branches(lambda digit: self._decimal(value * 10 + digit, length + 1, low, high))
        return either(['""', *branches] if low <= least else branches)


def _branches(follows: Callable[[int], str | None], least: int = 0) -> list[str]:
    """Write each digit with its rest; digits with the same rest share a branch."""
    groups: list[tuple[int, int, str]] = []
    for digit in range(least, 10):
        after = follows(digit)
        if after is not None and groups and groups[-1][1:] == (digit - 1, after):
            groups[-1] = (groups[-1][0], digit, after)
        elif after is not None:
            groups.append((digit, digit, after))
    return [f"[{first}-{last}] {after}" for first, last, after in groups]


def _any(least: int, most: int) -> str:
    """Repeat a digit; xgrammar takes {0,0} for an unlimited repetition."""
    return f"[0-9]{{{least},{most}}}" if most else '""'


def either(expressions: Iterable[str]) -> str:
    """Write alternatives as one element."""
    return f"({' | '.join(expressions)})"
