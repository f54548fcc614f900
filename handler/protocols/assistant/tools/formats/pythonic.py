"""Calls as a list of Python's: `[f(a=1), g()]` (the documentation of Llama 3.2 and 4)."""

from __future__ import annotations

import re

from handler.protocols.assistant.tools.json_text import ParameterValue, dumps
from handler.protocols.assistant.tools.parsing import NAME, Broken, CallParser, Format, Steps

_KEYWORD = re.compile(r"[^\W\d]\w{0,255}")
_BARE = re.compile(r"[\w.+\-]{1,256}")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_QUOTES = ('"""', "'''", '"', "'")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_ENDS = {"[": "]", "(": ")", "{": "}"}
_DEPTH = 32  # of containers in one another
_START, _END = "<|python_start|>", "<|python_end|>"


class Pythonic(CallParser):
    """The list is the answer, or follows text: there a tool's name makes it one, for no mark says what it is."""

    begins: tuple[str, ...] = ("[",)
    at_start = True

    def calls(self, begin: str) -> Steps[None]:
        if begin != "[":
            yield from self.skip()
            yield from self.expect("[")
        elif not self.tools:
            raise Broken
        while True:
            yield from self.skip()
            name = yield from self.run(NAME)
            if self.tools and name not in self.tools:
                raise Broken
            yield from self.expect("(")
            yield from self._arguments(name)
            sign = yield from self.skip()
            self.advance(1)
            if sign == "]":
                self.drop()
                yield from self.after()
                return
            if sign != ",":
                raise Broken

    def after(self) -> Steps[None]:
        """Read what may follow the list."""
        yield from ()

    def _arguments(self, name: str) -> Steps[None]:
        begun = False
        while True:
            sign = yield from self.skip()
            if sign == ")":
                break
            key = yield from self.run(_KEYWORD)
            yield from self.skip()
            yield from self.expect("=")
            if not begun:
                self.begin(name)
            self.write(f"{', ' if begun else '{'}{dumps(key)}: ")
            begun = True
            yield from self._value(0)
            if (yield from self.skip()) == ",":
                self.advance(1)
        self.advance(1)
        if not begun:
            self.begin(name)
        self.write("}" if begun else "{}")
        self.end_call()

    def _value(self, depth: int) -> Steps[None]:
        sign = yield from self.skip()
        if sign in _ENDS and depth <= _DEPTH:
            yield from self._members(_ENDS[sign], depth)
        elif sign in "\"'":
            yield from self._string()
        else:
            bare = yield from self.run(_BARE)
            if bare not in _WORDS and not _NUMBER.fullmatch(bare):
                raise Broken
            self.write(_WORDS.get(bare) or bare)

    def _members(self, end: str, depth: int) -> Steps[None]:
        """Read a list, a tuple or a dictionary, whose sign comes next."""
        self.advance(1)
        self.write("{" if end == "}" else "[")
        before = ""
        while (yield from self.skip()) != end:
            self.write(before)
            before = ", "
            if end == "}":
                yield from self._string()
                yield from self.skip()
                yield from self.expect(":")
                self.write(": ")
            yield from self._value(depth + 1)
            if (yield from self.skip()) == ",":
                self.advance(1)
            elif self.held[0] != end:
                raise Broken
        self.advance(1)
        self.write("}" if end == "}" else "]")

    def _string(self) -> Steps[None]:
        quote = yield from self.expect(*_QUOTES)
        value = ParameterValue(frozenset({"string"}), self.write)
        value.feed("")
        while (yield from self.stream_until(value.feed, quote, "\\")) != quote:
            sign = yield from self.skip("")
            self.advance(1)
            if sign in _HEX:
                while len(self.held) < _HEX[sign]:
                    yield
                value.feed(_character(self.advance(_HEX[sign])))
            else:
                value.feed(_ESCAPES.get(sign, sign if sign in "\\'\"" else "\\" + sign))
        value.close()


def _character(code: str) -> str:
    try:
        return chr(int(code, 16))
    except (ValueError, OverflowError):
        raise Broken from None


class Llama4Pythonic(Pythonic):
    """The list may stand between two marks."""

    begins = (_START, *Pythonic.begins)

    def calls(self, begin: str) -> Steps[None]:
        if not begin:
            yield from self.skip()
            yield from self.take(_START)
        yield from super().calls(begin)

    def after(self) -> Steps[None]:
        yield from self.skip()
        yield from self.expect(_END)


PYTHONIC = Format("pythonic", Pythonic)
LLAMA4_PYTHONIC = Format("llama4_pythonic", Llama4Pythonic, (_START, _END), r"<\|python_start\|>")
