r"""Literals and character classes in xgrammar's EBNF, in a form that xgrammar can print and read again.

GenAI's xgrammar compiles a grammar from its printed form. It prints control characters and Latin-1 letters as `\x` with
two digits. In that form it reads all hexadecimal digits that follow as part of the number, so `Fläche` would become
`Fl\u0e4che`. Therefore no such digit may follow in the same literal or class.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from handler.engines.structured_output.ebnf import MACROS, Lexeme, Unreadable, scan

LAST = 0x10FFFF
"""The last code point."""

Range = tuple[int, int]
"""The first and the last code point of a range."""

LAST_EXCLUDED = 0x7F
"""GenAI's xgrammar ignores further characters in a negated class, or raises an error."""

_DIGITS = frozenset("0123456789abcdefABCDEF")
_UNSAFE = '"\\'
_UNSAFE_IN_CLASS = '"\\[]^-'
_ESCAPE = re.compile(
    r"\\x(?P<hex>[0-9a-fA-F]+)|\\u(?P<four>[0-9a-fA-F]{4})|\\U(?P<eight>[0-9a-fA-F]{8})|\\(?P<letter>.)|(?P<plain>.)",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "e": "\x1b"}


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


def either(expressions: Iterable[str]) -> str:
    """Join alternatives into one EBNF element."""
    return f"({' | '.join(expressions)})"


def choice_of(texts: Iterable[str]) -> str:
    """Join strings into one EBNF element, in which no two branches begin with the same character.

    If a dozen branches began with the same character, GenAI's xgrammar would confuse them and allow other strings.
    """
    branches = []
    for _, group in itertools.groupby(sorted(set(texts)), lambda text: text[:1]):
        members = list(group)
        prefix = _common_prefix(members[0], members[-1])
        rests = [text[len(prefix) :] for text in members]
        branches.append(f"{literal(prefix)} {choice_of(rests)}" if len(rests) > 1 else literal(prefix))
    return branches[0] if len(branches) == 1 else either(branches)


def _common_prefix(first: str, last: str) -> str:
    """Return the common prefix of two strings. In a sorted list, the strings between the two also have this prefix."""
    length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


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


# -- a client's grammar ------------------------------------------------------------------------------------------------


def respelled(grammar: str) -> str:
    """Rewrite the literals and classes in a grammar that xgrammar would print and read again as others.

    Args:
        grammar: a client's grammar. With a syntax error it is returned unchanged, because xgrammar reports the error.

    Raises:
        ValueError: a string in a macro may have to be rewritten.
    """
    try:
        tokens = list(scan(grammar))
    except Unreadable:
        return grammar
    rewritten = "".join(_rewritten(token) for token in tokens)
    if rewritten != grammar and any(token.text in MACROS for token in tokens):
        raise ValueError("the grammar cannot contain both a macro and a Latin-1 letter before a hexadecimal digit")
    return rewritten


def _rewritten(token: Lexeme) -> str:
    if token.kind == "text":
        characters = _read(token.text[1:-1])
        if characters is not None and is_misread(characters):
            return literal(characters)
    return _rewritten_class(token.text) if token.kind == "characters" else token.text


def _read(text: str) -> str | None:
    """Resolve the escapes in a literal, as xgrammar does. Return None if one is invalid."""
    characters = [_character(match) for match in _ESCAPE.finditer(text)]
    return None if None in characters else "".join(map(str, characters))


def _character(match: re.Match[str]) -> str | None:
    if match["plain"]:
        return match["plain"]
    if match["letter"]:
        return _CONTROLS.get(match["letter"], match["letter"])
    number = int(match["hex"] or match["four"] or match["eight"], 16)
    return chr(number) if number <= LAST else None


def _rewritten_class(text: str) -> str:
    """Rewrite a class if xgrammar would misread it, or if it is negated and contains characters beyond ASCII."""
    is_negated = text.startswith("[^")
    pieces = [(match[0], _character(match)) for match in _ESCAPE.finditer(text[1 + is_negated : -1])]
    values = [value for _, value in pieces]
    if None in values:
        return text
    characters = "".join(map(str, values))
    if not is_misread(characters) and not (is_negated and max(characters, default="") > chr(LAST_EXCLUDED)):
        return text
    ranges: list[Range] = []
    at = 0
    while at < len(pieces):
        first = last = str(values[at])
        if at + 2 < len(pieces) and pieces[at + 1][0] == "-":
            last = str(values[at + 2])
            at += 2
        at += 1
        if last < first:
            return text
        ranges.append((ord(first), ord(last)))
    return character_class(complement(ranges) if is_negated else ranges)
