"""Regular expressions from a model's files, matched with bounded work on text that arrives in pieces.

Neither a model's files nor its responses can be trusted: a pattern that backtracks could block the server. Here all
alternatives of a match advance together, one character at a time, in the same order of preference as in Python.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from handler.core.expressions import Alternatives, ExpressionReader, Repeat, Series

_MOST_TEXT = 1024  # characters of a pattern
_MOST_STEPS = 256  # of a compiled pattern
_MOST_WAYS = 32  # alternatives that a match may follow at once
_MOST_REPEATS = 256
_MOST_MOVES = 4096  # transitions in the cache
_FREE = 16_384  # alternatives that may be followed without a match, whatever the length of the text


def may_try(in_vain: int, size: int) -> bool:
    """Return whether a pattern may be tried again. The work on failed attempts is limited by the length of the text.

    Args:
        in_vain: the number of alternatives that were followed without a match.
        size: the number of characters read so far.
    """
    return in_vain <= _FREE + 2 * size


class Match(NamedTuple):
    """The length of a match, and the text of its named groups."""

    size: int
    groups: Mapping[str, str]


# The kinds of steps. Each is followed by the next step, except for _SPLIT.
_CHARACTER, _SPLIT, _SAVE, _ASSERT, _MATCH = range(5)


class _Step(NamedTuple):
    """A step of a compiled pattern.

    Attributes:
        value: for _CHARACTER, the class; for _SPLIT, the indices of the steps that may follow, with the preferred step
            first; for _SAVE, the slot; for _ASSERT, the symbol of the assertion.
    """

    kind: int
    value: Any = None


class _Class:
    """A literal character or a character class in Python's notation.

    Attributes:
        has: returns whether a character belongs to the class. Results are cached.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        matches = re.compile(source, re.DOTALL).fullmatch
        self.has = functools.lru_cache(4096)(lambda character: matches(character) is not None)


_Saved = tuple[int, ...]
_State = tuple[int, ...]
"""The current step of each alternative of a match, with the preferred alternative first. Each step waits for a
character, or for the text that follows an assertion.
"""

_Path = tuple[int, tuple[int, ...]]
"""The next step of an alternative, and the slots to save before it."""


class _Move(NamedTuple):
    """The transition from one state to another on a character.

    Attributes:
        state: the new state.
        sources: for each alternative of the new state, the index of the old alternative that it continues, and the
            slots that it saves.
        found: the alternative that has matched, and the slots that it saves, or None if no alternative has matched.
            Alternatives after it are dropped.
        same: whether the transition changes nothing.
    """

    state: _State
    sources: Sequence[tuple[int, tuple[int, ...]]]
    found: tuple[int, tuple[int, ...]] | None
    same: bool


