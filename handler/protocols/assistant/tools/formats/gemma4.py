"""Gemma 4's calls: `call:NAME{key:value}` in a notation of its own, between marks (the model's template)."""

from __future__ import annotations

import re
from typing import Any

from handler.protocols.assistant.tools.json_text import ParameterValue, as_json, dumps, property_of, types_of
from handler.protocols.assistant.tools.parsing import NAME, SPACES, Broken, CallParser, Format, Steps

_CALL, _CALL_END = "<|tool_call>", "<tool_call|>"
_QUOTE = '<|"|>'
_KEY = re.compile(r'[^:,{}\[\]<>"\s]{1,256}')
_BARE = re.compile(r"[^,{}\[\]<>]{1,256}")
_STRING = frozenset({"string"})
_DEPTH = 32  # of objects and lists in one another


class Gemma4(CallParser):
    """Strings stand between marks, with nothing escaped; a bare value is JSON's, or a string where it is none."""

    begins = (_CALL,)

    def calls(self, begin: str) -> Steps[None]:
        yield from self.skip()
        yield from self.take("call:", ":")
        name = yield from self.run(NAME)
        if (yield from self.skip()) != "{":
            raise Broken
        self.begin(name)
        schema = self.tools.get(name, {}).get("parameters")
        yield from self._members("}", schema, schema, 0)
        yield from self.skip()
        yield from self.expect(_CALL_END)
        self.end_call()

    def _members(self, end: str, schema: Any, root: Any, depth: int) -> Steps[None]:
        """Read an object or a list, whose sign comes next."""
        if depth > _DEPTH:
            raise Broken
        self.write(self.advance(1))
        before = ""
        while (sign := (yield from self.skip(SPACES + ","))) != end:
            member = schema.get("items") if isinstance(schema, dict) else None
            if end == "}":
                key = yield from self._key()
                member = property_of(schema, key, root)
                self.write(f"{before}{dumps(key)}: ")
                sign = yield from self.skip()
            else:
                self.write(before)
            before = ", "
            if sign in "{[":
                yield from self._members("}" if sign == "{" else "]", member, root, depth + 1)
            elif (yield from self.take(_QUOTE)):
                value = ParameterValue(_STRING, self.write)
                yield from self.stream_until(value.feed, _QUOTE)
                value.close()
            else:
                bare = yield from self.run(_BARE)
                self.write(as_json(bare.strip(SPACES), types_of(member, root) or frozenset({"any"})))
        self.write(self.advance(1))

    def _key(self) -> Steps[str]:
        if (yield from self.take(_QUOTE)):
            key, _ = yield from self.until(_QUOTE)
        else:
            key = yield from self.run(_KEY)
        yield from self.skip()
        yield from self.expect(":")
        return key


GEMMA4 = Format("gemma4", Gemma4, (_CALL, _CALL_END, _QUOTE), r"<\|tool_call>")
