"""An incremental parser of tool calls in an answer's text; what turns out to be no call stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from handler.protocols.assistant.events import Arguments, CallStart, Event


class NamedCall:
    """The parser of an answer that structured output makes the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._begun: list[Event] = [CallStart(0, name)]

    def feed(self, text: str) -> list[Event]:
        begun, self._begun = self._begun, []
        return [*begun, Arguments(0, text)]

    def flush(self) -> list[Event]:
        return []


class JsonEnd:
    """Find the end of a JSON object or list that comes in events; `depth` is how many are open already."""

    _SIGNS = re.compile(r'["\\{}\[\]]')

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return the index after the end; None while it has not come."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = self._SIGNS.search(text, at)
            if match is None:
                return None
            sign, at = match[0], match.end()
            if sign == '"':
                self._quoted = not self._quoted
            elif sign == "\\":
                self._escaped = self._quoted
            elif not self._quoted:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return at
        return None


_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OPEN = re.compile(r'\{\s*(?:"name"\s*:\s*"(?:[^"\\]|\\.)*\\?)?')
"""The start of a call, up to an unfinished name."""

_LONGEST_HEAD = 512
"""The longest head of a call, in characters: names have at most 64, each perhaps written as an escape."""

_BETWEEN = " \t\r\n,;[]"  # what stands between calls: one format has them in a list


class CallParser:
    """Calls as objects with `name` and `arguments`, between marks.

    Arguments stream where the name precedes them; another call comes whole. With `inside` the answer may be calls
    from its first character on. Text that is no call after all is returned as it was, marks included.
    """

    def __init__(self, begin: str = "", end: str = "", *, inside: bool = False) -> None:
        self._begin, self._end = begin, end
        self._held = ""
        self._raw = ""  # what was read of a block in which no call has begun
        self._space = ""  # after a call: shown only if text follows
        self._count = 0
        self._scanner = JsonEnd()
        self._scanned = 0
        self._read: Callable[[list[Event]], bool] = self._calls if inside else self._text

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held and self._read(events):
            pass
        return events

    def flush(self) -> list[Event]:
        events: list[Event] = []
        if self._read in (self._text, self._calls, self._object):
            rest, self._raw, self._held = self._raw + self._held, "", ""
            self._show(rest, events)
        return events

    def _show(self, text: str, events: list[Event]) -> None:
        if self._count and not text.strip():
            self._space += text
        elif text:
            text, self._space = self._space + text, ""
            events.append(text)

    # -- states: each takes of `_held` what it can; false when it needs more -------------------------------------

    def _text(self, events: list[Event]) -> bool:
        before, begin, after = self._held.partition(self._begin) if self._begin else (self._held, "", "")
        if begin:
            self._show(before, events)
            self._raw, self._held, self._read = begin, after, self._calls
            return True
        keep = _partial(self._held, self._begin)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._show(text, events)
        return False

    def _calls(self, events: list[Event]) -> bool:
        """Parse between two calls, before the first, or after the last."""
        rest = self._held.lstrip(_BETWEEN)
        if self._raw or not self._count:
            self._raw += self._held[: len(self._held) - len(rest)]
        self._held = rest
        if not rest:
            return False
        if self._end and rest.startswith(self._end):
            self._held, self._raw, self._read = rest[len(self._end) :], "", self._text
            return True
        if rest[0] == "{":
            self._scanner, self._scanned, self._read = JsonEnd(), 0, self._object
            return True
        if self._end.startswith(rest) and self._end:
            return False
        return self._give_up(events)

    def _object(self, events: list[Event]) -> bool:
        """Parse a call whose name is not known yet."""
        head = _HEAD.match(self._held, 0, _LONGEST_HEAD) if self._scanned < _LONGEST_HEAD else None
        if head:
            try:
                name = json.loads(head[1])
            except ValueError:
                return self._give_up(events)
            self._begun(name, events)
            self._held = self._held[head.end() :]
            self._scanner, self._read = JsonEnd(), self._arguments
            return True
        if self._scanned <= _LONGEST_HEAD < len(self._held) and _OPEN.fullmatch(self._held, 0, _LONGEST_HEAD):
            return self._give_up(events)
        end = self._scanner.feed(self._held[self._scanned :])
        if end is None:
            self._scanned = len(self._held)
            return False
        end += self._scanned
        call = _call(self._held[:end])
        if call is None:  # nor is anything in it: to look would be to read nested ones again and again
            self._raw, self._held = self._raw + self._held[:end], self._held[end:]
            return self._give_up(events)
        self._begun(call[0], events)
        events.append(Arguments(self._count - 1, call[1]))
        self._held, self._read = self._held[end:], self._calls
        return True

    def _begun(self, name: str, events: list[Event]) -> None:
        events.append(CallStart(self._count, name))
        self._count += 1
        self._raw = ""

    def _arguments(self, events: list[Event]) -> bool:
        end = self._scanner.feed(self._held)
        text, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        events.append(Arguments(self._count - 1, text))
        if end is not None:
            self._scanner, self._read = JsonEnd(depth=1), self._tail
        return True

    def _tail(self, events: list[Event]) -> bool:
        """Parse from a call's arguments to its end."""
        end = self._scanner.feed(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._read = self._calls
        return True

    def _give_up(self, events: list[Event]) -> bool:
        """Return a failed call as text, in which others may follow."""
        self._show(self._raw, events)
        self._raw, self._read = "", self._text
        return True


def _partial(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that may grow into `mark`."""
    if mark[:1] not in text:
        return 0
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


def _call(text: str) -> tuple[str, str] | None:
    """Return a whole call's name and arguments, in any order; None when it is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