class Pattern:
    """A compiled pattern in the subset of Python's notation that can be matched in one pass.

    Attributes:
        groups: the names of its groups.
        firsts: the character classes that can match the first character.
        at_start: whether the empty string matches at the start of a response.
        at_end: whether the empty string matches at the end of a response.
        literals: the sequences of literal characters in the pattern.
        move: returns the transition on a character from a state without assertions. Results are cached.

    Raises:
        ValueError: the text is not a pattern, is too long or too complex, cannot be matched in one pass, or can match
            the empty string anywhere.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _MOST_TEXT:
            raise ValueError(f"has more than {_MOST_TEXT} characters")
        tree = _Reader(text).read()
        self.steps: list[_Step] = []
        self.groups: list[str] = []
        self._emit(tree, tail=True)
        self.steps.append(_Step(_MATCH))
        self.no_groups: _Saved = (-1,) * (2 * len(self.groups) + 1)  # the first slot is the start of the lookahead
        self.literals = list(_literals(tree))
        self._asserts = any(step.kind == _ASSERT and step.value != "^" for step in self.steps)
        self.move = functools.lru_cache(_MOST_MOVES)(self._find_move)
        self.firsts, signs = self._first()
        self.at_start = "^" in signs
        self.at_end = "$" in signs
        if "" in signs:
            raise ValueError("can match the empty string anywhere")

    def _find_move(self, state: _State, character: str) -> _Move:
        """Compute the transition on a character from a state without assertions."""
        paths: list[tuple[int, _Path]] = []
        seen = set[int]()
        for index, at in enumerate(state):
            step = self.steps[at]
            if character and step.kind == _CHARACTER and step.value.has(character):
                paths += [(index, path) for path in self.follow(at + 1, seen)]
        return self.settle(paths, state)

    def settle(self, paths: Sequence[tuple[int, _Path]], before: _State = ()) -> _Move:
        """Return the transition to the paths before the first path that has matched, or to all paths if none has.

        Args:
            paths: the possible paths, each with the index of the old alternative that it continues.
            before: the old state.
        """
        matched = (number for number, (_, (at, _)) in enumerate(paths) if self.steps[at].kind == _MATCH)
        end = next(matched, None)
        match = None if end is None else (paths[end][0], paths[end][1][1])
        state = tuple(at for _, (at, _) in paths[:end])
        sources = [(index, slots) for index, (_, slots) in paths[:end]]
        same = state == before and match is None and sources == [(index, ()) for index in range(len(state))]
        return _Move(state, sources, match, same)

    def follow(self, at: int, seen: set[int], holds: Callable[[str], bool | None] = lambda sign: None) -> list[_Path]:
        """Return the paths that can be reached from a step without passing through a step in `seen`.

        Args:
            at: the index of the step.
            seen: the indices of the visited steps. This method adds to them.
            holds: returns whether an assertion is true, or None if this is not known yet.
        """
        paths: list[_Path] = []
        waiting: list[_Path] = [(at, ())]
        while waiting:
            at, slots = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            kind, value = self.steps[at]
            if kind == _SPLIT:
                waiting += [(branch, slots) for branch in reversed(value)]
            elif kind == _SAVE:
                waiting.append((at + 1, (*slots, value)))
            elif kind == _ASSERT and (value == "^" or holds(value) is not None):
                if holds(value):
                    waiting.append((at + 1, slots))
            else:
                paths.append((at, slots))
        return paths

    def asserts(self, state: _State) -> bool:
        """Return whether a state has assertions about the text that follows."""
        return self._asserts and any(self.steps[at].kind == _ASSERT for at in state)

    def _first(self) -> tuple[list[str], set[str]]:
        """Return the classes that can match the first character, and the assertions under which "" is a match.

        The assertion "" means that the empty string matches anywhere.
        """
        firsts, signs = dict[str, None](), set[str]()
        waiting, seen = [(0, "")], set[tuple[int, str]]()
        while waiting:
            at, sign = waiting.pop()
            if (at, sign) in seen:
                continue
            seen.add((at, sign))
            step = self.steps[at]
            if step.kind == _CHARACTER:
                firsts[step.value.source] = None
            elif step.kind == _MATCH:
                signs.add(sign)
            elif step.kind == _SPLIT:
                waiting += [(branch, sign) for branch in step.value]
            elif step.kind == _ASSERT and step.value in "^$" and not sign:
                waiting.append((at + 1, step.value))
            else:
                waiting.append((at + 1, sign))
        return list(firsts), signs

    # -- compiling ---------------------------------------------------------------------------------------------------

    def _add(self, step: _Step) -> int:
        if len(self.steps) >= _MOST_STEPS:
            raise ValueError("is too complex")
        self.steps.append(step)
        return len(self.steps) - 1

    def _emit(self, node: Any, *, tail: bool = False) -> None:
        """Add the steps of a node.

        Args:
            tail: whether the node is at the end of the pattern.
        """
        match node:
            case _Set(source):
                self._add(_Step(_CHARACTER, _Class(source)))
            case _Assertion(sign):
                self._add(_Step(_ASSERT, sign))
            case Series(parts):
                for index, part in enumerate(parts):
                    self._emit(part, tail=tail and index == len(parts) - 1)
            case Alternatives(branches):
                self._emit_choice(branches, tail=tail)
            case _Group(name, part):
                slot = 2 * len(self.groups) + 1
                self.groups.append(name)
                self._add(_Step(_SAVE, slot))
                self._emit(part)
                self._add(_Step(_SAVE, slot + 1))
            case _Ahead(part):
                if not tail:
                    raise ValueError("has a lookahead that is not at the end")
                self._add(_Step(_SAVE, 0))
                self._emit(part)
            case Repeat():
                self._emit_repeat(node)

    def _emit_choice(self, parts: Sequence[Any], *, tail: bool) -> None:
        ends = []
        for part in parts[:-1]:
            split = self._add(_Step(_SPLIT))
            self._emit(part, tail=tail)
            ends.append(self._add(_Step(_SPLIT)))
            self.steps[split] = _Step(_SPLIT, (split + 1, len(self.steps)))
        self._emit(parts[-1], tail=tail)
        for end in ends:
            self.steps[end] = _Step(_SPLIT, (len(self.steps),))

    def _emit_repeat(self, node: Repeat) -> None:
        least, most = node.minimum, node.maximum
        begin = len(self.steps)
        for _ in range(least):
            self._emit(node.part)
            if len(self.steps) == begin:
                return  # the part is empty, and nested repetitions of it would take forever
        splits, loop = [], len(self.steps)
        for _ in range(1 if most is None else most - least):
            splits.append(self._add(_Step(_SPLIT)))
            self._emit(node.part)
        if most is None:
            self._add(_Step(_SPLIT, (loop,)))
        for split in splits:
            self.steps[split] = _Step(_SPLIT, (split + 1, len(self.steps))[:: -1 if node.is_lazy else 1])


class Attempt:
    """An attempt to match a pattern at one position of a text that arrives in pieces.

    Args:
        before: the character before the position, or "" at the start of the text.
        limit: the maximum number of characters of a match, or None for no maximum.

    Attributes:
        is_open: whether the result depends on more input.
        work: the number of alternatives that were followed.
    """

    __slots__ = ("_before", "_found", "_limit", "_pattern", "_read", "_saved", "_state", "is_open", "work")

    def __init__(self, pattern: Pattern, before: str, limit: int | None = None) -> None:
        self._pattern = pattern
        self._before = before
        self._limit = limit
        self._read = 0
        self._found: tuple[int, _Saved] | None = None
        self.is_open, self.work = True, 0
        self._state: _State = ()
        self._saved: list[_Saved] = [pattern.no_groups]
        paths = pattern.follow(0, set(), lambda sign: not before if sign == "^" else None)
        self._take(pattern.settle([(0, path) for path in paths]))

    def feed(self, text: str, *, final: bool = False) -> None:
        """Read the next piece of the text. `final` means that no more text follows."""
        for character in text:
            if not self.is_open:
                return
            self._step(character)
        if final and self.is_open:
            self._step("")
            self.is_open = False

    def match(self, text: str) -> Match | None:
        """Return the match, or None if there is no match. Call it when `is_open` is false.

        Args:
            text: all text that was read.
        """
        if self._found is None:
            return None
        end, saved = self._found
        groups = {
            name: text[saved[2 * index + 1] : saved[2 * index + 2]]
            for index, name in enumerate(self._pattern.groups)
            if saved[2 * index + 2] >= 0
        }
        return Match(end if saved[0] < 0 else saved[0], groups)

    def _step(self, character: str) -> None:
        pattern = self._pattern
        if pattern.asserts(self._state):  # the character that follows is known now
            seen = set[int]()
            holds = functools.partial(self._holds, character)
            self._take(
                pattern.settle(
                    [(index, path) for index, at in enumerate(self._state) for path in pattern.follow(at, seen, holds)]
                )
            )
        self.work += 1 + len(self._state)
        self._read += 1
        self._before = character
        move = pattern.move(self._state, character)
        if not move.same:
            self._take(move)
        if self._read == self._limit or len(self._state) > _MOST_WAYS:
            self._state, self.is_open = (), False

    def _take(self, move: _Move) -> None:
        saved = self._saved
        if move.found is not None:
            index, slots = move.found
            self._found = self._read, self._with(saved[index], slots)
        self._state = move.state
        self._saved = [self._with(saved[index], slots) for index, slots in move.sources]
        self.is_open = bool(move.state)

    def _with(self, saved: _Saved, slots: tuple[int, ...]) -> _Saved:
        for slot in slots:
            saved = (*saved[:slot], self._read, *saved[slot + 1 :])
        return saved

    def _holds(self, following: str, sign: str) -> bool:
        if sign == "^":
            return not self._before and not self._read
        if sign == "$":
            return not following
        return (_is_word(self._before) is not _is_word(following)) is (sign == "b")


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Set:
    """One character of a set in Python's notation."""

    source: str


