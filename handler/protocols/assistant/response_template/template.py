"""A model's response template, and the functions that read and check it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.protocols.assistant.response_template.contents import (
    Arguments,
    MakeContent,
    Placeholder,
    apply,
    content_parser,
    literals,
    read_transform,
    roots,
)
from handler.protocols.assistant.response_template.pattern import Attempt, Match, Pattern

REASONING = ("thinking", "reasoning", "reasoning_content")
CONTENT, CALLS = "content", "tool_calls"
_NAMES = (*REASONING, CONTENT, CALLS)

_MOST_MARKS = 32
_LONGEST_MARK = 256
_SEARCHED = 16_384  # characters at a prompt's end that are searched for a pattern
_MOST_SOUGHT = 1 << 17  # alternatives of a pattern that are followed in this search
_MOST_PLACES = 64  # placeholders in a transform, each of which may become a copy of the whole region

LONGEST = 1024
"""Maximum length, in characters, of a marker that matches a pattern. A longer match is not a marker."""


class Marks:
    """The markers that begin or end a region: a list of strings, or a pattern.

    Attributes:
        texts: the strings, longest first, or an empty tuple for a pattern.
    """

    def __init__(self, texts: Sequence[str] = (), pattern: Pattern | None = None) -> None:
        self.texts = tuple(sorted(texts, key=len, reverse=True))
        self.pattern = pattern
        self.groups: Sequence[str] = () if pattern is None else pattern.groups

    @property
    def firsts(self) -> list[str]:
        return [re.escape(text[0]) for text in self.texts] if self.pattern is None else self.pattern.firsts

    @property
    def literals(self) -> Sequence[str]:
        return self.texts if self.pattern is None else self.pattern.literals

    def begin(self, before: str) -> Attempt | Texts:
        """Return an attempt to match a marker at a position of a response.

        Args:
            before: the character before the position, or "" at the start of the response.
        """
        return Texts(self.texts) if self.pattern is None else Attempt(self.pattern, before, LONGEST)

    def last_end(self, text: str) -> int | None:
        """Return the index after the last marker in a prompt, or None if the prompt contains no marker.

        A pattern is searched for only in the last 16,384 characters.
        """
        if self.pattern is None:
            return max((at + len(mark) for mark in self.texts if (at := text.rfind(mark)) >= 0), default=None)
        tail, work = text[-_SEARCHED:], 0
        firsts = [match.start() for match in re.finditer("|".join(self.firsts), tail, re.DOTALL)]
        for first in reversed(firsts):
            attempt = Attempt(self.pattern, tail[first - 1] if first else "", LONGEST)
            attempt.feed(tail[first : first + LONGEST], final=True)
            if (match := attempt.match(tail[first:])) is not None and match.size:
                return len(text) - len(tail) + first + match.size
            work += attempt.work
            if work > _MOST_SOUGHT:
                break
        return None


class Texts:
    """An attempt to match one of several strings at a position of a response, with the interface of `Attempt`."""

    work = 0

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._read = ""
        self._found: str | None = None
        self.is_open = True

    def feed(self, text: str, *, final: bool = False) -> None:
        self._read += text
        for mark in self._texts:  # the longest first
            if self._read.startswith(mark):
                self._found = mark
                break
            if not final and mark.startswith(self._read):
                return
        self.is_open = False

    def match(self, text: str) -> Match | None:
        return None if self._found is None else Match(len(self._found), {})


class Field(NamedTuple):
    """A field of the template. Each region of a response belongs to a field.

    Attributes:
        open: the markers before a region, or None if everything outside the regions of other fields belongs to this
            field.
        close: the markers after a region, or None if it ends with the response.
        make: creates the parser of one region's text.
        strips: whether the whitespace around a region's text is dropped.
        join: the separator between the texts of several regions, or None if they form one text.
        transform: the transform that converts the parsed value to a call, or None if the value already is a call.
        each: whether the transform applies to each item of a list instead of the whole value.
        name_group: the group of `open` that contains a tool call's name, or "" if the region's text is more than the
            arguments.
        is_json: whether the text is JSON, so that the parser can tell whether it is complete.
        is_plain: whether the text is standard JSON, in whose strings markers are ignored.
        inner: the literal strings that the parser looks for.
    """

    name: str
    open: Marks | None
    close: Marks | None
    make: MakeContent
    strips: bool
    join: str | None
    transform: Any
    each: bool
    name_group: str
    is_json: bool
    is_plain: bool
    inner: Sequence[str] = ()

    @property
    def is_reasoning(self) -> bool:
        return self.name in REASONING

    def calls(self, value: Any, groups: Mapping[str, str]) -> list[tuple[str, Any]]:
        """Return the names and arguments of the tool calls in a region.

        Args:
            value: the parsed value of the region's text.
            groups: the groups of the marker before the region.

        Raises:
            ValueError: the value cannot be converted to calls.
        """
        if self.each:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ValueError("is not a list of objects")
            value = [apply(self.transform, {**groups, **item}) for item in value]
        elif self.transform is not None:
            value = apply(self.transform, {**groups, "content": value})
        return [_call(item) for item in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> tuple[str, Any]:
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or function is None:
        raise ValueError("has no name")
    arguments = function.get("arguments")
    if arguments is None and function.keys() - {"name", "arguments", "id", "type"}:
        raise ValueError("has its arguments elsewhere")
    return name, {} if arguments is None else arguments


class Watch(NamedTuple):
    """The markers that the parser looks for in one state of a response.

    Attributes:
        marks: each field with the markers that open it, and None with the markers that close the current field.
        firsts: matches the first character of any marker.
        at_start: whether a marker may be empty at the start of a response.
        at_end: whether a marker may be empty at the end of a response.
    """

    marks: Sequence[tuple[Field | None, Marks]]
    firsts: re.Pattern[str]
    at_start: bool
    at_end: bool


def _watch(marks: Sequence[tuple[Field | None, Marks]]) -> Watch:
    patterns = [mark.pattern for _, mark in marks if mark.pattern is not None]
    firsts = "|".join(dict.fromkeys(first for _, mark in marks for first in mark.firsts))
    return Watch(
        # Of several markers that match, the longest one is chosen, then one that opens a field, then the first by name.
        sorted(marks, key=lambda item: (item[0] is None, item[0].name if item[0] else "")),
        re.compile(firsts or r"(?!)", re.DOTALL),
        any(pattern.at_start for pattern in patterns),
        any(pattern.at_end for pattern in patterns),
    )


class ResponseTemplate:
    """A model's response template.

    Attributes:
        fields: the fields by name.
        implicit: the field that everything outside of other regions belongs to, or None if text outside of regions is
            dropped.
        outside: the markers that the parser looks for outside of regions.

    Args:
        start: the markers in a prompt after which the response starts.
    """

    def __init__(self, fields: Mapping[str, Field], start: Marks) -> None:
        self.fields = fields
        self.implicit = next((field for field in fields.values() if field.open is None), None)
        if self.implicit is None and CONTENT not in fields:  # everything outside of regions is text, as in vLLM
            self.implicit = _field(CONTENT, {})
        self._start = start
        opens = [(field, field.open) for field in fields.values() if field.open is not None]
        implicit_end = [] if self.implicit is None or self.implicit.close is None else [(None, self.implicit.close)]
        self.outside = _watch([*opens, *implicit_end])
        self._inside = {name: _watch([(None, field.close)] if field.close else []) for name, field in fields.items()}

    @functools.cached_property
    def reasoning(self) -> Field | None:
        """The field that contains the reasoning, or None if the template has none."""
        return next((field for field in self.fields.values() if field.is_reasoning), None)

    @property
    def calls(self) -> Field | None:
        return self.fields.get(CALLS)

    def inside(self, field: Field) -> Watch:
        """Return the markers that the parser looks for in a region of a field."""
        return self.outside if field is self.implicit else self._inside[field.name]

    def begun(self, prompt: str) -> str:
        """Return the part of the response that is already in a prompt, after the last marker that starts a response."""
        end = self._start.last_end(prompt)
        return "" if end is None else prompt[end:]

    @functools.cached_property
    def literals(self) -> frozenset[str]:
        """The literal strings of all markers and content parsers."""
        fields = self.fields.values()
        marks = [mark for field in fields for mark in (field.open, field.close) if mark is not None]
        inner = [literal for field in fields for literal in field.inner]
        return frozenset([*inner, *(literal for mark in marks for literal in mark.literals)])

    def special(self, tokens: frozenset[str]) -> frozenset[str]:
        """Return the special tokens that the literals of the template contain.

        Args:
            tokens: all special tokens of the vocabulary.
        """
        return frozenset(token for token in tokens if token and any(token in literal for literal in self.literals))


# -- reading -----------------------------------------------------------------------------------------------------------


def read_response_template(value: Any) -> ResponseTemplate:
    """Read `response_template` of tokenizer_config.json.

    Raises:
        ValueError: the template is invalid or not supported. The message begins with the path of the invalid value.
    """
    template = _object(
        value, "response_template", ("version", "defaults", "fields", "start_anchor", "start_anchor_pattern")
    )
    if template.get("version", 1) != 1:
        raise ValueError(f"response_template.version: must be 1 (given: {template['version']!r})")
    _object(template.get("defaults", {}), "response_template.defaults")
    fields = _object(template.get("fields"), "response_template.fields")
    if not fields:
        raise ValueError(f"response_template.fields: must have at least one of {', '.join(_NAMES)}")
    if unknown := [name for name in fields if name not in _NAMES]:
        raise ValueError(f"response_template.fields: {unknown[0][:64]!r} is not one of {', '.join(_NAMES)}")
    start = _marks(template, "start_anchor", "response_template.")
    if start is None:
        raise ValueError("response_template: start_anchor or start_anchor_pattern is required")
    parsed = {name: _field(name, field) for name, field in fields.items()}
    _check_single([field for field in parsed.values() if field.open is None], "without 'open'")
    _check_single([field for field in parsed.values() if field.is_reasoning], "of reasoning")
    return ResponseTemplate(parsed, start)


def _check_single(fields: Sequence[Field], kind: str) -> None:
    if len(fields) > 1:
        raise ValueError(f"response_template.fields: has {len(fields)} fields {kind}; at most one is allowed")


_KEYS = (
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
)  # fmt: skip


def _field(name: str, value: Any) -> Field:
    at = f"response_template.fields.{name}"
    options = _object(value, at, _KEYS)
    for key in ("repeats", "optional", "transform_each"):
        if not isinstance(options.get(key, False), bool):
            raise ValueError(f"{at}.{key}: must be true or false")
    join, content, arguments = options.get("join"), options.get("content", "text"), options.get("content_args", {})
    if join is not None and (not isinstance(join, str) or not options.get("repeats") or name == CALLS):
        raise ValueError(f"{at}.join: must be a string, and is allowed only for texts with 'repeats'")
    opens, closes = _marks(options, "open", f"{at}."), _marks(options, "close", f"{at}.")
    if name == CALLS and opens is None:
        raise ValueError(f"{at}: open or open_pattern is required")
    if name != CALLS and (content != "text" or "transform" in options):
        raise ValueError(f"{at}: must have the content 'text' and no transform")
    try:
        make, transform = content_parser(content, arguments), read_transform(options.get("transform"))
    except ValueError as error:
        raise ValueError(f"{at}.{error}") from None
    groups = () if opens is None else opens.groups
    each = options.get("transform_each", False)
    if transform is None and (each or groups or (closes is not None and closes.groups)):
        raise ValueError(f"{at}.transform: is required with transform_each, or with groups in a pattern")
    if len(places := list(roots(transform))) > _MOST_PLACES:
        raise ValueError(f"{at}.transform: has {len(places)} placeholders; the maximum is {_MOST_PLACES}")
    if not each and (lost := [root for root in places if root not in ("content", *groups)]):
        raise ValueError(f"{at}.transform: {{{lost[0]}}} is neither content nor a group of open_pattern")
    between = (join or "") if options.get("repeats") else None
    name_group = "" if each or content != "json" or arguments else _name_group(transform)
    return Field(
        name,
        opens,
        closes,
        make,
        arguments.get("strip", True),
        between,
        transform,
        each,
        name_group,
        is_json=content == "json",
        is_plain=content == "json" and not arguments.get("string_delims"),
        inner=tuple(literals(arguments)),
    )


def _name_group(transform: Any) -> str:
    """Return the group that contains a tool call's name, or "" if the region's text is more than the arguments."""
    function = transform.get("function", transform) if isinstance(transform, dict) else {}
    if not isinstance(function, dict):
        return ""
    name = function.get("name")
    if not isinstance(name, Placeholder) or len(name.path) > 1 or name.path == ("content",):
        return ""
    return name.path[0] if function.get("arguments") == Placeholder(("content",)) else ""


def _object(value: Any, at: str, known_names: Sequence[str] = ()) -> Arguments:
    if not isinstance(value, dict):
        raise ValueError(f"{at}: must be an object")
    if known_names and (unknown := [key for key in value if key not in known_names]):
        raise ValueError(f"{at}.{unknown[0][:64]}: unknown name; must be one of {', '.join(known_names)}")
    return value


def _marks(options: Arguments, key: str, at: str) -> Marks | None:
    """Return the markers under a key (a string, a list of strings, or a pattern), or None if there are none."""
    text, pattern = options.get(key), options.get(f"{key}_pattern")
    if text is not None and pattern is not None:
        raise ValueError(f"{at}{key}: cannot be combined with {key}_pattern")
    if pattern is not None:
        try:
            if not isinstance(pattern, str):
                raise ValueError("must be a string")
            return Marks(pattern=Pattern(pattern))
        except ValueError as error:
            raise ValueError(f"{at}{key}_pattern: {str(pattern)[:200]!r} {error}") from None
    if text is None:
        return None
    texts = text if isinstance(text, list) else [text]
    if not 0 < len(texts) <= _MOST_MARKS or not all(_is_mark(item) for item in texts):
        raise ValueError(
            f"{at}{key}: must be a string of 1 to {_LONGEST_MARK} characters, or a list of up to {_MOST_MARKS} strings"
        )
    return Marks(tuple(dict.fromkeys(texts)))


def _is_mark(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_MARK
