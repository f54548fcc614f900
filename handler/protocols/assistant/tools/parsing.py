"""The base classes of incremental parsers of tool calls."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from handler.core.text import Vocabulary, partial_mark
from handler.core.values import Finish
from handler.protocols.assistant.events import (
    Arguments,
    CallEnd,
    CallStart,
    Ending,
    Event,
    EventParser,
    PlainText,
    Reasoning,
    pieces,
)
from handler.protocols.assistant.tools.grammar import Notation, ToolSchema
from handler.protocols.assistant.tools.json_text import ControlEscapes, JsonEnd, dumps, is_object

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that is part of a parser. It yields when it needs more text, and returns its result."""

Tool = Mapping[str, Any]
"""A tool in OpenAI's format."""

SPACES = " \t\r\n"
MAX_NAME = 256
"""Maximum characters of a tool's name. Anthropic allows 128, OpenAI 64 in a namespace of 64, and vLLM any number."""

NAME = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME}}}")
"""The pattern of tool names."""

_NO_ARGUMENTS = re.compile(r"\s*(?:\{\s*(?:\}\s*)?)?")
"""Matches the JSON of arguments, or its beginning, while it contains no argument."""

_WITHIN_JSON = re.compile(r"[\w\",:]")

_LONGEST_OPENING = 512  # characters

_MARKS = (
    *("section_end", "block_end", "call", "call_end", "end", "parameter", "parameter_end"),
    *("key", "key_end", "value", "value_end", "separator", "quote", "arguments_end"),
)
"""The attributes of parsers that are markers, besides `begins`, `between` and `within`."""


_CHECKPOINT_SUFFIX = re.compile(r":[^\s:>]+(?=>\Z)")


class Format(NamedTuple):
    """A format in which models write tool calls.

    Attributes:
        make: creates the parser of one response from the tools of the request, whose schemas define argument types.
        marks: strings that may be special tokens, which a tokenizer omits from the text by default.
        template: a regular expression that recognizes the format in a chat template, or "" if there is none.
        notations: maps a string in chat templates to the notation of calls. The first notation whose string is in the
            model's template is used.
    """

    name: str
    make: Callable[[Sequence[Tool]], EventParser]
    marks: tuple[str, ...] = ()
    template: str = ""
    notations: Mapping[str, Notation] = {}

    def notation(self, template: str) -> Notation | None:
        """Return the notation in which a model with this chat template writes tool calls, or None if it is unknown."""
        return next((notation for text, notation in self.notations.items() if text in template), None)

    def special(self, vocabulary: Vocabulary) -> frozenset[str]:
        """Return the markers that are special tokens, possibly with a checkpoint's own suffix (`<tool_call:x>`)."""
        return _special(vocabulary.marks, self.marks)


@functools.lru_cache
def _special(special: frozenset[str], marks: tuple[str, ...]) -> frozenset[str]:
    return frozenset(mark for mark in special if _CHECKPOINT_SUFFIX.sub("", mark) in marks)


class NamedCall:
    """Parses a response that structured output constrains to the arguments of a single tool call."""

    def __init__(self, name: str) -> None:
        self._begun: list[Event] = [CallStart(0, name)]

    def feed(self, text: str) -> list[Event]:
        begun, self._begun = self._begun, []
        return [*begun, Arguments(0, text)]

    def flush(self) -> list[Event]:
        return [] if self._begun else [CallEnd(0, Ending.OPEN)]


class CallsOrText:
    """Parses a response that structured output constrains to either tool calls or text without calls.

    Args:
        begin: the text at the start of a response that consists of calls.
        calls: the parser of a response that consists of calls.
    """

    def __init__(self, begin: str, calls: EventParser) -> None:
        self._begin, self._calls = begin, calls
        self._space: list[str] = []  # whitespace at the beginning
        self._held = ""
        self._parser: EventParser | None = None  # None until the beginning decides

    def feed(self, text: str) -> list[Event]:
        if self._parser is not None:
            return self._parser.feed(text)
        if not self._held:
            stripped = text.lstrip()
            self._space.append(text[: len(text) - len(stripped)])
            text = stripped
        self._held += text
        begun = self._held[: len(self._begin)]
        if begun != self._begin and self._begin.startswith(begun):
            return []
        self._parser = self._calls if begun == self._begin else PlainText()
        return self._parser.feed("".join([*self._space, self._held]))

    def flush(self) -> list[Event]:
        if self._parser is not None:
            return self._parser.flush()
        remainder = "".join([*self._space, self._held])
        return [remainder] if remainder else []


