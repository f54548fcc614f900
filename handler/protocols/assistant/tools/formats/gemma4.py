"""Tool calls of Gemma 4 and FunctionGemma, which are `call:NAME{key:value}` between markers."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from handler.protocols.assistant.tools.grammar import ANY, Notation, ToolSchema
from handler.protocols.assistant.tools.json_text import STRING, ParameterValue, as_json, dumps
from handler.protocols.assistant.tools.parsing import NAME, SPACES, BrokenCall, CallParser, Format, Steps

_KEY = re.compile(r'[^:,{}\[\]<>"\s]{1,256}')
_UNQUOTED = re.compile(r"[^,{}\[\]<>]{1,256}")
_DEPTH = 32  # nested objects and lists


class Gemma4(CallParser):
    """Parses Gemma 4's tool calls.

    Strings are enclosed in quote tokens and have no escapes. All values are converted to the types in their schemas,
    even quoted values, because vLLM's chat template for FunctionGemma quotes all values. Without a schema, an unquoted
    value is parsed as JSON if possible, and is treated as a string otherwise.

    Attributes:
        call_end: the token after a call.
        quote: the token before and after a string.
    """

    begins: tuple[str, ...] = ("<|tool_call>",)
    call_end = "<tool_call|>"
    quote = '<|"|>'

    def calls(self, begin: str) -> Steps[None]:
        yield from self.skip()
        if (yield from self.take(self.call_end, "call:", ":")) == self.call_end:
            return
        name = yield from self.run(NAME)
        if (yield from self.skip()) != "{":
            raise BrokenCall
        self.begin(name)
        schema = self.schema(name)
        yield from self._members("}", schema, schema.root, 0)
        yield from self.skip()
        yield from self.expect(self.call_end)
        self.end_call()

    def _members(self, end: str, schemas: ToolSchema, schema: Any, depth: int) -> Steps[None]:
        """Write an object or a list as JSON.

        Args:
            end: the closing bracket.
        """
        if depth > _DEPTH:
            raise BrokenCall
        self.write(self.advance(1))
        before = ""
        while (sign := (yield from self.skip(SPACES + ","))) != end:
            member = schemas.items(schema)
            if end == "}":
                key = yield from self._key()
                member = schemas.property(schema, key)
                self.write(f"{before}{dumps(key)}: ")
                sign = yield from self.skip()
            else:
                self.write(before)
            before = ", "
            if sign in "{[":
                yield from self._members("}" if sign == "{" else "]", schemas, member, depth + 1)
            elif (yield from self.take(self.quote)):
                types = schemas.types(member)
                value = ParameterValue(STRING if "string" in types else types, self.write)
                yield from self.stream_until(value.feed, self.quote)
                value.close()
            elif sign in "\"'" and end == "]":
                yield from self._plain_string(sign, schemas.types(member))
            else:
                bare = yield from self.run(_UNQUOTED)
                self.write(as_json(bare.strip(SPACES), schemas.types(member) or ANY))
        self.write(self.advance(1))

    def _plain_string(self, quote: str, types: frozenset[str]) -> Steps[None]:
        """Write a list's string in the quotes of JSON or Python, which the model writes at times."""
        self.advance(1)
        text, _ = yield from self.until(quote)
        self.write(as_json(text, types or STRING))

    def _key(self) -> Steps[str]:
        if (yield from self.take(self.quote)):
            key, _ = yield from self.until(self.quote)
        else:
            key = yield from self.run(_KEY)
        yield from self.skip()
        yield from self.expect(":")
        return key


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
