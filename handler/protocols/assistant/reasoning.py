"""Incremental parsers that separate reasoning from the text of a response, and pass the text to a tool call parser."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter
from handler.core.text import Vocabulary, partial_mark
from handler.core.values import Request, Sampling, Thoughts
from handler.protocols.assistant.events import Ends, Event, EventParser, Reasoning, pieces
from handler.protocols.assistant.reasoning_families import HARMONY, MESSAGES, MUSE, Family
from handler.protocols.assistant.tools.parsing import any_of


class ReasoningParser(EventParser):
    """Base class of parsers that separate reasoning.

    Args:
        inner: the parser of everything outside of reasoning, or None to treat it as text.

    Attributes:
        thinking: whether the response so far ends within reasoning.
        begin: the markers that begin reasoning.
    """

    thinking = False
    begin: tuple[str, ...] = ()

    def __init__(self, inner: EventParser | None = None) -> None:
        self._inner = inner

    @property
    def num_held(self) -> int:
        """The number of characters at the end of the text that may be the start of a marker."""
        return 0

    def _beside(self, text: str) -> list[Event]:
        if self._inner is not None:
            return self._inner.feed(text)
        return [text] if text else []

    def flush(self) -> list[Event]:
        return [] if self._inner is None else self._inner.flush()


class MarksParser(ReasoningParser):
    """Base class of parsers that read from one marker to the next. A partial marker at the end waits for more input."""

    def __init__(self, inner: EventParser | None = None) -> None:
        super().__init__(inner)
        self._held = ""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in pieces(text):
            self._held += piece
            self._read(events, final=False)
        return events

    def flush(self) -> list[Event]:
        events: list[Event] = []
        self._read(events, final=True)
        return [*events, *super().flush()]

    def _read(self, events: list[Event], *, final: bool) -> None:
        while self._held and self._step(events, final=final):
            pass

    @abstractmethod
    def _step(self, events: list[Event], *, final: bool) -> bool:
        """Read up to the next marker, and return whether there is more to parse."""


class MarkedReasoningParser(MarksParser):
    """Parses reasoning between markers. A partial marker at the end of a response counts as reasoning or text.

    Args:
        thinking: whether the response begins within reasoning.
    """

    def __init__(self, family: Family, inner: EventParser | None = None, *, thinking: bool) -> None:
        super().__init__(inner)
        self.thinking = thinking
        self.begin = family.begin
        self._family = family
        self._inside = (*family.begin, *family.end, *family.calls)  # the markers that are recognized within reasoning
        self._ends = Ends(begun=True)
        self._over = False  # reasoning cannot begin any more
        self._read_beside = self._outside  # how the response is read outside of reasoning

    def feed(self, text: str) -> list[Event]:
        return self._beside(text) if self._over else super().feed(text)

    def _step(self, events: list[Event], *, final: bool) -> bool:
        if self._over:
            remainder, self._held = self._held, ""
            events += self._beside(remainder)
            return False
        if not self.thinking:
            return self._read_beside(events, final=final)
        family = self._family
        reasoning, mark, self._held = split(self._held, self._inside, final=final)
        if family.strips:
            reasoning = self._ends.trim(reasoning)
        if reasoning:
            events.append(Reasoning(reasoning))
        if mark and mark not in family.begin:
            self.thinking, self._ends = False, Ends(begun=True)
            if mark in family.calls or not family.reopens:
                self._leave(mark if mark in family.calls else "", events)
        return bool(mark)

    def _outside(self, events: list[Event], *, final: bool) -> bool:
        family = self._family
        if not family.reopens:
            start = self._held.lstrip()
            events += self._beside(self._held[: len(self._held) - len(start)])
            self._held = start
            if not start.startswith(family.begin):
                self._over = final or not any(mark.startswith(start) for mark in family.begin)
                return self._over
        text, mark, self._held = split(self._held, (*family.begin, *family.calls, *family.others), final=final)
        events += self._beside(text)
        if mark in family.begin:
            self.thinking = True
        elif mark in family.others:
            events += self._beside(mark if self._inner is not None else "")  # the parser of calls reads these markers
        elif mark:
            self._leave(mark, events)  # a marker in a call's arguments does not begin reasoning
        return bool(mark)

    def _calls(self, events: list[Event], *, final: bool) -> bool:
        """Pass tool calls to the inner parser, up to the marker after which reasoning may begin again."""
        text, mark, self._held = split(self._held, (self._family.calls_end,), final=final)
        events += self._beside(text + mark)
        self._read_beside = self._outside if mark else self._calls
        return bool(mark)

    def _leave(self, mark: str, events: list[Event]) -> None:
        """Pass the rest of the response to the inner parser, or only the tool calls if reasoning may follow them."""
        if mark and self._family.calls_end:
            self._read_beside = self._calls
            events += self._beside(mark)
        else:
            self._held, self._over = mark + self._held, True


class Unframed(MarksParser):
    """Drops the markers before the text of a response, and the markers that end the response.

    Args:
        inner: the parser of the text, or None to leave the text unchanged.
    """

    def __init__(self, family: Family, inner: EventParser | None) -> None:
        super().__init__(inner)
        self._opening = family.opening
        self._closing = family.closing_text
        self._begun = False
        self._end: list[str] = []  # markers that may end the response, and the whitespace after them

    def _step(self, events: list[Event], *, final: bool) -> bool:
        """Drop the marker before the text. Then read up to a marker that may end the response."""
        if not self._begun:
            start = self._held.lstrip()
            events += self._beside(self._held[: len(self._held) - len(start)])
            mark = next(filter(start.startswith, self._opening), "")
            self._held = start.removeprefix(mark)
            self._begun = bool(mark) or final or not any(mark.startswith(start) for mark in self._opening)
            return self._begun
        if not self._closing:
            events += self._beside(self._held)
            self._held = ""
            return False
        text, mark, self._held = split(self._held, self._closing, final=final)
        if text.strip():
            events += self._beside("".join([*self._end, text]))
            self._end = []
        elif self._end:
            self._end.append(text)
        else:
            events += self._beside(text)
        if mark:
            self._end.append(mark)
        return bool(mark)


_MESSAGE = "<|message|>"
_LONGEST_HEADER = 1024  # characters


class MessagesParser(MarksParser):
    """Base class of parsers for responses that consist of messages with headers. Output without a header is text.

    Attributes:
        headers: the markers that begin a header.
        ends: the markers that end a message.
    """

    headers: tuple[str, ...]
    ends: tuple[str, ...]

    def __init__(self, inner: EventParser | None = None) -> None:
        super().__init__(inner)
        self._state = self._between
        self._end = ""  # not empty if the inner parser also gets the message's end marker

    def _step(self, events: list[Event], *, final: bool) -> bool:
        return self._state(events, final=final)

    def _between(self, events: list[Event], *, final: bool) -> bool:
        """Parse the output between two messages."""
        if self._held.startswith(self.headers):
            self._state = self._header
        elif not final and any(mark.startswith(self._held) for mark in self.headers):
            return False
        else:
            self._state = self._message
        return True

    def _header(self, events: list[Event], *, final: bool) -> bool:
        mark = next((mark for mark in self.headers if self._held.startswith(mark) and mark != _MESSAGE), "")
        text, end, remainder = split(self._held.removeprefix(mark), (_MESSAGE, *self.ends, "<|start|>"), final=final)
        if not end and not final and len(text) <= _LONGEST_HEADER:
            return False
        self._state = self._message
        if end and end != _MESSAGE:
            self._held = self.text_of_header(mark + text) + end + remainder
            return True
        if not end:
            events += self._beside(mark)  # in a message's text, the marker would begin the next header
            self._held = text + remainder
            return True
        header, self._held = mark + text, remainder
        if self._inner is not None and self.is_inner(header):
            events += self._beside(header + end)
            self._end = "call"
        else:
            self.thinking = self.is_reasoning_header(header)
        return True

    @abstractmethod
    def text_of_header(self, header: str) -> str:
        """Return the text of a message without `<|message|>`, and set `thinking` to whether it is reasoning.

        Args:
            header: the message up to its end, beginning with the marker of a header.
        """

    @abstractmethod
    def is_inner(self, header: str) -> bool:
        """Return whether the inner parser receives the message after a header, with the header and the end marker."""

    @abstractmethod
    def is_reasoning_header(self, header: str) -> bool:
        """Return whether the message after a header is reasoning."""

    def _message(self, events: list[Event], *, final: bool) -> bool:
        text, mark, self._held = split(self._held, (*self.ends, "<|start|>"), final=final)
        if text:
            events += [Reasoning(text)] if self.thinking else self._beside(text)
        if mark:
            if self._end:
                events += self._beside(mark if mark in self.ends else "")
            if mark not in self.ends:
                self._held = mark + self._held
            self.thinking, self._end, self._state = False, "", self._between
        return bool(mark)


_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w*)"), re.compile(r"\bto=")
_START = r"<\|start\|>(?:assistant)?"
_HEADER = re.compile(rf"(?:{_START})?<\|channel\|>(?:(analysis|commentary|final)\b)?|{_START}")


class HarmonyParser(MessagesParser):
    """Parses OpenAI's harmony format (openai/harmony, docs/format.md). A message with a recipient is a tool call."""

    headers = ("<|channel|>", "<|start|>", " to=")
    ends = ("<|end|>", "<|call|>", "<|return|>")

    def is_inner(self, header: str) -> bool:
        return _RECIPIENT.search(header) is not None

    def is_reasoning_header(self, header: str) -> bool:
        channel = _CHANNEL.search(header)
        return channel is not None and channel[1] == "analysis"

    def text_of_header(self, header: str) -> str:
        opening = _HEADER.match(header)
        if opening is None:
            return header
        self.thinking = opening[1] == "analysis"
        return header[opening.end() :]


