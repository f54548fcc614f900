"""A call's arguments as they come: made JSON where that is plain, and whether they are whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from handler.core.values import Finish
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Ending, Event, Reasoning
from handler.protocols.assistant.tools.json_text import ControlEscapes, is_object

_BESIDE_CALLS = (str, Reasoning)

_BRACKETS = re.compile(r'"|\\.|[{}\[\]]', re.DOTALL)
_ENDS = {"{": "}", "[": "]"}
_NUMBER = re.compile(r"[0-9]\Z")
"""The end of a number, of which more digits might come."""


class ArgumentsText:
    """The JSON text of one call's arguments."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._controls = ControlEscapes()

    def feed(self, text: str) -> str:
        """Return the text as the client gets it: with the control characters in its strings escaped."""
        self._parts.append(self._controls.feed(text))
        return self._parts[-1]

    def closing(self) -> str | None:
        """Return the end of what is open, a string, lists and objects; None where something else might come first."""
        text = self._join()
        if not self._controls.quoted and _NUMBER.search(text):
            return None
        ends, quoted = [], False
        for match in _BRACKETS.finditer(text):
            sign = match[0]
            if sign == '"':
                quoted = not quoted
            elif not quoted and sign in "{[":
                ends.append(_ENDS[sign])
            elif not quoted and sign in "}]" and (not ends or ends.pop() != sign):
                return None
        rest = '"' * quoted + "".join(reversed(ends)) if text else "{}"
        return rest if is_object(text + rest) else None

    def is_whole(self) -> bool:
        """Return whether the text is a JSON object."""
        return is_object(self._join())

    def _join(self) -> str:
        self._parts = ["".join(self._parts)]
        return self._parts[0]


class _Call:
    """A call that has begun. The client sees it with the first character of its arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments = ArgumentsText()
        self.number: int | None = None


class CheckedCalls:
    """The calls in one answer's events. What it says about their ends is true.

    A call that breaks off before its arguments is given back as text, its name: clients take no arguments for `{}`.

    Args:
        allowed: names of the tools that may be called; a call of another one is given back as a line of text, its name
            and its arguments. None: any.
    """

    def __init__(self, allowed: Collection[str] | None = None) -> None:
        self._allowed = allowed
        self._refused: dict[int, str] = {}  # a refused call's number -> what comes before its next arguments
        self._line = ""  # what comes before the next refused call's name
        self._open: dict[int, _Call] = {}
        self._count = 0

    def read(self, events: list[Event]) -> list[Event]:
        """Return the events; each call that ends among them is whole or broken."""
        if len(events) == 1 and type(events[0]) in _BESIDE_CALLS:  # nearly always
            return events
        found: list[Event] = []
        for event in events:
            if isinstance(event, Arguments) and (call := self._open.get(event.number)) and call.number is not None:
                found.append(Arguments(call.number, call.arguments.feed(event.text)))  # nearly all
            else:
                found += self._check(event)
        return found

    def end(self, events: Iterable[Event], finish: Finish) -> list[Event]:
        """Return the answer's last events, with the ends of all calls.

        Args:
            finish: why the answer ended. What the model itself left open is closed where that is plain.
        """
        found = [event for one in events for event in self._check(one, closes=finish is Finish.EOS)]
        left: list[Event] = [CallEnd(number, Ending.BROKEN) for number in self._open]
        return [*found, *self.read(left)]

    def _check(self, event: Event, *, closes: bool = False) -> Iterator[Event]:
        if isinstance(event, _BESIDE_CALLS):
            yield event
        elif isinstance(event, CallStart):
            if self._allowed is None or event.name in self._allowed:
                self._open[event.number] = _Call(event.name)
            else:
                self._refused[event.number] = " "
                yield self._line + event.name
                self._line = "\n"
        elif event.number in self._refused:
            yield from self._give_back(event)
        elif (call := self._open.get(event.number)) is None:
            pass  # a user's parser may write more after the end
        elif isinstance(event, Arguments):
            yield from self._write(call, event.text)
        else:
            del self._open[event.number]
            yield from self._end(call, event, closes=closes)

    def _give_back(self, event: Arguments | CallEnd) -> Iterator[Event]:
        if isinstance(event, CallEnd):
            del self._refused[event.number]
        elif event.text:
            yield self._refused[event.number] + event.text
            self._refused[event.number] = ""

    def _write(self, call: _Call, text: str) -> Iterator[Event]:
        if text and call.number is None:
            call.number, self._count = self._count, self._count + 1
            yield CallStart(call.number, call.name)
        if text and call.number is not None:
            yield Arguments(call.number, call.arguments.feed(text))

    def _end(self, call: _Call, end: CallEnd, *, closes: bool) -> Iterator[Event]:
        if (closes and end.ending is Ending.OPEN) or (end.whole and call.number is None):
            yield from self._write(call, call.arguments.closing() or "")
        if call.number is None:
            yield call.name
        else:
            yield CallEnd(call.number, Ending.WHOLE if call.arguments.is_whole() else Ending.BROKEN)
