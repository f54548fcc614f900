"""Tool calls of Gemma 4 and FunctionGemma, which are `call:NAME{key:value}` between markers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from handler.protocols.assistant.events import Event
from handler.protocols.assistant.tools.grammar import ANY, Notation, ToolSchema
from handler.protocols.assistant.tools.json_text import STRING, ParameterValue, as_json, dumps
from handler.protocols.assistant.tools.parsing import NAME, SPACES, BrokenCall, CallParser, Format, Steps

_KEY = re.compile(r'[^:,{}\[\]<>"\s]{1,256}')
_AFTER_UNQUOTED = tuple(",{}[]<>")
_PLAIN_QUOTES = ('"', "'")
_BEFORE_STRING = tuple(":,[")
_DEPTH = 32  # nested objects and lists


class Gemma4(CallParser):
    """Parses Gemma 4's tool calls.

    Strings are enclosed in quote tokens and have no escapes. Plain quotes are also read, as the model writes JSON at
    times. All values are converted to the types in their schemas,
    even quoted values, because vLLM's chat template for FunctionGemma quotes all values. Without a schema, an unquoted
    value is parsed as JSON if possible, and is treated as a string otherwise.

    Attributes:
        call_end: the token after a call.
        quote: the token before and after a string.
    """

    begins: tuple[str, ...] = ("<|tool_call>",)
    within = ("}", ",")
    call_end = "<tool_call|>"
    quote = '<|"|>'
    _waits = False  # whether the text after a quote decides if it ends the string

    def calls(self, begin: str) -> Steps[None]:
        yield from self.skip()
        if (yield from self.take(self.call_end, "call:", ":")) == self.call_end:
            return
        name = yield from self.run(NAME)
        if (yield from self.skip()) != "{":
            raise BrokenCall
        self.begin(name)
        schema = self.schema(name)
        yield from self._members("}", schema, schema.root)
        yield from self.skip()
        yield from self.expect(self.call_end)
        self.end_call()

    def flush(self) -> list[Event]:
        events: list[Event] = []
        if self._waits and self._steps is not None:
            self._steps.throw(_ResponseEnd())
            events = self.pop()
        return [*events, *super().flush()]

    def _members(self, ends: str, schemas: ToolSchema, schema: Any) -> Steps[None]:
        """Write an object or a list as JSON.

        Args:
            ends: the closing brackets of all open objects and lists. The innermost bracket is the last.
        """
        end = ends[-1]
        if len(ends) > _DEPTH + 1:
            raise BrokenCall
        self.write(self.advance(1))
        before, keys = "", set[str]()
        while (sign := (yield from self.skip(SPACES + ","))) != end:
            member = schemas.items(schema)
            if end == "}":
                key = yield from self._key()
                if key in keys:
                    self.write(ends[::-1])
                    raise BrokenCall
                keys.add(key)
                member = schemas.property(schema, key)
                self.write(f"{before}{dumps(key)}: ")
                sign = yield from self.skip()
            else:
                self.write(before)
            before = ", "
            if sign in "{[":
                yield from self._members(ends + ("}" if sign == "{" else "]"), schemas, member)
            else:
                yield from self._value(ends, schemas.types(member))
        self.write(self.advance(1))

    def _value(self, ends: str, types: frozenset[str]) -> Steps[None]:
        """Write a string or an unquoted value."""
        quote = yield from self.take(self.quote, *_PLAIN_QUOTES)
        if quote == self.quote:
            value = ParameterValue(STRING if "string" in types else types, self.write)
            yield from self._string(quote, ends, value.feed)
            value.close()
            return
        parts: list[str] = []
        if quote:
            yield from self._string(quote, ends, parts.append)
            self.write(as_json(_unescape("".join(parts)), types or STRING))
            return
        end = yield from self.stream_until(parts.append, *_AFTER_UNQUOTED)
        self.put_back(end)
        text = "".join(parts).strip(SPACES)
        if not text:
            raise BrokenCall
        self.write(as_json(text, types or ANY))

    def _string(self, quote: str, ends: str, write: Callable[[str], None]) -> Steps[None]:
        """Pass the text of a string to `write`, up to its closing quote, which the rest of the call follows.

        Other quotes belong to the text, which may itself contain a call.
        """
        quoted = False  # whether a string in a quoted call is open
        last = ""

        def pass_on(text: str) -> None:
            nonlocal last
            last = text[-1:] or last
            write(text)

        while True:
            yield from self.stream_until(pass_on, quote)
            if quoted:
                quoted = False
            elif (yield from self._ends_string(ends)):
                return
            else:
                quoted = quote == self.quote and last in _BEFORE_STRING
            pass_on(quote)

    def _ends_string(self, ends: str) -> Steps[bool]:
        """Return whether the text after a quote continues the call."""
        self._waits = True
        try:
            while (decision := self._continues(ends)) is None:
                yield from self._open()
        except _ResponseEnd:
            decision = True
        self._waits = False
        return decision

    def _continues(self, ends: str) -> bool | None:
        """Return whether the text after a string continues the call, or None if more text is needed to decide."""
        remainder = self.held.lstrip(SPACES)
        for number, end in enumerate(reversed(ends)):
            if remainder[:1] == ",":
                inner = ends[len(ends) - 1 - number]
                return True if inner == "]" else _begins_member(remainder[1:])
            if remainder[:1] != end:
                return None if not remainder else False
            remainder = remainder[1:].lstrip(SPACES)
        begun = remainder[: len(self.call_end)]
        if begun == self.call_end:
            return True
        return None if self.call_end.startswith(begun) else False

    def _key(self) -> Steps[str]:
        quote = yield from self.take(self.quote, *_PLAIN_QUOTES)
        if quote:
            key, _ = yield from self.until(quote)
        else:
            key = yield from self.run(_KEY)
        yield from self.skip()
        yield from self.expect(":")
        return key


class _ResponseEnd(Exception):
    """Raised within the steps of a parser if the response ends after a quote."""


_LONGEST_KEY = 300  # characters, with quotes and spaces


def _begins_member(text: str) -> bool | None:
    """Return whether a text after a comma begins with a key or a closing bracket, or None if that is undecided."""
    if text.lstrip(SPACES)[:1] in ("}", "]"):
        return True
    before, colon, _ = text[:_LONGEST_KEY].partition(":")
    if colon or "," in before or len(text) > _LONGEST_KEY:
        return bool(colon) and not any(character in before for character in ",{}[]")
    return None


def _unescape(text: str) -> str:
    """Return the text of a string in plain quotes, in which a backslash begins an escape of JSON."""
    try:
        value = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text.replace("\\'", "'").replace('\\"', '"')
    return value if isinstance(value, str) else text


class FunctionGemma(Gemma4):
    begins = ("<start_function_call>",)
    call_end = "<end_function_call>"
    quote = "<escape>"


def _marks(parser: type[Gemma4]) -> tuple[str, ...]:
    return (*parser.begins, parser.call_end, parser.quote)


def _notations(parser: type[Gemma4]) -> dict[str, Notation]:
    call = (f"{parser.begins[0]}call:NAME{{", f"}}{parser.call_end}")
    return {"": Notation(call, style="", arguments=functools.partial(_write_members, parser.quote))}


def _write_members(quote: str, members: Mapping[str, Any]) -> str:
    keys = (key if _KEY.fullmatch(key) else f"{quote}{key}{quote}" for key in members)
    return ",".join(f"{key}:{_write(quote, value)}" for key, value in zip(keys, members.values(), strict=True))


def _write(quote: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return f"{{{_write_members(quote, value)}}}"
    if isinstance(value, list):
        return f"[{','.join(_write(quote, item) for item in value)}]"
    return dumps(value)


GEMMA4 = Format("gemma4", Gemma4, _marks(Gemma4), r"<\|tool_call>", _notations(Gemma4))
FUNCTIONGEMMA = Format(
    "functiongemma", FunctionGemma, _marks(FunctionGemma), "<start_function_call>", _notations(FunctionGemma)
)
"""Source: vLLM 0.33 and FunctionGemma's documentation."""
