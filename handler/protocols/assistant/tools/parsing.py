"""The machinery of incremental parsers of tool calls: marks, steps, a call's events."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from handler.core.text import Vocabulary
from handler.core.values import Finish
from handler.protocols.assistant.events import (
    Arguments,
    CallEnd,
    CallStart,
    Ending,
    Event,
    Parser,
    PlainText,
    Reasoning,
    pieces,
)
from handler.protocols.assistant.tools.grammar import Notation, ToolSchema
from handler.protocols.assistant.tools.json_text import ControlEscapes, JsonEnd, is_object

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser: it yields where it needs more text, and returns what it has read."""

Tool = Mapping[str, Any]
"""A tool in OpenAI's form."""

SPACES = " \t\r\n"
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
"""A tool's name."""


_OWN_ENDING = re.compile(r":[^\s:>]+(?=>\Z)")


class Format(NamedTuple):
    """A form in which models write tool calls.

    Attributes:
        make: makes the parser of one answer, with the request's tools for types.
        marks: texts that a tokenizer may have as special tokens, which it leaves out of the text by default.
        template: a regular expression that recognizes the format in a chat template; "" if none can.
        notations: text that a chat template has -> how calls are written; the first match counts.
    """

    name: str
    make: Callable[[Sequence[Tool]], Parser]
    marks: tuple[str, ...] = ()
    template: str = ""
    notations: Mapping[str, Notation] = {}

    def notation(self, template: str) -> Notation | None:
        """Return how a model with this chat template writes calls; None if unknown."""
        return next((notation for text, notation in self.notations.items() if text in template), None)

    def special(self, vocabulary: Vocabulary | None) -> frozenset[str]:
        """Return the marks that are special tokens, also with a checkpoint's own suffix (`<tool_call:x>`)."""
        if vocabulary is None:
            return frozenset()
        return _special(vocabulary.marks, self.marks)


@functools.lru_cache
def _special(special: frozenset[str], marks: tuple[str, ...]) -> frozenset[str]:
    return frozenset(mark for mark in special if _OWN_ENDING.sub("", mark) in marks)


