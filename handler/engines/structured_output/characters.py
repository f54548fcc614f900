r"""Literals and character classes in xgrammar's EBNF, in a form that xgrammar can print and read again.

GenAI's xgrammar compiles a grammar from its printed form. It prints control characters and Latin-1 letters as `\x` with
two digits. In that form it reads all hexadecimal digits that follow as part of the number, so `Fläche` would become
`Fl\u0e4che`. Therefore no such digit may follow in the same literal or class.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

LAST = 0x10FFFF
"""The last code point."""

Range = tuple[int, int]
"""The first and the last code point of a range."""

LAST_EXCLUDED = 0x7F
"""GenAI's xgrammar ignores further characters in a negated class, or raises an error."""

_DIGITS = frozenset("0123456789abcdefABCDEF")
_UNSAFE = '"\\'
_UNSAFE_IN_CLASS = '"\\[]^-'


def literal(text: str) -> str:
    """Return a string as an EBNF element: a literal, or several in brackets.

    Quotes, backslashes, and characters that are not printable ASCII are escaped.
    """
    parts = [_quoted(part) for part in _separated(text)]
    return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"


def is_misread(text: str) -> bool:
    """Return whether xgrammar would print a string and read it again as another."""
    return len(list(_separated(text))) > 1


def _separated(text: str) -> Iterator[str]:
    """Yield the parts of a string in which no hexadecimal digit follows a character that is printed with `\\x`."""
    start = 0
    for at, (character, following) in enumerate(itertools.pairwise(text), 1):
        if _is_printed_with_digits(character) and following in _DIGITS:
            yield text[start:at]
            start = at
    yield text[start:]


def _is_printed_with_digits(character: str) -> bool:
    return character <= "\xff" and not _is_plain(character)


def _is_plain(character: str) -> bool:
    return character.isascii() and character.isprintable()


def _quoted(text: str) -> str:
    return '"' + "".join(_escaped(character, _UNSAFE) for character in text) + '"'


def _escaped(character: str, unsafe: str) -> str:
    return character if _is_plain(character) and character not in unsafe else f"\\U{ord(character):08x}"


def num_common(first: str, second: str) -> int:
    """Return the number of characters at the beginnings of two strings that are equal."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# -- character classes -------------------------------------------------------------------------------------------------


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the same characters as sorted ranges that neither overlap nor touch."""
    result: list[Range] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], last))
        else:
            result.append((first, last))
    return result


def without(ranges: Iterable[Range], excluded: Iterable[Range]) -> list[Range]:
    """Return the ranges of characters that are in `ranges` and not in `excluded`."""
    result: list[Range] = []
    gaps = joined(excluded)
    for first, last in joined(ranges):
        for start, end in gaps:
            if start > last:
                break
            if end >= first:
                if first < start:
                    result.append((first, start - 1))
                first = end + 1
        if first <= last:
            result.append((first, last))
    return result


def complement(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges of all other characters."""
    return without([(0, LAST)], ranges)


def character_class(ranges: Iterable[Range]) -> str:
    """Return an EBNF character class. There must be at least one range."""
    ranges = joined(ranges)
    excluded = complement(ranges)
    if excluded and excluded[-1][1] <= LAST_EXCLUDED:
        return f"[^{_listed(excluded)}]"
    return f"[{_listed(ranges)}]"


def _listed(ranges: Sequence[Range]) -> str:
    """Write joined ranges. Those that begin with a hexadecimal digit come first, because they must not follow others.

    If one of them ends with a character that is printed with digits, it includes all further hexadecimal digits.
    """
    ordered = sorted(ranges, key=lambda range: chr(range[0]) not in _DIGITS)
    return "".join(
        _escaped(chr(first), _UNSAFE_IN_CLASS)
        + ("-" * (last > first + 1) + _escaped(chr(last), _UNSAFE_IN_CLASS)) * (last > first)
        for first, last in ordered
    )