class BrokenCall(Exception):
    """Raised by the steps of a parser if the text is not a tool call, or stops being a valid call."""


class CallOutput:
    """The events of a response with tool calls.

    Attributes:
        count: the number of calls so far.
        after_call: whether a call has started, and no text has followed it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.after_call = False
        self._in_call = False
        self._space: list[str] = []  # whitespace after a call, before any text
        self._events: list[Event] = []
        self._written: list[str] = []  # arguments after the last event

    def begin(self, name: str) -> None:
        """Start a tool call."""
        self._add(CallStart(self.count, name))
        self.count += 1
        self._space, self.after_call, self._in_call = [], True, True

    def write(self, text: str) -> None:
        """Append text to the JSON of the arguments."""
        if text:
            self._written.append(text)

    def end_call(self, ending: Ending = Ending.WHOLE) -> None:
        if self._in_call:
            self._add(CallEnd(self.count - 1, ending))
        self._in_call = False

    def show(self, text: str) -> None:
        """Emit text. Whitespace after a tool call is emitted only if other text follows."""
        if self.after_call and not text.strip():
            self._space.append(text)
        elif text:
            if self.after_call:
                text = "".join([*self._space, text])
                self._space, self.after_call = [], False
            self._add(text)

    def pop(self) -> list[Event]:
        """Return the events since `pop` was last called."""
        if self._written:
            self._end_arguments()
        events, self._events = self._events, []
        return events

    def _add(self, event: Event) -> None:
        if self._written:
            self._end_arguments()
        self._events.append(event)

    def _end_arguments(self) -> None:
        self._events.append(Arguments(self.count - 1, "".join(self._written)))
        self._written = []


class CallParser(CallOutput):
    """Base class of parsers for text with tool calls.

    A subclass implements `calls` with the steps below. A step that finds text which is neither an argument nor a marker
    raises `BrokenCall`. Then all of the call is emitted as text, also if a part of its arguments has already been
    emitted. If the response ends within a call, its text that is in no argument is emitted. So nothing is lost.

    A call is emitted with its first argument. A call without arguments is emitted only when all of it has been read.

    A model may write anything, so the work must be linear in the length of the response. A step takes time proportional
    to the length of `held`. Therefore a long text is fed in pieces, no step waits while more than a few hundred
    characters are held, and longer texts are collected in lists.

    Attributes:
        begins: the markers before calls. Each marker precedes any other marker that is a prefix of it.
        within: other markers within or after a call.
        at_start: whether a response may begin with calls without a marker.
    """

    begins: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    at_start = False

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__()
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.held = ""  # text that no step has consumed yet
        self._taken: list[str] = []  # text that steps have consumed since the marker or the last call
        self._num_written = 0  # the pieces of it whose meaning is in the arguments
        self._unsent = ""  # the name of a call that has been read up to its first argument
        self._opening = ""  # the JSON of this call, which has no argument yet
        self._keys: set[str] = set()  # names of the call's arguments
        self._beside: list[str] = []  # text within the call that is no argument
        self._captures: list[list[str]] = []  # JSON that is not written yet, the innermost last
        self._closable = False  # whether only closing brackets and quotes are missing in the arguments
        self._schemas: dict[str, ToolSchema] = {}
        self._steps: Steps[None] | None = None  # None until text arrives, so that a new parser can be copied

    def feed(self, text: str) -> list[Event]:
        for piece in pieces(text):
            self.held += piece
            if self._steps is None:
                self._steps = self._run()
            next(self._steps)
        return self.pop()

    def flush(self) -> list[Event]:
        if self._steps is not None:
            self._steps.close()
            self._end_response()
            self.held = ""
        return self.pop()

    def _end_response(self) -> None:
        text = "".join([*self._taken[self._num_written :], self.held])
        is_open = self._closable and not text.strip()
        is_whole = is_open and not self._beside
        if self._unsent and is_whole and "}" not in self._opening:
            super().begin(self._unsent)
            self._add(CallEnd(self.count - 1, Ending.OPEN, self.taken))
            return
        if self._unsent and not is_whole:  # all of it is text
            text, self._beside, is_open = self.taken + self.held, [], False
        self.end_call(Ending.OPEN if is_open else Ending.BROKEN)
        if not (is_open or (self.after_call and self._is_markup(text))):
            self.show(text)

    def calls(self, begin: str) -> Steps[None]:
        """Read the tool calls after a marker, up to the text that follows them.

        Args:
            begin: the marker, or "" at the start of the response.

        Raises:
            BrokenCall: the text is not a call.
        """
        raise NotImplementedError

    @property
    def taken(self) -> str:
        """The text that has been consumed since the marker or the last tool call."""
        return "".join(self._taken)

    def schema(self, tool: str) -> ToolSchema:
        """Return the schema of a tool's arguments."""
        return self._schemas.setdefault(tool, ToolSchema(self.tools.get(tool, {}).get("parameters")))

    # -- events ------------------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Start a tool call. It may become text until its first argument is written."""
        self._unsent, self._opening, self._keys, self._captures = name, "", set(), []
        self.accept()

    def accept(self) -> None:
        """Treat all of the consumed text as part of the arguments, unless they are captured."""
        if not self._captures:
            self._num_written = len(self._taken)

    def write(self, text: str) -> None:
        """Append text to the JSON of the arguments, in which everything consumed so far is written."""
        if self._captures:
            self._captures[-1].append(text)
            return
        if not text:
            return
        self.accept()
        if self._unsent:
            self._opening += text
            if _NO_ARGUMENTS.fullmatch(self._opening, 0, _LONGEST_OPENING):
                return
            self.send()
        else:
            super().write(text)

    def captured(self, steps: Steps[None]) -> Steps[str]:
        """Run steps, and return the JSON that they write, which is not appended to the arguments."""
        self._captures.append([])
        others = [*self._beside]
        try:
            yield from steps
        except GeneratorExit:  # the response ends here, and all that was captured is text
            self._beside = others
            raise
        return "".join(self._captures.pop())

    def write_key(self, key: str) -> None:
        """Write the name of an argument.

        Raises:
            BrokenCall: the call already has an argument with this name.
        """
        if key in self._keys:
            self.write("}")
            raise BrokenCall
        self.write(f"{', ' if self._keys else '{'}{dumps(key)}: ")
        self._keys.add(key)

    def send(self) -> None:
        """Emit the start of a tool call."""
        super().begin(self._unsent)
        self._unsent = ""
        super().write(self._opening)

    def end_call(self, ending: Ending = Ending.WHOLE) -> None:
        """End a tool call, and then emit the text within it that is no argument.

        Raises:
            BrokenCall: the call has such text, but no argument.
        """
        if self._unsent and ending is not Ending.BROKEN:
            if self._beside:
                raise BrokenCall
            self.send()
        self._unsent = ""
        super().end_call(ending)
        self.drop()
        others, self._beside = self._beside, []
        self.show("".join(others))

    def drop(self) -> None:
        """Discard the consumed text, which is markup of the previous tool calls."""
        self._taken, self._num_written = [], 0

    def show_taken(self, text: str) -> None:
        """Emit the consumed text, which is no part of a tool call. `text` is its end."""
        if text:
            taken = self.taken
            self.drop()
            self.show(taken)

    # -- steps -------------------------------------------------------------------------------------------------------

    def advance(self, size: int) -> str:
        """Consume and return the next `size` characters."""
        text, self.held = self.held[:size], self.held[size:]
        if text:
            self._taken.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Return the text that has been consumed last, so that it is read again."""
        self.held = text + self.held
        self.forget(len(text))

    def forget(self, size: int) -> None:
        """Treat the last `size` characters as not consumed."""
        while size > 0 and self._taken:
            piece = self._taken.pop()
            if size < len(piece):
                self._taken.append(piece[:-size])
            size -= len(piece)
        self._num_written = min(self._num_written, len(self._taken))

    def skip(self, signs: str = SPACES) -> Steps[str]:
        """Consume these characters, and return the first other character without consuming it."""
        while True:
            remainder = self.held.lstrip(signs)
            self.advance(len(self.held) - len(remainder))
            if remainder:
                return remainder[0]
            yield

    def take(self, *marks: str) -> Steps[str]:
        """Consume and return the marker that follows, or return "" if none of these markers follows.

        Args:
            marks: the markers. Each marker precedes any other marker that is a prefix of it.
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
        """Consume and return the marker that follows.

        Raises:
            BrokenCall: none of the markers follows.
        """
        marker = yield from self.take(*marks)
        if not marker:
            raise BrokenCall
        return marker

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume and return the text that matches a pattern, once the next character shows where the match ends.

        Raises:
            BrokenCall: no text matches.
        """
        while True:
            match = pattern.match(self.held)
            size = match.end() if match else 0
            if size < len(self.held):
                if not size:
                    raise BrokenCall
                return self.advance(size)
            yield

    def until(self, *ends: str, limit: int = 512) -> Steps[tuple[str, str]]:
        """Consume a short text and the marker after it, and return both.

        Raises:
            BrokenCall: the text has more than `limit` characters.
        """
        pattern, most = any_of(ends), limit + max(map(len, ends))
        while True:
            match = pattern.search(self.held, 0, most)
            if match and match.start() <= limit:
                text = self.advance(match.start())
                return text, self.advance(len(match[0]))
            if match or len(self.held) > most:
                raise BrokenCall
            yield

    def stream_until(self, write: Callable[[str], None], *ends: str) -> Steps[str]:
        """Pass text to `write` as it arrives, up to a marker, which is consumed and returned."""
        pattern = any_of(ends)
        while True:
            match = pattern.search(self.held)
            if match:
                write(self.advance(match.start()))
                return self.advance(len(match[0]))
            write(self.advance(len(self.held) - partial_mark(self.held, ends)))
            yield from self._open()

    def beside(self, *ends: str) -> Steps[str]:
        """Consume text that is emitted after the call, up to a marker, which is consumed and returned."""
        parts: list[str] = []
        end = yield from self.stream_until(parts.append, *ends)
        self.put_beside("".join(parts).strip())
        return end

    def put_beside(self, text: str) -> None:
        """Emit text after the call, in which everything consumed so far is written."""
        if text:
            self._beside.append(text)
            self.accept()

    def ahead(self, signs: str = SPACES) -> Steps[str]:
        """Consume these characters after which the call may end, and return the next one without consuming it."""
        self._closable = True
        sign = yield from self.skip(signs)
        self._closable = False
        return sign

    def rest(self, *marks: str) -> Steps[str]:
        """Consume whitespace and the marker after the arguments so far, and return the marker.

        Raises:
            BrokenCall: something else follows.
        """
        yield from self.ahead()
        return (yield from self.expect(*marks))

    def json(self) -> Steps[None]:
        """Emit the JSON object or list that follows as the arguments of the tool call, as it arrives."""
        end = JsonEnd(stop="<")
        while True:
            size = end.feed(self.held)
            self.write(self.advance(len(self.held) if size is None else size))
            if size is not None:
                return
            yield from self._open()

    def call_with_json(self, name: str, *ends: str) -> Steps[None]:
        """Read a tool call whose arguments follow as a JSON object.

        Args:
            ends: the markers after a call. If one of them follows instead, the call has no arguments.

        Raises:
            BrokenCall: something else follows.
        """
        self.begin(name)
        if (yield from self.skip()) == "{":
            yield from self.json()
            if self._unsent and _WITHIN_JSON.match((yield from self.ahead(""))):
                raise BrokenCall  # the arguments follow an object without members
        else:
            self.put_back((yield from self.expect(*ends)))
            self.write("{}")
        self.end_call()

    def _open(self) -> Steps[None]:
        """Wait for more of a value. If the response ends here, closing brackets can complete the arguments."""
        self._closable = True
        yield
        self._closable = False

    def whole(self) -> Steps[str]:
        """Consume and return the JSON object or list that follows."""
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
        """Emit text up to a marker before tool calls, and return the marker."""
        pattern, first = any_of(self.begins), any_of(tuple(dict.fromkeys(mark[0] for mark in self.begins)))
        while True:
            size = len(self.held)
            if first.search(self.held):  # rare
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
        except BrokenCall:
            text = self.taken
            self._beside = []
            self.end_call(Ending.BROKEN)
            self.show(text)
        self.drop()
        self.end_call()

    def _markers(self) -> tuple[str, ...]:
        others = [getattr(self, name, "") for name in _MARKS]
        between = getattr(self, "between", ())
        known = (*self.begins, *between, *self.within, *others)
        return tuple(marker for marker in known if isinstance(marker, str) and marker)

    def _is_markup(self, text: str) -> bool:
        """Return whether a response ends with the start of a marker within, before or after a tool call.

        Whole markers, such as the end of a call before the end of all calls, may precede the incomplete one.
        """
        markers = self._markers()
        start, whole = text.strip(), any_of(markers)
        while not any(marker.startswith(start) for marker in markers):
            if (match := whole.match(start)) is None:
                return False
            start = start[match.end() :].lstrip()
        return bool(text.strip())


@functools.lru_cache(maxsize=256)
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches any of the markers, or that never matches if there are none."""
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


