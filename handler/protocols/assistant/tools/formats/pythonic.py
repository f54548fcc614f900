"""Tool calls in Python syntax, such as `[f(a=1), g()]` (source: documentation of Llama 3.2 and 4, LFM2, OLMo 3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.json_text import NUMBER, PYTHON_ESCAPES, STRING, ParameterValue, dumps
from handler.protocols.assistant.tools.parsing import NAME, BrokenCall, CallParser, Format, Steps

_KEYWORD = re.compile(r"[^\W\d]\w{0,255}")
_UNQUOTED = re.compile(r"[\w.+\-]{1,256}")
_ZEROS = re.compile(r"\A(-?)0+(?=[0-9])")  # leading zeros, which models write in months
_QUOTES = ('"""', "'''", '"', "'")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_HEX = {"x": 2, "u": 4, "U": 8}
_ENDS = {"[": "]", "(": ")", "{": "}"}
_DEPTH = 32  # nested containers
_OLMO3_END = "</function_calls>"
LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
_START, _END = "<|python_start|>", "<|python_end|>"


class PythonicCalls(CallParser):
    """Base class of parsers for tool calls in Python syntax, with literals as arguments."""

    def call(self) -> Steps[None]:
        """Read one tool call.

        Raises:
            BrokenCall: the text is not a call.
        """
        name = yield from self.run(NAME)
        self.check(name)
        yield from self.expect("(")
        yield from self._arguments(name)

    def check(self, name: str) -> None:
        """Raise BrokenCall if no tool with this name may be called. By default, any name is allowed."""

    def list(self) -> Steps[None]:
        """Read the tool calls in a list, up to its end. The opening bracket has already been consumed."""
        while True:
            yield from self.skip()
            yield from self.call()
            sign = yield from self.skip()
            self.advance(1)
            if sign == "]":
                self.drop()
                return
            if sign != ",":
                raise BrokenCall

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
            bare = _ZEROS.sub(r"\1", (yield from self.run(_UNQUOTED)))
            if bare not in _WORDS and not NUMBER.fullmatch(bare):
                raise BrokenCall
            self.write(_WORDS.get(bare) or bare)

    def _members(self, end: str, depth: int) -> Steps[None]:
        """Write a list, a tuple or a dictionary as JSON.

        Args:
            end: the closing bracket.
        """
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
                raise BrokenCall
        self.advance(1)
        self.write("}" if end == "}" else "]")

    def _string(self) -> Steps[None]:
        quote = yield from self.expect(*_QUOTES)
        value = ParameterValue(STRING, self.write)
        value.feed("")
        while (yield from self.stream_until(value.feed, quote, "\\")) != quote:
            sign = yield from self.skip("")
            self.advance(1)
            if sign in _HEX:
                while len(self.held) < _HEX[sign]:
                    yield
                value.feed(_character(self.advance(_HEX[sign])))
            else:
                value.feed(PYTHON_ESCAPES.get(sign, sign if sign in "\\'\"" else "\\" + sign))
        value.close()


class Pythonic(PythonicCalls):
    """Parses tool calls in a Python list, which is the whole response or follows text.

    There is no marker before the list. After text, only the name of a tool identifies a tool call.
    """

    begins: tuple[str, ...] = ("[",)
    at_start = True

    def calls(self, begin: str) -> Steps[None]:
        if begin != "[":
            yield from self.skip()
            yield from self.expect("[")
        elif not self.tools:
            raise BrokenCall
        yield from self.list()
        yield from self.after()

    def check(self, name: str) -> None:
        if self.tools and name not in self.tools:
            raise BrokenCall

    def after(self) -> Steps[None]:
        """Consume the text that may follow the list."""
        yield from ()


def _character(code: str) -> str:
    try:
        return chr(int(code, 16))
    except (ValueError, OverflowError):
        raise BrokenCall from None


class Llama4Pythonic(Pythonic):
    """Parses Llama 4's tool calls, which are a list, possibly between two markers."""

    begins = (_START, *Pythonic.begins)
    section_end = _END

    def calls(self, begin: str) -> Steps[None]:
        if not begin:
            yield from self.skip()
            yield from self.take(_START)
        yield from super().calls(begin)

    def after(self) -> Steps[None]:
        yield from self.skip()
        yield from self.expect(_END)


class Lfm2(PythonicCalls):
    """Parses LFM2's tool calls, which are a list between two markers."""

    begins = LFM2_MARKS[:1]
    section_end = LFM2_MARKS[1]

    def calls(self, begin: str) -> Steps[None]:
        yield from self.skip()
        yield from self.expect("[")
        yield from self.list()
        yield from self.skip()
        yield from self.take(LFM2_MARKS[1])


class Olmo3(PythonicCalls):
    """Parses OLMo 3's tool calls, which are on separate lines without a list around them."""

    begins = ("<function_calls>",)
    section_end = _OLMO3_END

    def calls(self, begin: str) -> Steps[None]:
        while True:
            yield from self.skip()
            if (yield from self.take(_OLMO3_END)):
                return
            yield from self.call()


def _write(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _between(begin: str, end: str, between: str = ", ") -> dict[str, Notation]:
    return {"": Notation(("NAME(", ")"), (begin, end), between, style="", arguments=_write)}


PYTHONIC = Format("pythonic", Pythonic, notations=_between("[", "]"))
LLAMA4_PYTHONIC = Format(
    "llama4_pythonic",
    Llama4Pythonic,
    (_START, _END),
    r"<\|python_start\|>",
    _between(f"{_START}[", f"]{_END}"),
)
LFM2 = Format(
    "lfm2",
    Lfm2,
    LFM2_MARKS,
    r"<\|tool_(?:call|list)_start\|>|keep_past_thinking(?s:.*)List of tools: \[",
    _between(f"{LFM2_MARKS[0]}[", f"]{LFM2_MARKS[1]}"),
)
"""Source: the chat templates of LFM2 and 2.5, and the models' documentation, as some templates show no tool calls."""

OLMO3 = Format(
    "olmo3",
    Olmo3,
    (*Olmo3.begins, _OLMO3_END),
    "<function_calls>",
    _between(Olmo3.begins[0], _OLMO3_END, "\n"),
)
"""Source: vLLM 0.33 and OLMo 3's documentation."""
