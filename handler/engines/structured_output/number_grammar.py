"""Ranges of numbers in xgrammar's EBNF, without exponents, as xgrammar's own of OpenVINO GenAI lets others in.

A number with `_DECIMALS` decimals or fewer is a whole number of its last place, so ranges of those are all there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

_DIGITS = 19  # before the point, where a side is open
_DECIMALS = 6
_EXACT = 15  # digits that a double keeps apart: none of the numbers may be rounded onto a bound that excludes it


def integers(said: Mapping[str, Any]) -> str | None:
    """One element for the integers between `minimum`, `exclusiveMinimum`, `maximum` and `exclusiveMaximum`; None where
    a bound is no number, or nothing is between them."""
    return _between(said, 0)


def numbers(said: Mapping[str, Any]) -> str | None:
    """As `integers`, with decimals; None also where digits would have to be told apart that a double does not."""
    bounds = [value for value in said.values() if _is_number(value)]
    room = _EXACT - max((len(str(math.floor(abs(value)))) for value in bounds), default=0)
    needed = max(map(_decimals, bounds), default=0)
    return _between(said, max(needed, min(_DECIMALS, room))) if needed <= room else None


def _between(said: Mapping[str, Any], decimals: int) -> str | None:
    bounds = _bounds(said, decimals)
    return None if bounds is None else _either(_signed(*bounds, decimals))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _decimals(value: float) -> int:
    exponent = Decimal(str(value)).normalize().as_tuple().exponent
    return max(0, -int(exponent))


def _bounds(said: Mapping[str, Any], decimals: int) -> tuple[int, int] | None:
    """The least and the largest one, in units of the last decimal."""
    if not all(map(_is_number, said.values())):
        return None
    units = {name: Decimal(str(value)).scaleb(decimals) for name, value in said.items()}
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
    """Numbers from 0 on, in units of the last decimal, digit by digit.

    No two branches begin with the same digit: where they do, this xgrammar at times allows what neither does.
    """

    def __init__(self, low: int, high: int, decimals: int) -> None:
        self._decimals = decimals
        self._unit = 10**decimals
        self._low, self._high = low, high
        self._digits = len(str(high // self._unit))
        zero = self._end(0)
        others = _branches(lambda digit: self._more(digit, 1), least=1)
        self.grammar = _either(others if zero is None else [f'"0" {zero}', *others])

    def _more(self, value: int, length: int) -> str | None:
        """What may follow digits before the point; None where nothing that does is in the range."""
        reached = [self._reached(value, more) for more in range(self._digits - length + 1)]
        if None in reached:
            end = self._end(value)
            branches = _branches(lambda digit: self._more(value * 10 + digit, length + 1)) if len(reached) > 1 else []
            found = [*([] if end is None else [end]), *branches]
            return _either(found) if found else None
        counts = [more for more, inside in enumerate(reached) if inside]
        return f"{_any(counts[0], counts[-1])} {self._fraction(0, self._unit - 1)}" if counts else None

    def _reached(self, value: int, more: int) -> bool | None:
        """Whether all numbers with these digits and so many others before the point are in the range; None: some."""
        least = value * 10**more * self._unit
        most = (value + 1) * 10**more * self._unit - 1
        if self._low <= least and most <= self._high:
            return True
        return False if most < self._low or least > self._high else None

    def _end(self, value: int) -> str | None:
        """What may follow the last digit before the point."""
        least, most = max(self._low - value * self._unit, 0), min(self._high - value * self._unit, self._unit - 1)
        return self._fraction(least, most) if least <= most else None

    def _fraction(self, low: int, high: int) -> str:
        """The point and what follows; zeros at its end may be left out, and the point after which there is nothing."""
        if not self._decimals:
            return '""'
        after = _either(_branches(lambda digit: self._decimal(digit, 1, low, high)))
        return f'("" | "." {after})' if low == 0 else f'"." {after}'

    def _decimal(self, value: int, length: int, low: int, high: int) -> str | None:
        rest = 10 ** (self._decimals - length)
        least, most = value * rest, (value + 1) * rest - 1
        if most < low or least > high:
            return None
        if low <= least and most <= high:
            return _any(0, self._decimals - length)
        branches = _branches(lambda digit: self._decimal(value * 10 + digit, length + 1, low, high))
        return _either(['""', *branches] if low <= least else branches)


def _branches(follows: Callable[[int], str | None], least: int = 0) -> list[str]:
    """A digit and what follows it, digits with the same together."""
    found: list[tuple[int, int, str]] = []
    for digit in range(least, 10):
        after = follows(digit)
        if after is not None and found and found[-1][1:] == (digit - 1, after):
            found[-1] = (found[-1][0], digit, after)
        elif after is not None:
            found.append((digit, digit, after))
    return [f"[{first}-{last}] {after}" for first, last, after in found]


def _any(least: int, most: int) -> str:
    """xgrammar takes a repetition of none for one without end."""
    return f"[0-9]{{{least},{most}}}" if most else '""'


def _either(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"