_SELF = re.compile(r"(?:\A|\s)to=self\s*\Z")


class MuseParser(MessagesParser):
    """Parses the format of Muse Glimmer's chat template. A message to the model itself is reasoning.

    All other messages are passed to the inner parser with their headers, because only the header shows whether tags
    are a tool call.
    """

    headers = ("<|start|>", " to=", "to=", _MESSAGE)
    ends = ("<|eom|>", "<|eot|>")

    def is_inner(self, header: str) -> bool:
        return not self.is_reasoning_header(header)

    def text_of_header(self, header: str) -> str:
        return header.removeprefix("<|start|>")

    def is_reasoning_header(self, header: str) -> bool:
        return _SELF.search(header) is not None


class Prefixed(ReasoningParser):
    """Leaves reasoning in the text, and prepends the marker at the end of the prompt, if any."""

    def __init__(self, mark: str, inner: EventParser | None = None) -> None:
        super().__init__(inner)
        self._mark = mark

    def feed(self, text: str) -> list[Event]:
        mark, self._mark = self._mark, ""
        return self._beside(mark + text)


def thinking_parser(family: Family, inner: EventParser | None = None, *, thinking: bool) -> ReasoningParser:
    """Return a new parser for one response of a model of this family.

    Args:
        inner: the parser of everything outside of reasoning, or None to treat it as text.
        thinking: whether the response begins within reasoning.
    """
    if family.name == HARMONY:
        return HarmonyParser(inner)
    if family.name == MUSE:
        return MuseParser(inner)
    if not family.end:
        return Prefixed("<think>", inner)
    if family.opening:
        inner = Unframed(family, inner)
    return MarkedReasoningParser(family, inner, thinking=thinking)