class NamedCall:
    """Parses an answer that structured output forces to be the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._begun: list[Event] = [CallStart(0, name)]

    def feed(self, text: str) -> list[Event]:
        begun, self._begun = self._begun, []
        return [*begun, Arguments(0, text)]

    def flush(self) -> list[Event]:
        return [] if self._begun else [CallEnd(0, Ending.OPEN)]


class CallsOrText:
    """Parses an answer that structured output forces to be either calls from its beginning, or text without calls.

    Args:
        begin: the beginning of an answer of calls.
        calls: reads such an answer.
    """

    def __init__(self, begin: str, calls: Parser) -> None:
        self._begin, self._calls = begin, calls
        self._space: list[str] = []  # before anything else
        self._held = ""
        self._parser: Parser | None = None  # once it is known which of the two it is

    def feed(self, text: str) -> list[Event]:
        if self._parser is not None:
            return self._parser.feed(text)
        if not self._held:
            shown = text.lstrip()
            self._space.append(text[: len(text) - len(shown)])
            text = shown
        self._held += text
        begun = self._held[: len(self._begin)]
        if begun != self._begin and self._begin.startswith(begun):
            return []
        self._parser = self._calls if begun == self._begin else PlainText()
        return self._parser.feed("".join([*self._space, self._held]))

    def flush(self) -> list[Event]:
        if self._parser is not None:
            return self._parser.flush()
        rest = "".join([*self._space, self._held])
        return [rest] if rest else []


class Broken(Exception):
    """Raised at the end of calls: the text is not a call, or no longer one."""


class CallParser:
    """Base class of parsers of text with calls, which `calls` reads after one of the marks in `begins`.

    A subclass writes `calls` with the steps below. Until a call has begun, what the steps consume becomes text if
    `Broken` is raised or the answer ends. Once it has begun, `Broken` and the answer's end leave it unfinished.

    A model may write anything, so the work is linear in the answer. A step costs time proportional to the length of
    `held`: a whole answer is fed in pieces, and no step waits with more than a few hundred characters held. Longer
    texts are collected in lists.

    Attributes:
        begins: marks before calls, a longer one before those that it starts with.
        at_start: the answer may be calls from its first character on.
    """

    begins: tuple[str, ...] = ()
    at_start = False

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.held = ""  # what no step has taken yet
        self._taken: list[str] = []  # by steps, since the mark or the last call
        self._space: list[str] = []  # after a call, before any text
        self._after_call = False  # and no text has followed
        self.count = 0  # of calls
        self._in_call = False
        self._committed = False
        self._closable = False  # the arguments say all that came: only what closes them lacks
        self._events: list[Event] = []
        self._written: list[str] = []  # after the last event
        self._schemas: dict[str, ToolSchema] = {}
        self._steps: Steps[None] | None = None  # once text has come: a parser without any can be copied

    def feed(self, text: str) -> list[Event]:
        for piece in pieces(text):
            self.held += piece
            if self._steps is None:
                self._steps = self._run()
            next(self._steps)
        return self._pop()

    def flush(self) -> list[Event]:
        if self._steps is not None:
            self._steps.close()
            if not (self._after_call and self._begins_call(self.taken + self.held)):
                self._end_block(self.held)
            self.end_call(Ending.OPEN if self._closable and not self.held.strip() else Ending.BROKEN)
            self.held = ""
        return self._pop()

    def calls(self, begin: str) -> Steps[None]:
        """Read the calls after `begin`, "" at the answer's start; return where text follows.

        Raises:
            Broken: it is no call.
        """
        raise NotImplementedError

    @property
    def taken(self) -> str:
        """Return what the steps have consumed since the mark or the last call, while no call has begun."""
        return "".join(self._taken)

    def schema(self, tool: str) -> ToolSchema:
        """Return the schema of a tool's arguments."""
        if tool not in self._schemas:
            self._schemas[tool] = ToolSchema(self.tools.get(tool, {}).get("parameters"))
        return self._schemas[tool]

    # -- events ------------------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Begin a call: nothing of it can become text any more."""
        self._add(CallStart(self.count, name))
        self.count += 1
        self._space, self._after_call, self._in_call = [], True, True
        self.commit()

    def write(self, text: str) -> None:
        """Add to the JSON text of the call's arguments."""
        if text:
            self._written.append(text)

    def end_call(self, ending: Ending = Ending.WHOLE) -> None:
        if self._in_call:
            self._add(CallEnd(self.count - 1, ending))
        self._in_call = self._committed = False

    def drop(self) -> None:
        """Discard what has been consumed so far: it is markup of the calls before it."""
        self._taken = []

    def commit(self) -> None:
        """Discard what has been consumed so far, and the rest of the call."""
        self._taken, self._committed = [], True

    def show(self, text: str) -> None:
        """Emit text; white space after a call is emitted only before other text."""
        if self._after_call and not text.strip():
            self._space.append(text)
        elif text:
            if self._after_call:
                text = "".join([*self._space, text])
                self._space, self._after_call = [], False
            self._add(text)

    def _add(self, event: Event) -> None:
        if self._written:
            self._end_arguments()
        self._events.append(event)

    def _end_arguments(self) -> None:
        self._events.append(Arguments(self.count - 1, "".join(self._written)))
        self._written = []

    # -- steps -------------------------------------------------------------------------------------------------------

    def advance(self, size: int) -> str:
        """Consume so many characters."""
        text, self.held = self.held[:size], self.held[size:]
        if text and not self._committed:
            self._taken.append(text)
        return text

    def skip(self, signs: str = SPACES) -> Steps[str]:
        """Consume these characters, and return the first other one."""
        while True:
            rest = self.held.lstrip(signs)
            self.advance(len(self.held) - len(rest))
            if rest:
                return rest[0]
            yield

    def take(self, *marks: str) -> Steps[str]:
        """Consume and return the mark that comes next, "" if it is not one of these. A longer one precedes those that
        it starts with.
        """
        while True:
            for mark in marks:
                if self.held.startswith(mark):
                    return self.advance(len(mark))
                if mark.startswith(self.held):
                    break
            else:
                return ""
            yield

    def expect(self, *marks: str) -> Steps[str]:
        """Consume one of the marks.

        Raises:
            Broken: another text comes.
        """
        mark = yield from self.take(*marks)
        if not mark:
            raise Broken
        return mark

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume the text that matches, up to a character that does not. Broken if nothing matches, or too much."""
        while True:
            match = pattern.match(self.held)
            size = match.end() if match else 0
            if size < len(self.held):
                if not size:
                    raise Broken
                return self.advance(size)
            yield

    def until(self, *ends: str, limit: int = 512) -> Steps[tuple[str, str]]:
        """Consume a short text and the mark at its end, and return both. Broken if no mark comes within the limit."""
        pattern, most = any_of(ends), limit + max(map(len, ends))
        while True:
            match = pattern.search(self.held, 0, most)
            if match and match.start() <= limit:
                text = self.advance(match.start())
                return text, self.advance(len(match[0]))
            if match or len(self.held) > most:
                raise Broken
            yield

    def stream_until(self, write: Callable[[str], None], *ends: str) -> Steps[str]:
        """Pass on text as it arrives, up to a mark, which is consumed and returned."""
        pattern = any_of(ends)
        while True:
            match = pattern.search(self.held)
            if match:
                write(self.advance(match.start()))
                return self.advance(len(match[0]))
            write(self.advance(len(self.held) - partial_mark(self.held, ends)))
            yield from self._open()

    def json(self) -> Steps[None]:
        """Write a JSON object or list as the call's arguments, as it arrives."""
        end = JsonEnd(stop="<")
        while True:
            size = end.feed(self.held)
            self.write(self.advance(len(self.held) if size is None else size))
            if size is not None:
                return
            yield from self._open()

    def _open(self) -> Steps[None]:
        """Wait for more of an open value."""
        self._closable = True
        yield
        self._closable = False

    def whole(self) -> Steps[str]:
        """Consume the JSON object or list that comes next, and return it."""
        end, parts = JsonEnd(), list[str]()
        while True:
            size = end.feed(self.held)
            parts.append(self.advance(len(self.held) if size is None else size))
            if size is not None:
                return "".join(parts)
            yield

    # -- text --------------------------------------------------------------------------------------------------------

    def _run(self) -> Steps[None]:
        if self.at_start:
            yield from self._block("")
        while True:
            begin = yield from self._text()
            yield from self._block(begin)

    def _text(self) -> Steps[str]:
        """Emit text up to a mark that opens calls."""
        pattern, first = any_of(self.begins), any_of(tuple(dict.fromkeys(mark[0] for mark in self.begins)))
        while True:
            size = len(self.held)
            if first.search(self.held):  # hardly ever
                match = pattern.search(self.held)
                if match:
                    self.show(self.held[: match.start()])
                    self.held = self.held[match.end() :]
                    return match[0]
                size -= partial_mark(self.held, self.begins)
            self.show(self.held[:size])
            self.held = self.held[size:]
            yield

    def _block(self, begin: str) -> Steps[None]:
        self._taken = [begin]
        try:
            yield from self.calls(begin)
        except Broken:
            self._end_block()
            self.end_call(Ending.BROKEN)
        self.drop()
        self.end_call()

    def _end_block(self, rest: str = "") -> None:
        if not self._committed:
            self.show("".join([*self._taken, rest]))

    def _begins_call(self, text: str) -> bool:
        """Return whether an answer with this end was cut off within the mark of another call."""
        start = text.strip()
        return len(start) > 1 and any(mark.startswith(start) for mark in self.begins)

    def _pop(self) -> list[Event]:
        if self._written:
            self._end_arguments()
        events, self._events = self._events, []
        return events