@dataclass(frozen=True)
class _Assertion:
    sign: str


@dataclass(frozen=True)
class _Group:
    name: str
    part: Any


@dataclass(frozen=True)
class _Ahead:
    """A lookahead."""

    part: Any


_GROUP_NAME = re.compile(r"\?P?<([A-Za-z_]\w*)>")
_SET = re.compile(r"\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPES = frozenset("wWsSdDtnrfva")
_ASSERTIONS = {"^": "^", "$": "$", "\\A": "^", "\\Z": "$", "\\b": "b", "\\B": "B"}


class _Reader(ExpressionReader):
    """Reads the text of a pattern."""

    quantifier = re.compile(r"[*+?]|\{([0-9]+|(?=,[0-9]))(,?)([0-9]*)\}")
    max_depth = 16
    anchors = (_Assertion, _Ahead)

    def error(self, words: str) -> NoReturn:
        raise ValueError(f"cannot be read: {words} (at character {self.at + 1})")

    def atom(self, character: str) -> Any:
        if character == "(":
            return self._group()
        if character == "[":
            return self._set()
        sign = character + (self.take() if character == "\\" else "")
        if sign in _ASSERTIONS:
            return _Assertion(_ASSERTIONS[sign])
        if len(sign) == 2 and sign[1].isalnum() and sign[1] not in _ESCAPES:
            raise ValueError(f"has {sign!r}, which is not supported in a response template")
        return _Set(sign if len(sign) == 2 or sign == "." else re.escape(sign))

    def _set(self) -> _Set:
        match = self.match(_SET)
        if match is None or "[:" in f"[{match[0]}":
            raise ValueError("has a '[' that does not begin a set of characters")
        source = f"[{match[0]}"
        try:
            re.compile(source)
        except re.error as error:
            raise ValueError(f"has the invalid set {source!r}: {error}") from None
        return _Set(source)

    def _group(self) -> Any:
        if self.next("?="):
            return _Ahead(self.group())
        if match := self.match(_GROUP_NAME):
            return _Group(match[1], self.group())
        if not self.next("?:") and self.text.startswith("?", self.at):
            excerpt = self.text[self.at - 1 : self.at + 3]
            raise ValueError(
                f"has {excerpt!r}: only the groups (…), (?:…), (?P<name>…) and a trailing lookahead (?=…) are supported"
            )
        return Series([self.group()])  # a group is no part of the text around it

    def _count(self, digits: str) -> int:
        count = super()._count(digits)
        if count > _MOST_REPEATS:
            self.error(f"more than {_MOST_REPEATS} repetitions")
        return count


def _literals(node: Any) -> Iterator[str]:
    """Yield the sequences of literal characters in a pattern."""
    match node:
        case Alternatives(branches):
            for branch in branches:
                yield from _literals(branch)
        case Repeat(part) | _Group(_, part) | _Ahead(part):
            yield from _literals(part)
        case Series(parts):
            for is_text, run in itertools.groupby(parts, lambda part: bool(_literal(part))):
                if is_text:
                    yield "".join(map(_literal, run))
                else:
                    for part in run:
                        yield from _literals(part)
        case _Set() if text := _literal(node):
            yield text


def _literal(node: Any) -> str:
    """Return the only character of a set, or "" if the node is another or the set has several."""
    source = node.source if isinstance(node, _Set) else ""
    if len(source) == 2 and source[0] == "\\" and not source[1].isalnum():
        return str(source[1])
    return source if len(source) == 1 and source != "." else ""
