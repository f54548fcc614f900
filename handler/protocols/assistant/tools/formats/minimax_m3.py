"""MiniMax M3's tool calls, whose parameters are nested elements (source: its chat template)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from handler.protocols.assistant.tools.formats.sections import SectionedCalls
from handler.protocols.assistant.tools.grammar import Notation, ToolSchema
from handler.protocols.assistant.tools.json_text import ParameterValue, dumps
from handler.protocols.assistant.tools.parsing import NAME, SPACES, BrokenCall, Format, Steps, Tool

_MARK = "]<]minimax[>["  # the marker before each tag
_CALLS, _CALLS_END = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"
_CALL = f"{_MARK}<invoke name="
_CALL_NAME = "invoke"
_ITEM = "item"
_DEPTH = 32  # nested elements
_LONGEST_TAG = 258  # characters
_TAG = re.compile(r"</?([^\s<>]+)[^<>]*>")


class MinimaxM3(SectionedCalls):
    """Parses MiniMax M3's tool calls.

    A nested element has the type in its schema. Without a schema, it is a list if its first child is an `item`. An
    element without an end tag ends where an enclosing element ends. Elements of an object that have the same name form
    a list.
    """

    section_end, call = _CALLS_END, _CALL
    begins = (_CALLS,)

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._buffers: list[list[str]] = []  # texts of members that are not written yet, the innermost last
        self._nested = 0  # open nested objects, whose members are not written yet

    def write(self, text: str) -> None:
        if self._buffers:
            self._buffers[-1].append(text)
        else:
            super().write(text)

    def _open(self) -> Steps[None]:
        if self._nested:
            yield  # the arguments cannot be closed, as not all text is written yet
        else:
            yield from super()._open()

    def begin(self, name: str) -> None:
        self._buffers.clear()
        self._nested = 0
        super().begin(name)

    def one(self) -> Steps[None]:
        quote = yield from self.take('"', "'")
        name = yield from self.run(NAME)
        yield from self.expect(f"{quote}>")
        self.begin(name)
        schemas = self.schema(name)
        yield from self._members(_CALL_NAME, schemas, schemas.root, listed=False, depth=0)
        self.end_call()

    def _members(self, name: str, schemas: ToolSchema, schema: Any, *, listed: bool, depth: int) -> Steps[None]:
        """Write the children of an element, up to its end, as a list or an object.

        Args:
            name: the name of the enclosing element.
            listed: whether to write the children as a list.
        """
        if depth > _DEPTH:
            raise BrokenCall
        self.write("[" if listed else "{")
        nested = not listed and depth > 0
        self._nested += nested
        before = ""
        members: dict[str, list[str]] = {}  # the values of a nested object
        while (child := (yield from self._child(name))) is not None:
            if not nested:
                self.write(before if listed else f"{before}{dumps(child)}: ")
                before = ", "
                member = schemas.items(schema) if listed else schemas.property(schema, child)
                yield from self._value(child, schemas, member, depth)
            else:
                self._buffers.append([])
                yield from self._value(child, schemas, schemas.property(schema, child), depth)
                members.setdefault(child, []).append("".join(self._buffers.pop()))
        self._nested -= nested
        self.write(", ".join(f"{dumps(key)}: {_joined(values)}" for key, values in members.items()))
        self.write("]" if listed else "}")

    def _child(self, name: str) -> Steps[str | None]:
        """Return the name of the next child of an element, or None at the end of the element."""
        while True:
            yield from self.skip_until(_MARK)
            if (yield from self.expect("</", "<")) == "<":
                return (yield from self._tag())
            if (yield from self._is_end(name)):
                return None

    def _is_end(self, name: str) -> Steps[bool]:
        """Consume the rest of an end tag, and return whether it ends the element `name`."""
        if (yield from self.take(f"{name}>")):
            return True
        ends = (yield from self._tag()) == _CALL_NAME
        if ends:  # the end of the call ends all open elements
            self.held = f"{_MARK}</{_CALL_NAME}>{self.held}"
        return ends

    def _tag(self) -> Steps[str]:
        name, _ = yield from self.until(">", limit=256)
        if not name.strip():
            raise BrokenCall
        return name

    def _value(self, name: str, schemas: ToolSchema, schema: Any, depth: int) -> Steps[None]:
        """Write the value of an element and consume its end tag."""
        types = schemas.types(schema)
        space: list[str] = []
        while not (remainder := self.held.lstrip(SPACES)):
            space.append(self.advance(len(self.held)))
            yield
        space.append(self.advance(len(self.held) - len(remainder)))
        value = ParameterValue(types, self.write)
        if (yield from self.take(_MARK)):
            kind = yield from self._next_tag()
            self.held = _MARK + self.held
            if kind == "</" and types & {"array", "object"} and "string" not in types:  # an empty list or object
                self.write("[]" if "array" in types else "{}")
                yield from self._end(name)
                return
            if kind == "<" and types != {"string"}:
                listed = "array" in types or ("object" not in types and (yield from self._begins_item()))
                yield from self._members(name, schemas, schema, listed=listed, depth=depth + 1)
                return
        value.feed("".join(space))
        yield from self._text_value(value)
        value.close()
        yield from self._end(name)

    def _text_value(self, value: ParameterValue) -> Steps[None]:
        """Read text up to an end tag that the text itself did not open, and leave the tag."""
        opened: Counter[str] = Counter()  # elements that the text quotes
        while True:
            yield from self.stream_until(value.feed, _MARK)
            bracket = yield from self._next_tag()
            tag = yield from self._quoted_tag(bracket)
            if bracket == "</" and not opened[tag]:
                self.held = _MARK + self.held
                return
            if tag:
                opened[tag] += 1 if bracket == "<" else -1
            value.feed(_MARK)

    def _quoted_tag(self, bracket: str) -> Steps[str]:
        """Return the name in a tag without consuming it, or an empty string if no tag follows."""
        while bracket and ">" not in self.held[:_LONGEST_TAG] and len(self.held) < _LONGEST_TAG:
            yield from self._open()
        match = _TAG.match(self.held, 0, _LONGEST_TAG)
        return match[1] if match else ""

    def _end(self, name: str) -> Steps[None]:
        """Consume the end tag of an element, but not the end tag of another element."""
        yield from self.take(f"{_MARK}</{name}>")

    def _next_tag(self) -> Steps[str]:
        """Return `<` or `</` if the text begins with it, or else the empty string."""
        while len(self.held) < 2 and "<".startswith(self.held):
            yield
        return next((bracket for bracket in ("</", "<") if self.held.startswith(bracket)), "")

    def _begins_item(self) -> Steps[bool]:
        """Return whether the next element is an item of a list."""
        begin = f"{_MARK}<{_ITEM}>"
        while len(self.held) < len(begin):
            yield
        return self.held.startswith(begin)


def _joined(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def _write(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "".join(_element(name, member) for name, member in value.items())
    if isinstance(value, list):
        return "".join(_element(_ITEM, item) for item in value)
    return dumps(value)


def _element(name: str, value: Any) -> str:
    return f"{_MARK}<{name}>{_write(value)}{_MARK}</{name}>"


_NOTATION = Notation(
    (f'{_CALL}"NAME">', f"{_MARK}</{_CALL_NAME}>\n"), (f"{_CALLS}\n", _CALLS_END), style="", arguments=_write
)
MINIMAX_M3 = Format(
    "minimax_m3", MinimaxM3, (_MARK, "<tool_call>", "</tool_call>"), r"\]<\]minimax\[>\[", {"": _NOTATION}
)