def split(text: str, marks: tuple[str, ...], *, final: bool) -> tuple[str, str, str]:
    """Split text at its first marker into the text before the marker, the marker, and the text after it.

    If there is no marker, the third part is the end of the text that may be the start of a marker. It is empty if no
    more input follows (`final`).
    """
    cut = len(text) if final else len(text) - partial_mark(text, marks)
    match = any_of(marks).search(text)
    if match is None or match.start() >= cut:
        return text[:cut], "", text[cut:]
    return text[: match.start()], match[0], text[match.end() :]


# -- the reasoning of one request: whether it is enabled, whether the prompt begins it, and the parser of responses ----


_COUNTED_ANEW = ("presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
"""Sampling fields that would ignore reasoning tokens, because the engine receives these tokens in a new prompt."""


class ReasoningForm:
    """The settings for reasoning in the responses to one request.

    Attributes:
        shows: whether reasoning is shown separately from the text.

    Args:
        family: the model's family.
        kwargs: the arguments of the chat template.
        prefix: the text of the last message, which the response continues, or None if the response is a new message.
        vocabulary: the vocabulary of the responses, or None if it depends on the prompt.
        lacks: the reason why the engine can neither end reasoning nor start structured output after it, or "" if it
            can do both.
        explicit: whether an option names the family. If not, structured output that cannot start after reasoning starts
            at the beginning of the response.
    """

    shows = True

    def __init__(
        self,
        family: Family,
        kwargs: Mapping[str, Any],
        prefix: str | None = None,
        vocabulary: Vocabulary | None = None,
        lacks: str = "",
        *,
        explicit: bool = True,
    ) -> None:
        self.family = family
        self._is_on = family.is_on(kwargs)
        self._prefix = prefix
        self._open = family.thinks and self._is_on
        self._vocabulary = vocabulary
        self._lacks = lacks
        self._explicit = explicit

    def special(self, vocabulary: Vocabulary, sampling: Sampling) -> frozenset[str]:
        """Return the special tokens that the parser of the responses looks for. A tokenizer omits them by default."""
        return vocabulary.marks.intersection(self.family.marks)

    def ends_open(self, prompt: str) -> bool | None:
        """Return True if a prompt ends within reasoning, False if it ends after reasoning, or None if unknown."""
        if self._prefix is not None:
            return self.family.is_open(self._prefix)
        return None if self.family.name in MESSAGES else self.family.ends_open(prompt)

    def read_prompt(self, request: Request, prompt: str) -> Request:
        """Return the request with its reasoning settings, which depend on the end of the prompt.

        Call it before `parser`.

        Raises:
            InvalidParameter: structured output cannot start after reasoning, or the engine cannot end reasoning.
        """
        family = self.family
        if (ending := self.ends_open(prompt)) is not None:
            self._open = self._is_on = ending
        sampling = request.sampling
        rule, budget = sampling.structured_output, sampling.thinking_token_budget
        guided = rule is not None and (not rule.allows_text or budget is not None)  # reasoning is text too
        if guided and not self._is_on:  # the rule applies from the start, and allows no reasoning
            return _without_reasoning(request)
        closing: tuple[int, ...] = ()
        try:
            if guided or budget is not None:
                names = request.names
                name = names.structured_output if guided else names.thinking_token_budget
                closing = self._closing(sampling, name, names.without_reasoning)
        except InvalidParameter:
            if self._explicit or budget is not None:
                raise
            self._open = self._is_on = False
            return _without_reasoning(request)
        if not family.end:
            return request
        sampling = sampling._replace(
            thoughts=Thoughts(family.begin, (*family.end, *family.calls), self._open, family.calls, closing)
        )
        return request._replace(sampling=sampling)

    def _closing(self, sampling: Sampling, name: str, without_reasoning: str) -> tuple[int, ...]:
        """Return the token ids of the marker that ends reasoning.

        Args:
            name: the client's name for the field that needs the end of reasoning.
            without_reasoning: what a client sends to turn reasoning off.

        Raises:
            InvalidParameter: the text after the reasoning cannot be generated separately.
        """
        off = f"send {without_reasoning}"
        if self._lacks:
            raise InvalidParameter(f"{name}: the model reasons before it answers, and {self._lacks}; {off}")
        for field in _COUNTED_ANEW:
            if (value := getattr(sampling, field)) != Sampling._field_defaults[field]:
                raise InvalidParameter(f"{field}={value}: with {name}, reasoning tokens would not count; {off}")
        family, mark = self.family, self.family.closing
        closing = self._vocabulary.ids(mark.encode()) if self._vocabulary is not None else ()
        if not family.end or (mark and not closing) or (sampling.thinking_token_budget is not None and not mark):
            raise InvalidParameter(
                f"{name}: reasoning has no end marker with option.reasoning_parser={family.name}; {off}"
            )
        return closing

    def parser(self, inner: EventParser | None = None) -> ReasoningParser:
        return thinking_parser(self.family, inner, thinking=self._open)


def _without_reasoning(request: Request) -> Request:
    return request._replace(sampling=request.sampling._replace(thoughts=None, thinking_token_budget=None))