@functools.lru_cache(maxsize=256)
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of any of the marks; without marks, a pattern that never matches."""
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def partial_mark(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may grow into one of the marks."""
    longest = 0
    for mark in marks:
        if mark[0] in text[1 - len(mark) :]:
            sizes = range(min(len(mark) - 1, len(text)), longest, -1)
            longest = next((size for size in sizes if mark.startswith(text[-size:])), longest)
    return longest


# -- a call's arguments as they come: made JSON where that is plain, and whether they are whole ------------------------


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
        """Return the text that closes open strings, lists and objects; None if something else might come first."""
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
    """A call that has begun; the client gets it with the first character of its arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments = ArgumentsText()
        self.number: int | None = None


class CheckedCalls:
    """The calls in one answer's events. Their ends are verified. A call that ends before its arguments is turned back
    into text, its name: clients would take missing arguments for `{}`.

    Args:
        allowed: names of the tools that may be called; a call of another one is turned back into a line of text, its
            name and its arguments. None: any.
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
            finish: why the answer ended. Brackets that the model itself left open are closed if that is unambiguous.
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


# -- calls by the model's own response template, which response_template/ reads with the rest of the answer ------------


class TemplateCalls(PlainText):
    """Placeholder for a parser of calls; by itself it leaves them in the text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools


HF = Format("hf", TemplateCalls)
