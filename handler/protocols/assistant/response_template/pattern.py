"""Regular expressions from a model's files, matched with bounded work on text that arrives in pieces.

Neither a model's files nor its responses can be trusted: a pattern that backtracks could block the server. Here all
alternatives of a match advance together, one character at a time, in the same order of preference as in Python.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_MOST_TEXT = 1024  # characters of a pattern
_MOST_STEPS = 256  # of a compiled pattern
_MOST_WAYS = 32  # alternatives that a match may follow at once
_MOST_REPEATS = 256
_MOST_MOVES = 4096  # transitions in the cache
_DEEPEST = 16  # nested groups
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

    def _emit(self, node: _Node, *, tail: bool = False) -> None:
        """Add the steps of a node.

        Args:
            tail: whether the node is at the end of the pattern.
        """
        kind, value, parts = node.kind, node.value, node.parts
        if kind == "class":
            self._add(_Step(_CHARACTER, _Class(value)))
        elif kind == "assert":
            self._add(_Step(_ASSERT, value))
        elif kind == "sequence":
            for index, part in enumerate(parts):
                self._emit(part, tail=tail and index == len(parts) - 1)
        elif kind == "choice":
            self._emit_choice(parts, tail=tail)
        elif kind == "group":
            slot = 2 * len(self.groups) + 1
            self.groups.append(value)
            self._add(_Step(_SAVE, slot))
            self._emit(parts[0])
            self._add(_Step(_SAVE, slot + 1))
        elif kind == "ahead":
            if not tail:
                raise ValueError("has a lookahead that is not at the end")
            self._add(_Step(_SAVE, 0))
            self._emit(parts[0])
        else:
            self._emit_repeat(node)

    def _emit_choice(self, parts: Sequence[_Node], *, tail: bool) -> None:
        ends = []
        for part in parts[:-1]:
            split = self._add(_Step(_SPLIT))
            self._emit(part, tail=tail)
            ends.append(self._add(_Step(_SPLIT)))
            self.steps[split] = _Step(_SPLIT, (split + 1, len(self.steps)))
        self._emit(parts[-1], tail=tail)
        for end in ends:
            self.steps[end] = _Step(_SPLIT, (len(self.steps),))

    def _emit_repeat(self, node: _Node) -> None:
        least, most, lazy = node.value
        begin = len(self.steps)
        for _ in range(least):
            self._emit(node.parts[0])
            if len(self.steps) == begin:
                return  # the part is empty, and nested repetitions of it would take forever
        splits, loop = [], len(self.steps)
        for _ in range(1 if most is None else most - least):
            splits.append(self._add(_Step(_SPLIT)))
            self._emit(node.parts[0])
        if most is None:
            self._add(_Step(_SPLIT, (loop,)))
        for split in splits:
            self.steps[split] = _Step(_SPLIT, (split + 1, len(self.steps))[:: -1 if lazy else 1])


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


class _Node(NamedTuple):
    """A node of a parsed pattern.

    Attributes:
        kind: class, assert, sequence, choice, group (with a name), ahead (a lookahead) or repeat.
    """

    kind: str
    value: Any = None
    parts: Sequence[_Node] = ()


_GROUP_NAME = re.compile(r"\?P?<([A-Za-z_]\w*)>")
_TIMES = re.compile(r"\{(?:([0-9]+)(,?)([0-9]*)|,([0-9]+))\}")
_SET = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPES = frozenset("wWsSdDtnrfva")
_ASSERTS = {"^": "^", "$": "$", "\\A": "^", "\\Z": "$", "\\b": "b", "\\B": "B"}


class _Reader:
    """Parses the text of a pattern."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> _Node:
        tree = self._choice()
        if self._at < len(self._text):
            raise ValueError("has a ')' without '('")
        return tree

    def _next(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _choice(self) -> _Node:
        parts = [self._sequence()]
        while self._next("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Node("choice", parts=parts)

    def _sequence(self) -> _Node:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return _Node("sequence", parts=parts)

    def _atom(self) -> _Node:
        sign = self._text[self._at]
        if sign == "(":
            return self._group()
        if sign == "[":
            return self._set()
        if sign in "*+?":
            raise ValueError(f"has a {sign!r} without anything to repeat")
        size = 2 if sign == "\\" else 1
        sign = self._text[self._at : self._at + size]
        self._at += size
        if sign in _ASSERTS:
            return _Node("assert", _ASSERTS[sign])
        if sign == ".":
            return _Node("class", sign)
        if size == 2:
            if len(sign) == 1:
                raise ValueError("ends with a backslash")
            if sign[1].isalnum() and sign[1] not in _ESCAPES:
                raise ValueError(f"has {sign!r}, which is not supported in a response template")
            return _Node("class", sign)
        return _Node("class", re.escape(sign))

    def _set(self) -> _Node:
        match = _SET.match(self._text, self._at)
        if match is None or "[:" in match[0]:
            raise ValueError("has a '[' that does not begin a set of characters")
        self._at = match.end()
        try:
            re.compile(match[0])
        except re.error as error:
            raise ValueError(f"has the invalid set {match[0]!r}: {error}") from None
        return _Node("class", match[0])

    def _group(self) -> _Node:
        self._at += 1
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"has more than {_DEEPEST} nested groups")
        name, kind = "", "plain"
        if self._next("?:"):
            pass
        elif self._next("?="):
            kind = "ahead"
        elif match := _GROUP_NAME.match(self._text, self._at):
            self._at, name, kind = match.end(), match[1], "group"
        elif self._text.startswith("?", self._at):
            excerpt = self._text[self._at - 1 : self._at + 3]
            raise ValueError(
                f"has {excerpt!r}: only the groups (…), (?:…), (?P<name>…) and a trailing lookahead (?=…) are supported"
            )
        inner = self._choice()
        if not self._next(")"):
            raise ValueError("has a '(' without ')'")
        self._depth -= 1
        return inner if kind == "plain" else _Node(kind, name, [inner])

    def _repeated(self, node: _Node) -> _Node:
        if self._next("*"):
            least, most = 0, None
        elif self._next("+"):
            least, most = 1, None
        elif self._next("?"):
            least, most = 0, 1
        elif match := _TIMES.match(self._text, self._at):
            self._at = match.end()
            least = int(match[1] or 0)
            last = match[4] or match[3]
            most = int(last) if last else None if match[2] else least
            if max(least, most or 0) > _MOST_REPEATS or (most is not None and most < least):
                raise ValueError(f"has {match[0]!r}: each count must be at most {_MOST_REPEATS}, the smaller first")
        else:
            return node
        if node.kind in ("assert", "ahead"):
            raise ValueError("repeats an assertion")
        lazy = self._next("?")
        if self._text[self._at : self._at + 1] in tuple("*+?"):
            raise ValueError("has two repetitions in a row, which are not supported in a response template")
        return _Node("repeat", (least, most, lazy), [node])


def _literals(tree: _Node) -> Iterator[str]:
    """Yield the sequences of literal characters in a pattern."""
    if tree.kind != "sequence":
        for part in tree.parts:
            yield from _literals(part)
        return
    run = ""
    for part in (*tree.parts, _Node("end")):
        source = part.value if part.kind == "class" else ""
        if len(source) == 1 and source != ".":
            run += source
        elif len(source) == 2 and source[0] == "\\" and not source[1].isalnum():
            run += source[1]
        else:
            if run:
                yield run
            run = ""
            yield from _literals(part)
