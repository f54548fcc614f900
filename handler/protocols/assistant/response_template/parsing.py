"""The incremental parser of responses that uses a model's own response template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.text import Vocabulary
from handler.core.values import Request, Sampling
from handler.protocols.assistant.events import (
    Arguments,
    CallEnd,
    CallStart,
    Ending,
    Ends,
    Event,
    EventParser,
    Reasoning,
    pieces,
)
from handler.protocols.assistant.reasoning import Prefixed, ReasoningForm, ReasoningParser
from handler.protocols.assistant.reasoning_families import Family
from handler.protocols.assistant.response_template.contents import ContentParser
from handler.protocols.assistant.response_template.pattern import Attempt, Match, may_try
from handler.protocols.assistant.response_template.template import (
    CALLS,
    CONTENT,
    Field,
    Marks,
    ResponseTemplate,
    Texts,
    Watch,
)
from handler.protocols.assistant.tools.grammar import ANY, ToolSchema
from handler.protocols.assistant.tools.json_text import JsonEnd, as_json, dumps
from handler.protocols.assistant.tools.parsing import HF, NAME, SPACES, TemplateCalls, Tool


class ResponseParser(ReasoningParser):
    """Divides a response into regions between the markers of fields, as transformers' ResponseParser does.

    Text that may be the start of a marker is held back until it is clear whether it is. The work on text that turns out
    not to be a marker is limited in proportion to the length of the response. Beyond that limit, patterns are no longer
    tried.

    Args:
        begun: the part of the response that is already in the prompt.
        tools: the tools of the request, or None to leave calls in the text.
        separates: whether reasoning is shown separately. Otherwise it stays in the text, including its markers.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        begun: str = "",
        tools: Sequence[Tool] | None = None,
        *,
        separates: bool = True,
    ) -> None:
        super().__init__()
        self._template = template
        self._separates = separates
        if separates and template.reasoning is not None and template.reasoning.open is not None:
            self.begin = template.reasoning.open.texts
        self._calls = None if tools is None else _Calls(tools)
        self._texts = {name: _Text(field) for name, field in template.fields.items()}
        if CONTENT not in self._texts:
            self._texts[CONTENT] = _Text(template.implicit)
        self._events: list[Event] = []
        self._field = template.implicit
        self._region: _Region | None = None  # of the calls that are being read
        self._watch = template.outside
        self._search = _MarkSearch()
        self._hidden = 0  # characters of `_search.held` that are in the prompt
        self._update()
        if begun:
            self.feed(begun)
            self._hidden = len(self._search.held)
            for text in self._texts.values():
                text.forget()

    def feed(self, text: str) -> list[Event]:
        for piece in pieces(text):
            self._search.held += piece
            while self._search.held and self._step(final=False):
                pass
        return self._pop()

    def flush(self) -> list[Event]:
        while self._step(final=True):
            pass
        if self._region is not None:
            self._end_call(self._region, "", cut=True)
        return self._pop()

    def _pop(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _step(self, *, final: bool) -> bool:
        """Read up to the next marker, and return whether there is more to parse."""
        search = self._search
        if search.candidates is None:
            start = search.start(self._watch, final=final)
            if start is None:
                self._take(len(search.held))
                return final and self._watch.at_end and not search.num_empty
            self._take(start)
            search.begin(self._watch)
        if not search.is_decided(final=final):
            return False
        chosen = search.longest()
        if chosen is None or (chosen[0] is None and self._region is not None and self._region.is_quoted):
            if not search.held:
                return False
            self._take(1)
            return True
        field, match = chosen
        mark = search.consume(match.size)
        search.num_empty += not mark
        self._hidden = max(self._hidden - len(mark), 0)
        if field is None:
            self._close(mark)
        else:
            self._open(field, mark, match.groups)
        return bool(search.held) or bool(mark) or self._watch.at_end

    # -- regions -----------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> None:
        """Consume the next `size` characters as text of the current region."""
        text = self._search.consume(size)
        if self._hidden:
            hidden, self._hidden = self._hidden, max(self._hidden - len(text), 0)
            text = text[hidden:]
        if not text or self._field is None:
            return
        if self._region is not None:
            self._events += self._region.feed(text)
        elif self._field.is_reasoning and self._separates:
            self._events += map(Reasoning, self._texts[self._field.name].feed(text))
        else:
            self._show(text)

    def _show(self, text: str) -> None:
        """Emit text that is neither reasoning nor part of a tool call."""
        self._events += self._texts[CONTENT].feed(text)

    def _open(self, field: Field, mark: str, groups: Mapping[str, str]) -> None:
        self._end_text()
        self._field = field
        if field.name == CALLS and self._calls is not None:
            self._region = _Region(field, mark, groups, self._calls)
        elif self._is_raw(field):
            self._show(mark)
        self._update()

    def _close(self, mark: str) -> None:
        field = self._field
        if self._region is not None:
            self._end_call(self._region, mark)
        elif field is not None and self._is_raw(field):
            self._show(mark)
        self._end_text()
        self._field = self._template.implicit
        self._update()

    def _is_raw(self, field: Field) -> bool:
        """Return whether the regions of a field stay in the text, including their markers."""
        return not self._separates if field.is_reasoning else field.name == CALLS

    def _end_text(self) -> None:
        if self._field is not None and self._field.name in self._texts:
            self._texts[self._field.name].end()

    def _end_call(self, region: _Region, mark: str, *, cut: bool = False) -> None:
        self._region = None
        events = region.end(cut=cut)
        if events is None:
            self._show(region.begin + region.content.text + mark)
        else:
            self._events += events

    def _update(self) -> None:
        """Look up the markers that apply in the current region."""
        self.thinking = self._separates and self._field is not None and self._field.is_reasoning
        self._watch = self._template.outside if self._field is None else self._template.inside(self._field)


class _MarkSearch:
    """The search for markers in the part of a response that is not parsed yet.

    Attributes:
        held: the text that may be the start of a marker.
        candidates: the attempts to match the markers at the start of `held`, or None if no marker may start there.
        num_empty: the number of empty markers at this position.
    """

    def __init__(self) -> None:
        self.held = ""
        self.candidates: Sequence[tuple[Field | None, Attempt | Texts]] | None = None
        self.num_empty = 0
        self._num_seen = 0  # characters of `held` that the candidates have read
        self._size = 0  # characters before `held`
        self._before = ""
        self._in_vain = 0

    def start(self, watch: Watch, *, final: bool) -> int | None:
        """Return the next position of a possible marker, or None if there is none."""
        if watch.at_start and not self._size and not self.num_empty:
            return 0
        first = watch.firsts.search(self.held)
        if first is not None:
            return first.start()
        return 0 if final and not self.held and watch.at_end and not self.num_empty else None

    def begin(self, watch: Watch) -> None:
        """Begin to match markers at the start of the held text."""
        tries = may_try(self._in_vain, self._size)
        self.candidates = [
            (field, marks.begin(self._before)) for field, marks in watch.marks if tries or marks.pattern is None
        ]
        self._num_seen = 0

    def is_decided(self, *, final: bool) -> bool:
        """Feed the held text to the candidates, and return whether their matches are final."""
        candidates = [candidate for _, candidate in self.candidates or ()]
        for candidate in candidates:
            if candidate.is_open:
                candidate.feed(self.held[self._num_seen :], final=final)
        self._num_seen = len(self.held)
        return not any(candidate.is_open for candidate in candidates)

    def longest(self) -> tuple[Field | None, Match] | None:
        """End the matching, and return the first of the longest matches with its field, or None if nothing matches."""
        candidates, self.candidates = self.candidates or (), None
        chosen: tuple[Field | None, Match] | None = None
        for field, candidate in candidates:
            match = candidate.match(self.held)
            if match is None:
                self._in_vain += candidate.work
            elif (match.size or not self.num_empty) and (chosen is None or match.size > chosen[1].size):
                chosen = field, match
        return chosen

    def consume(self, size: int) -> str:
        """Consume and return the next `size` characters."""
        text, self.held = self.held[:size], self.held[size:]
        if text:
            self._size += len(text)
            self._before, self.num_empty = text[-1], 0
        return text


class _Text:
    """The text in the regions of a field, stripped of surrounding whitespace if the field requires it."""

    def __init__(self, field: Field | None) -> None:
        self._strips = field is None or field.strips
        self._join = None if field is None else field.join
        self._ends = Ends()
        self._begun = False
        self._between = ""

    def feed(self, text: str) -> list[str]:
        """Add text, and return the pieces that can be shown."""
        trimmed = self._ends.trim(text) if self._strips else text
        if not trimmed:
            return []
        self._begun = True
        trimmed, self._between = self._between + trimmed, ""
        return [trimmed]

    def end(self) -> None:
        """End a region. If regions are separate texts, the next region starts a new text."""
        if self._join is not None:
            if self._begun:
                self._between = self._join
            self._begun, self._ends = False, Ends()

    def forget(self) -> None:
        """Drop whitespace that belongs to hidden text."""
        self._ends.space, self._between = [], ""


class _Calls:
    """The tool calls of a response."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._schemas: dict[str, ToolSchema] = {}
        self.count = 0

    def start(self, name: str) -> CallStart:
        self.count += 1
        return CallStart(self.count - 1, name)

    def typed(self, name: str, arguments: Any) -> Any:
        """Convert string arguments to the types in the schema of the tool."""
        if not isinstance(arguments, dict) or name not in self._tools:
            return arguments
        schema = self._schemas.setdefault(name, ToolSchema(self._tools[name]))
        values = {}
        for key, value in arguments.items():
            types = schema.types(schema.property(schema.root, key))
            if isinstance(value, list) and "array" not in types:  # the values of a tag that occurs several times
                values[key] = [_typed(item, types) for item in value]
            else:
                values[key] = _typed(value, types)
        return values


def _typed(value: Any, types: frozenset[str]) -> Any:
    if not isinstance(value, str) or not types or types & ANY or types == {"string"}:
        return value
    return json.loads(as_json(value, types))


_UNREAD = re.compile(r"(?:\A|>)[^<>]*\w")
"""Matches text outside of tags."""


class _Region:
    """A region of tool calls that is being read."""

    def __init__(self, field: Field, begin: str, groups: Mapping[str, str], calls: _Calls) -> None:
        self.begin = begin
        self.content: ContentParser = field.make()
        self._field = field
        self._groups = groups
        self._calls = calls
        name = groups.get(field.name_group, "") if field.name_group else ""
        self._name = name if NAME.fullmatch(name) else ""  # of a call whose arguments are emitted as they arrive
        self._json = JsonEnd() if field.is_plain else None
        self._is_over = False  # whether the JSON is complete
        self._after: list[str] = []  # text after the JSON
        self._started = False

    @property
    def is_quoted(self) -> bool:
        """Whether the text is JSON and ends within a string, in which markers are ignored."""
        return self._json is not None and not self._is_over and self._json.quoted

    def feed(self, text: str) -> list[Event]:
        self.content.feed(text)
        if self._json is None or self._is_over:
            self._after.append(text)
            return []
        events: list[Event] = []
        if self._name and not self._started:
            text = text.lstrip(SPACES)
            if not text:
                return []
            if text[0] == "{":
                events.append(self._calls.start(self._name))
                self._started = True
            else:
                self._name = ""
        size = self._json.feed(text)
        self._is_over = size is not None
        if self._started:
            events.append(Arguments(self._calls.count - 1, text[:size]))
            self._after.append("" if size is None else text[size:])
        return events

    def end(self, *, cut: bool) -> list[Event] | None:
        """Return the remaining events of the tool calls, or None if the text is not a call.

        Args:
            cut: whether the response ended within the region.
        """
        if self._started:
            after = "".join(self._after).strip()
            ending = Ending.BROKEN if after else Ending.OPEN if cut else Ending.WHOLE
            return [CallEnd(self._calls.count - 1, ending), *([after] if after else [])]
        try:
            calls = self._field.calls(self.content.value(), self._groups)
        except (ValueError, RecursionError):
            return None
        if not calls or not all(NAME.fullmatch(name) for name, _ in calls):
            return None
        if (
            not self._field.is_json
            and not all(arguments for _, arguments in calls)
            and _UNREAD.search(self.content.text)
        ):
            return None
        cut = cut and not self._field.is_json  # more arguments might have followed
        events: list[Event] = []
        for index, (name, arguments) in enumerate(calls):
            start = self._calls.start(name)
            text = arguments if isinstance(arguments, str) else dumps(self._calls.typed(name, arguments))
            if cut and index == len(calls) - 1 and text.endswith("}"):
                events += [start, Arguments(start.number, text[:-1]), CallEnd(start.number, Ending.OPEN)]
            else:
                events += [start, Arguments(start.number, text), CallEnd(start.number)]
        return events


# -- the responses of a request whose model has a response template ----------------------------------------------------


def family(template: ResponseTemplate) -> Family:
    """Return a family with the literal reasoning markers of the template, which prompts may contain."""
    field = template.reasoning
    return Family(HF.name, _texts(field and field.open), _texts(field and field.close), thinks=False)


def _texts(marks: Marks | None) -> tuple[str, ...]:
    return () if marks is None else marks.texts


class TemplateReasoning(ReasoningForm):
    """The reasoning settings of one request to a model that has a response template.

    Args:
        shows: whether reasoning is shown separately from the text.
    """

    def __init__(self, template: ResponseTemplate, *arguments: Any, shows: bool, **keywords: Any) -> None:
        super().__init__(family(template), *arguments, **keywords)
        self._template = template
        self.shows = shows
        self._begun = ""
        self._is_ruled = False

    def special(self, vocabulary: Vocabulary, sampling: Sampling) -> frozenset[str]:
        if _is_ruled(sampling):
            return super().special(vocabulary, sampling)
        return self._template.special(vocabulary.marks)

    def read_prompt(self, request: Request, prompt: str) -> Request:
        self._begun = self._template.begun(prompt)
        self._is_ruled = _is_ruled(request.sampling)
        if not self.shows:
            return request
        return super().read_prompt(request, prompt)

    def ends_open(self, prompt: str) -> bool | None:
        """Return True if the prompt ends within reasoning according to the template. Otherwise the markers decide."""
        return True if ResponseParser(self._template, self._begun).thinking else super().ends_open(prompt)

    def parser(self, inner: EventParser | None = None) -> ReasoningParser:
        if self._is_ruled or not isinstance(inner, TemplateCalls | None):  # the text after reasoning has no markers
            return super().parser(inner) if self.shows else Prefixed("", inner)
        tools = None if inner is None else inner.tools
        return ResponseParser(self._template, self._begun, tools, separates=self.shows)


def _is_ruled(sampling: Sampling) -> bool:
    rule = sampling.structured_output
    return rule is not None and not rule.allows_text
