"""MiniMax M3's tool calls, whose parameters are nested elements (source: its chat template)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from handler.protocols.assistant.tools.formats.sections import SectionedCalls
from handler.protocols.assistant.tools.grammar import Notation, ToolSchema
from handler.protocols.assistant.tools.json_text import ParameterValue, dumps
from handler.protocols.assistant.tools.parsing import NAME, SPACES, BrokenCall, Format, Steps

_MARK = "]<]minimax[>["  # the marker before each tag
_CALLS, _CALLS_END = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"
_CALL = f"{_MARK}<invoke name="
_CALL_NAME = "invoke"
_ITEM = "item"
_DEPTH = 32  # nested elements
_LONGEST_TAG = 258  # characters
_END_TAG = re.compile(rf"{re.escape(_MARK)}</[^<>\]]*>?")
_TAG = re.compile(r"</?([^\s<>]+)[^<>]*>")


class MinimaxM3(SectionedCalls):
    """Parses MiniMax M3's tool calls.

    A nested element has the type in its schema. Without a schema, it is a list if its first child is an `item`. An
    element without an end tag ends where an enclosing element ends. Elements of an object that have the same name form
    a list.
    """

    section_end, call = _CALLS_END, _CALL
    begins = (_CALLS,)
    within = (_MARK, "<")

    def _is_markup(self, text: str) -> bool:
        return super()._is_markup(_END_TAG.sub(_MARK, text))

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
        if listed:
            self.write("[")
        before = ""
        members: dict[str, list[str]] = {}  # the values of a nested object
        while (child := (yield from self._child(name))) is not None:
            member = schemas.items(schema) if listed else schemas.property(schema, child)
            if listed and child != _ITEM:
                raise BrokenCall
            if listed:
                self.write(before)
                before = ", "
                yield from self._value(child, schemas, member, depth)
            elif not depth:
                self.write_key(child)
                yield from self._value(child, schemas, member, depth)
            else:
                value = yield from self.captured(self._value(child, schemas, member, depth))
                members.setdefault(child, []).append(value)
        if depth and not listed:
            self.write(f"{{{', '.join(f'{dumps(key)}: {_joined(values)}' for key, values in members.items())}}}")
        elif listed:
            self.write("]")
        else:
            self.write("}" if self._keys else "{}")

    def _child(self, name: str) -> Steps[str | None]:
        """Return the name of the next child of an element, or None at the end of the element.

        The end of the call ends all open elements, and other ends are text.
        """
        while True:
            yield from self.beside(_MARK)
            if (yield from self.expect("</", "<")) == "<":
                return (yield from self._tag())
            tag = yield from self._tag()
            if tag == name:
                return None
            if tag == _CALL_NAME:
                self.put_back(f"{_MARK}</{tag}>")
                return None
            self.put_beside(f"{_MARK}</{tag}>")

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
            self.put_back(_MARK)
            if kind == "</" and types & {"array", "object"} and "string" not in types:  # an empty list or object
                self.write("[]" if "array" in types else "{}")
                yield from self._end(name)
                return
            if kind == "<" and types != {"string"}:
                listed = "array" in types or ("object" not in types and (yield from self._begins_item()))
                members = self._members(name, schemas, schema, listed=listed, depth=depth + 1)
                if listed:
                    yield from members
                else:
                    self.write((yield from self.captured(members)))
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
                self.put_back(_MARK)
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