# -- checking and completing the arguments of calls --------------------------------------------------------------------


_BESIDE_CALLS = (str, Reasoning)

_BRACKETS = re.compile(r'"|\\.|[{}\[\]]', re.DOTALL)
_ENDS = {"{": "}", "[": "]"}
_NUMBER = re.compile(r"[0-9]\Z")
"""Matches a digit at the end of text, where a number may continue."""


class ArgumentsText:
    """The JSON arguments of one tool call."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._controls = ControlEscapes()

    def feed(self, text: str) -> str:
        """Append text to the arguments, and return it for the client, with control characters in strings escaped."""
        self._parts.append(self._controls.feed(text))
        return self._parts[-1]

    def closing(self) -> str | None:
        """Return the text that closes open strings, lists and objects, or None if other text may also be missing."""
        text = self._join()
        if not self._controls.quoted and _NUMBER.search(text):
            return None
        ends, quoted = [], False
        for match in _BRACKETS.finditer(text):
            character = match[0]
            if character == '"':
                quoted = not quoted
            elif not quoted and character in "{[":
                ends.append(_ENDS[character])
            elif not quoted and character in "}]" and (not ends or ends.pop() != character):
                return None
        closing = '"' * quoted + "".join(reversed(ends)) if text else "{}"
        return closing if is_object(text + closing) else None

    def is_whole(self) -> bool:
        """Return whether the arguments are a complete JSON object."""
        return is_object(self._join())

    def _join(self) -> str:
        self._parts = ["".join(self._parts)]
        return self._parts[0]


class _Call:
    """A tool call that has started. The client receives its start with the first character of its arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments = ArgumentsText()
        self.number: int | None = None


