"""Estimates how long llama.cpp needs to apply a grammar, without llama.cpp.

llama.cpp follows all derivations of a response at once, each as a stack of positions in the grammar. If the token that
the model chose is not allowed, it tries every token of the vocabulary on every stack, character by character. The
stacks after a character are compared only with those that come from the same stack, so an ambiguous grammar multiplies
them with each character of a token. In the meantime, all slots of llama-server wait.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from handler.engines.llamacpp.gbnf import Characters, Rules
from handler.engines.structured_output.characters import num_common

MAX_TRIALS = 20_000_000
"""Limit of the characters that llama.cpp may compare for one token of a response."""

_MAX_STACKS = 2_000  # stacks that one stack may become without a character
_MAX_STEPS = 20_000  # rules that may be entered to find them
_MAX_CHAIN = 2_000  # rules that begin with each other
_MAX_CALLS = 1_000_000  # visits of rules while llama.cpp looks for left recursion
_WALKS = 2  # responses that are tried from the root
_CHARACTERS = 96  # of each of them
_COMPARISON = 20  # measured cost of comparing two stacks, relative to comparing two characters
_SHORT_COMPARISON = 2  # the same for stacks that differ early, as those of most regular expressions
_MANY = 300  # comparisons of stacks after a character, with which the later characters of tokens matter too
_SAMPLE = 1024  # tokens of a vocabulary that are tried
_LONGEST = 128  # of them, the longest
_MOST_CHARACTERS = 32  # of a token

_TOO_SLOW = (
    "the grammar is too ambiguous for llama-server: one token of the response would delay all of its requests. "
    "Use fewer optional parts or alternatives that begin with the same characters"
)


_Suffix = tuple[Any, ...]
"""The rest of a token: nothing, or the kind of a character and the rest after it."""


_Shape = bytes
"""Describes stacks by the characters that they allow; equal shapes are taken for equal grammars."""


class TooAmbiguous(ValueError):
    """llama.cpp would take too long to apply the grammar."""

    def __init__(self) -> None:
        super().__init__(_TOO_SLOW)


class Sample:
    """Tokens of a vocabulary, which stand for all of them.

    Args:
        texts: the text of each token; None or "" for tokens that a grammar never allows.

    Attributes:
        texts: the sample.
        weight: number of tokens that each of them stands for.
        spread: for each length, how many beginnings of tokens each beginning of the sample stands for.
    """

    def __init__(self, texts: Iterable[str | None]) -> None:
        known = sorted({text[:_MOST_CHARACTERS] for text in texts if text}, key=lambda text: (len(text), text))
        step = max(len(known) // (_SAMPLE - _LONGEST), 1)
        self.texts = list(dict.fromkeys([*known[::step], *known[-_LONGEST:]]))
        self.weight = len(known) / max(len(self.texts), 1)
        pairs = zip(_num_beginnings(known), _num_beginnings(self.texts), strict=True)
        self.spread = [all_beginnings / own_beginnings for all_beginnings, own_beginnings in pairs]


def _num_beginnings(texts: Iterable[str]) -> list[int]:
    """Return how many different beginnings of each length the texts have, at least 1."""
    num_new = [0] * (_MOST_CHARACTERS + 2)  # differences between the numbers of adjacent lengths
    for previous, text in pairwise(["", *sorted(texts)]):
        num_new[num_common(previous, text) + 1] += 1
        num_new[len(text) + 1] -= 1
    return [max(number, 1) for number in accumulate(num_new[:-1])]


class Stacks:
    """The parser stacks of a grammar, each represented by an integer.

    0 is the empty stack. Any other integer represents a position in the grammar on top of another stack.

    Raises:
        ValueError: llama.cpp would take too long to read the grammar.
    """

    def __init__(self, rules: Rules) -> None:
        self._elements, self._starts, self.root = rules.elements, rules.starts, rules.root
        self._pairs: list[tuple[int, int]] = [(-1, 0)]
        self._numbers: dict[tuple[int, int], int] = {}
        self._expanded: dict[int, Sequence[int]] = {}
        self._sets: dict[Characters, int] = {}
        self._shapes: dict[int, _Shape] = {}
        self._check_beginnings()
        sets = {element for element in self._elements if isinstance(element, Characters)}
        bounds = {bound for element in sets for first, last in element.ranges for bound in (first, last + 1)}
        self._bounds = sorted(bounds | {0})
        self._kinds = {
            element: frozenset(kind for kind, first in enumerate(self._bounds) if element.matches(first))
            for element in sets
        }

    def _check_beginnings(self) -> None:
        """Raise ValueError if the search for left recursion would take too long: it visits rules again and again."""
        calls: dict[int, int] = {}
        for number in range(len(self._starts)):
            path = [(number, iter(self._beginnings(number)))]
            totals = [1]
            visiting = {number}
            while path and number not in calls:
                rule, rest = path[-1]
                following = next(rest, None)
                if following is None:
                    path.pop()
                    visiting.discard(rule)
                    calls[rule] = min(totals.pop(), _MAX_CALLS + 1)
                    if totals:
                        totals[-1] += calls[rule]
                elif following in calls:
                    totals[-1] += calls[following]
                elif following in visiting:
                    raise ValueError("llama.cpp does not support left recursion in grammars")
                else:
                    path.append((following, iter(self._beginnings(following))))
                    visiting.add(following)
                    totals.append(1)
                if len(path) > _MAX_CHAIN or (totals and totals[-1] > _MAX_CALLS):
                    raise TooAmbiguous

    def _beginnings(self, rule: int) -> Iterable[int]:
        """Return the rules that llama.cpp visits from a rule: those at a beginning, or after one that may be empty."""
        for start in self._starts[rule]:
            at = start
            while isinstance(element := self._elements[at], int):
                yield element
                if not any(self._elements[start] is None for start in self._starts[element]):
                    break
                at += 1

    def classes(self, text: str) -> list[int]:
        """Return a number for each character, which is equal for characters that the grammar does not distinguish."""
        return [bisect_right(self._bounds, ord(character)) - 1 for character in text]

    def beginnings(self) -> Iterable[Sequence[int]]:
        """Return the stacks of each position at which a rule begins. Of many that begin alike, return the first two."""
        alike = Counter[_Shape]()
        for at, element in enumerate(self._elements):
            if not isinstance(element, int):
                continue
            stacks = self.expand(self._stack(at, 0))
            if len(stacks) - (0 in stacks) > 1:
                shape = self._shape([(self._top(stack), self._shape_after(stack)) for stack in stacks])
                alike[shape] += 1
                if alike[shape] < 3:
                    yield stacks

    def _top(self, stack: int) -> int:
        """Return the number of the character at the top of a stack; -1 if the stack is empty."""
        element = self._elements[self._pairs[stack][0]] if stack else None
        return self._sets.setdefault(element, len(self._sets)) if isinstance(element, Characters) else -1

    def _shape_after(self, stack: int) -> _Shape:
        """Return the shape of the stacks after the next character. Many positions have the same stacks."""
        if not stack:
            return b""
        known = self._shapes.get(stack)
        if known is None:
            after = self.expand(self.next(stack))
            known = self._shapes[stack] = self._shape([(self._top(following), b"") for following in after])
        return known

    @staticmethod
    def _shape(tops: Iterable[tuple[int, _Shape]]) -> _Shape:
        """Return a digest of the characters that stacks allow next, each with the shape after it, in any order."""
        return hashlib.blake2b(repr(sorted(tops)).encode(), digest_size=16).digest()

    def roots(self) -> Sequence[int]:
        """Return the stacks before the first character of a response."""
        result = [stack for start in self._starts[self.root] for stack in self.expand(self._stack(start, 0))]
        return list(dict.fromkeys(result))

    def _stack(self, at: int, rest: int) -> int:
        """Return the number of a stack. A position at the end of an alternative does not count, as llama.cpp does."""
        if self._elements[at] is None:
            return rest
        pair = (at, rest)
        number = self._numbers.get(pair)
        if number is None:
            number = self._numbers[pair] = len(self._pairs)
            self._pairs.append(pair)
        return number

    def expand(self, stack: int) -> Sequence[int]:
        """Return the stacks that a stack becomes when rules are entered until a character is at the top.

        Raises:
            TooAmbiguous: there are too many.
        """
        known = self._expanded.get(stack)
        if known is not None:
            return known
        waiting, seen, result = [stack], {stack}, list[int]()
        while waiting:
            current = waiting.pop()
            at, rest = self._pairs[current]
            element = self._elements[at] if current else None
            if not isinstance(element, int):
                result.append(current)
                continue
            rest = self._stack(at + 1, rest)
            for start in self._starts[element]:
                entered = self._stack(start, rest)
                if entered not in seen:
                    seen.add(entered)
                    waiting.append(entered)
            if len(result) > _MAX_STACKS or len(seen) > _MAX_STEPS:
                raise TooAmbiguous
        self._expanded[stack] = result
        return result

    def after(self, stacks: Sequence[int], kind: int) -> Sequence[tuple[int, int]]:
        """Return the index of each stack that allows a character, and the stack after it, which is not expanded.

        Args:
            kind: the character's number from `classes`.
        """
        return [(index, self.next(stack)) for index, stack in enumerate(stacks) if kind in self.kinds(stack)]

    def next(self, stack: int) -> int:
        """Return the stack after a character, which is not expanded."""
        at, rest = self._pairs[stack]
        return self._stack(at + 1, rest)

    def kinds(self, stack: int) -> frozenset[int]:
        """Return the kinds of the characters that an expanded stack allows."""
        element = self._elements[self._pairs[stack][0]] if stack else None
        return self._kinds[element] if isinstance(element, Characters) else frozenset()

    def num_comparisons(self, stacks: Sequence[int]) -> int:
        """Return how many stacks llama.cpp compares to go on after a character of each stack.

        It does so for every stack, even if no token begins with the character.
        """
        total = 0
        for stack in stacks:
            if stack:
                count = len(self.expand(self.next(stack)))
                total += count * (count - 1) // 2
        return total


class GrammarTrial:
    """A trial of a grammar with a vocabulary.

    Args:
        sample: tokens of the vocabulary.
    """

    def __init__(self, stacks: Stacks, sample: Sample) -> None:
        self._stacks = stacks
        self._weight = sample.weight
        self._tokens: dict[int, Counter[_Suffix]] = {}  # by the kind of their first character
        for text in sample.texts:
            first, suffix = self._suffix(stacks.classes(text))
            self._tokens.setdefault(first, Counter())[suffix] += 1
        self._suffixes = frozenset((first, suffix) for first, rests in self._tokens.items() for suffix in rests)
        self._spread = sample.spread
        self._rejected: dict[tuple[int, frozenset[_Suffix]], tuple[frozenset[_Suffix], float]] = {}
        self._after: dict[tuple[int, int], Sequence[tuple[int, int]]] = {}
        self._found: dict[tuple[int, _Suffix], tuple[bool, float]] = {}
        self._seen: set[frozenset[int]] = set()

    @staticmethod
    def _suffix(kinds: Sequence[int]) -> tuple[int, _Suffix]:
        suffix: _Suffix = ()
        for kind in reversed(kinds[1:]):
            suffix = (kind, suffix)
        return kinds[0], suffix

    def check(self) -> None:
        """Try some responses, and every position at which a rule begins.

        Raises:
            TooAmbiguous: llama.cpp would compare more than MAX_TRIALS characters for one token.
        """
        roots = self._stacks.roots()
        for number in range(_WALKS):
            self._walk(roots, random.Random(number), greedy=not number)
        for stacks in self._stacks.beginnings():
            self.num_trials(stacks)

    def _walk(self, stacks: Sequence[int], draw: random.Random, *, greedy: bool) -> None:
        """Follow a possible response. Its characters are random or, if `greedy`, those that leave the most stacks."""
        for _ in range(_CHARACTERS):
            if (key := frozenset(stacks)) not in self._seen:
                self._seen.add(key)
                self.num_trials(stacks)
            choices = [self._following(stacks, kind) for kind in self._tokens]
            choices = [following for following in choices if following and following != [0]]
            if not choices:
                return
            draw.shuffle(choices)
            stacks = max(choices, key=len) if greedy else choices[0]

    def _following(self, stacks: Sequence[int], kind: int) -> Sequence[int]:
        """Return the stacks after a character. llama.cpp compares each of them with those that it has found already.

        Raises:
            TooAmbiguous: it would take too long.
        """
        after = self._stacks.after(stacks, kind)
        results = [result for _, stack in after for result in self._stacks.expand(stack)]
        following = list(dict.fromkeys(results))
        if len(results) * len(following) * _COMPARISON > MAX_TRIALS:
            raise TooAmbiguous
        return following

    def num_trials(self, stacks: Sequence[int]) -> float:
        """Return how many characters llama.cpp compares to find the tokens that the stacks allow.

        Raises:
            TooAmbiguous: there are more than MAX_TRIALS, or it compares too many stacks.
        """
        num_comparisons = self._stacks.num_comparisons(stacks)
        if num_comparisons * _COMPARISON > MAX_TRIALS:
            raise TooAmbiguous
        total = 0.0
        for first, tokens in self._tokens.items():
            after = self._stacks.after(stacks, first)
            for suffix, count in tokens.items():
                total += self._try(after, len(stacks), suffix)[1] * count * self._weight
            if total > MAX_TRIALS:
                raise TooAmbiguous
        if num_comparisons > _MANY:
            self._reject(stacks, self._suffixes, 0)
        return total

    def _reject(
        self, stacks: Sequence[int], suffixes: frozenset[_Suffix], length: int
    ) -> tuple[frozenset[_Suffix], float]:
        """Return the tokens that no stack allows, and the cost of comparing stacks to find them, in characters.

        Each stack gets those that all stacks before it reject. llama.cpp goes on after a character of every stack, even
        if no token is left.

        Args:
            suffixes: rests of the tokens.
            length: number of characters before them.

        Raises:
            TooAmbiguous: the cost exceeds MAX_TRIALS.
        """
        total = self._stacks.num_comparisons(stacks) * self._spread[length] * _SHORT_COMPARISON
        left = frozenset(filter(None, suffixes))
        for stack in stacks:
            kinds = self._stacks.kinds(stack)
            passing = frozenset(suffix for suffix in left if suffix[0] in kinds)
            if not passing:
                continue
            rests = frozenset(rest for _, rest in passing)
            after = self._stacks.next(stack)
            if (after, rests) not in self._rejected:
                self._rejected[after, rests] = self._reject(self._stacks.expand(after), rests, length + 1)
            rejected, count = self._rejected[after, rests]
            left = left - passing | {suffix for suffix in passing if suffix[1] in rejected}
            total += count
            if total > MAX_TRIALS:
                raise TooAmbiguous
        return left, total

    def _try(self, after: Sequence[tuple[int, int]], num_stacks: int, suffix: _Suffix) -> tuple[bool, float]:
        """Return whether stacks allow the rest of a token after a character, and how many characters are compared.

        Args:
            after: the stacks that allow the character, from `Stacks.after`.
            num_stacks: number of all stacks. Those before the first that allows the token reject it.
        """
        total = 0.0
        for index, stack in after:
            is_allowed, trials = self._rest(stack, suffix)
            total += trials
            if is_allowed:
                return True, total + index + 1
        return False, total + num_stacks

    def _rest(self, stack: int, suffix: _Suffix) -> tuple[bool, float]:
        if not suffix:
            return True, 1.0
        key = stack, suffix
        known = self._found.get(key)
        if known is None:
            stacks = self._stacks.expand(stack)
            kind, rest = suffix
            pair = stack, kind
            if pair not in self._after:
                self._after[pair] = self._stacks.after(stacks, kind)
            known = self._found[key] = self._try(self._after[pair], len(stacks), rest)
        return known
