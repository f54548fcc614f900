"""Abridges regular expressions: one character may stand for each part that can be long, and a trial gets past it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
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


# -- follow a matcher through answers, and refuse one whose steps take too long ----------------------------------------
# A matcher finds the allowed tokens of each step, while all requests of the engine wait. Some do most of their work
# only then. So a check draws tokens as a model might, and measures CPU time.

STEP_SECONDS = 0.01
"""CPU time of a step, averaged over a few, or ten times as much once. Ordinary texts took up to 0.0003, once 0.01; an
ambiguous grammar takes seconds after ten or twenty tokens."""

_WINDOW = 8  # tokens of the average
_STEPS = 64  # tokens with many alternatives, unless they become slower; those with few, as in a literal, cost little
_MOST_STEPS = 200  # the same, also of an abridged grammar
_FORCED_STEPS = 512
_FEW = 64
_WALK_SECONDS = 0.5
_ANSWER = 2000  # tokens, by which steps that become slower and slower must not have become too slow
_ABRIDGED = 3  # times as much may a step of an abridged grammar take: it is more ambiguous than its original
_SHARES = (0.5, 0.9)  # of an abridged grammar's steps, those that take the marker where it is allowed


class Walker:
    """Walks through answers.

    Args:
        vocabulary: each token's text, with its id.
        size: ids that a mask has.
        mask: a torch tensor of one row, into which matchers write a bit for each id.
        fill: writes the tokens that a matcher allows now into the mask.
        accept: moves a matcher on by a token; False where the answer ends.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        size: int,
        mask: Any,
        fill: Callable[[Any, Any], object],
        accept: Callable[[Any, int], bool],
    ) -> None:
        import numpy as np

        self._mask, self._fill, self._accept = mask, fill, accept
        self._lengths = np.zeros(size, np.int32)
        for token, id in vocabulary.items():
            if id < size:
                self._lengths[id] = len(token)
        self._marker = vocabulary.get(MARKER)

    def start(self, make: Callable[[], Any]) -> None:
        """Walk through a text's first tokens: random ones, then long ones.

        Args:
            make: returns a matcher in its first state.

        Raises:
            ValueError: the steps take too long.
        """
        for longest in (False, True):
            self._walk(make(), longest=longest)

    def abridged(self, make: Callable[[], Any]) -> None:
        """Walk through an abridged grammar, past its long parts and through them; see `start`."""
        for share in _SHARES:
            self._walk(make(), marked=share, steps=_MOST_STEPS)

    def _walk(self, matcher: Any, *, longest: bool = False, marked: float = 0.0, steps: int = _STEPS) -> None:
        """Make the masks of an answer's first tokens.

        Args:
            longest: choose the longest of many allowed tokens, else a random one.
            marked: the share of steps that take the marker where it is allowed.
            steps: tokens with many alternatives; more where they become slower.
        """
        import numpy as np

        limit = STEP_SECONDS * (_ABRIDGED if marked else 1)
        draw, times = np.random.default_rng(0), list[float]()
        began, free, forced = time.process_time(), 0, 0
        while free < _MOST_STEPS and forced < _FORCED_STEPS and time.process_time() - began < _WALK_SECONDS:
            before = time.process_time()
            self._fill(matcher, self._mask)
            spent = time.process_time() - before
            bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(self._lengths)])
            if not len(allowed):
                return
            if free == steps and forecast(times, _ANSWER) < 5 * STEP_SECONDS:
                return
            few = len(allowed) <= _FEW
            forced, free = forced + few, free + (not few)
            if self._marker is not None and marked and bits[self._marker] and draw.random() < marked:
                id = self._marker
            elif few or longest:
                id = allowed[self._lengths[allowed].argmax()]
            else:
                id = draw.choice(allowed)
            before = time.process_time()
            goes_on = self._accept(matcher, int(id))
            times.append(spent + time.process_time() - before)
            if times[-1] > 10 * limit or sum(times[-_WINDOW:]) > _WINDOW * limit:
                raise ValueError(f"each token takes the engine more than {limit:g} s")
            if not goes_on:
                return
        if free == _MOST_STEPS and forecast(times, _ANSWER) > 5 * STEP_SECONDS:
            raise ValueError(f"after {_ANSWER} tokens, each takes the engine more than {5 * STEP_SECONDS:g} s")


def forecast(seconds: Sequence[float], number: int) -> float:
    """Continue a line through the middles of a walk's second and last quarter to step `number`."""
    quarter = len(seconds) // 4
    early, late = median(seconds[quarter : 2 * quarter]), median(seconds[-quarter:])
    return late + (late - early) / (2 * quarter) * (number - len(seconds))