class CheckedCalls:
    """Checks the tool calls among the events of one response.

    A call that is truncated before its arguments is replaced by its text, or else by its name, because clients would
    read missing arguments as `{}`.

    Args:
        allowed: the names of the tools that may be called, or None for any name. A call to any other tool is
            replaced by a line of text that contains its name and arguments.
    """

    def __init__(self, allowed: Collection[str] | None = None) -> None:
        self._allowed = allowed
        self._refused: dict[int, str] = {}  # the text before the next arguments of a refused call, by its number
        self._line = ""  # the text before the name of the next refused call
        self._open: dict[int, _Call] = {}
        self._count = 0

    def read(self, events: list[Event]) -> list[Event]:
        """Return the checked events, in which each `CallEnd` has the ending WHOLE or BROKEN."""
        if len(events) == 1 and type(events[0]) in _BESIDE_CALLS:  # the usual case
            return events
        checked: list[Event] = []
        for event in events:
            if isinstance(event, Arguments) and (call := self._open.get(event.number)) and call.number is not None:
                checked.append(Arguments(call.number, call.arguments.feed(event.text)))  # the usual case
            else:
                checked += self._check(event)
        return checked

    def end(self, events: Iterable[Event], finish: Finish) -> list[Event]:
        """Return the last events of the response, including the ends of all tool calls.

        Args:
            finish: the reason why the response ended. If the model ended it, open brackets are closed where this is
                unambiguous.
        """
        checked: list[Event] = []
        for event in events:
            checked += self._check(event, closes=finish is Finish.EOS)
            if isinstance(event, CallEnd) and not event.whole and finish is not Finish.EOS:
                self._allowed = ()  # what follows may be a quoted call in a value that was cut off
        left: list[Event] = [CallEnd(number, Ending.OPEN) for number in self._open]
        return [*checked, *self.read(left)]

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
            if isinstance(event, CallEnd):
                del self._refused[event.number]
            elif event.text:
                yield self._refused[event.number] + event.text
                self._refused[event.number] = ""
        elif (call := self._open.get(event.number)) is None:
            pass  # a user's parser may emit more after the end of a call
        elif isinstance(event, Arguments):
            yield from self._write(call, event.text)
        else:
            del self._open[event.number]
            yield from self._end(call, event, closes=closes)

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
            yield end.text or call.name
        else:
            whole = end.ending is not Ending.BROKEN and call.arguments.is_whole()
            yield CallEnd(call.number, Ending.WHOLE if whole else Ending.BROKEN)


# -- the format of a model's own response template, whose calls response_template/ reads -------------------------------


class TemplateCalls(PlainText):
    """A placeholder for the tool call parser in response_template/. On its own, it leaves calls in the text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools


HF = Format("hf", TemplateCalls)
