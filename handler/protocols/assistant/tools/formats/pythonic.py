"""Tool calls in Python syntax, such as `[f(a=1), g()]` (source: documentation of Llama 3.2 and 4, LFM2, OLMo 3)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.json_text import NUMBER, PYTHON_ESCAPES, STRING, ParameterValue, dumps
from handler.protocols.assistant.tools.parsing import NAME, SPACES, BrokenCall, CallParser, Format, Steps

_KEYWORD = re.compile(r"[^\W\d]\w{0,255}")
_UNQUOTED = re.compile(r"[\w.+\-]{1,256}")
_FLOAT = re.compile(r"[+-]?(?=[0-9_]*[.eE])[0-9_]*\.?[0-9_]*(?:[eE][+-]?[0-9_]+)?")
_PREFIX = re.compile(r"(?i:[ruf]|fr|rf)(?=[\"'])")
_CLOSED = re.compile(rf"[,)\]}}:#\"']|{_PREFIX.pattern}")
"""Matches what may follow a string."""
_NEXT_KEYWORD = re.compile(r"[^\W\d]\w{0,255}\s*=(?!=)")
"""Matches an argument without a comma before it, as a template of Gemma 3 writes them."""
_NEXT_KEYWORD_PERHAPS = re.compile(r"[^\W\d]\w{0,255}\s*=?")
_KEYWORD_FOLLOWS = re.compile(r",\s*(?:[^\W\d]\w*\s*=|\))")
_KEYWORD_MAY_FOLLOW = re.compile(r",\s*\w{0,256}\s*")
_ZEROS = re.compile(r"\A(-?)0+(?=[0-9])")  # leading zeros, which models write in months
_QUOTES = ('"""', "'''", '"', "'")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_OCTAL = re.compile("[0-7]{1,3}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ENDS = {"[": "]", "(": ")", "{": "}"}
_DEPTH = 32  # nested containers
_OLMO3_END = "</function_calls>"
LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
_START, _END = "<|python_start|>", "<|python_end|>"


class PythonicCalls(CallParser):
    """Base class of parsers for tool calls in Python syntax, with literals as arguments."""

    within = (*"'\"()[],=",)
    follows = re.compile(r"[,\]#]")
    """Matches what may follow a call."""
    _quotes = False  # whether the current string contains quotes of its own kind

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
        character, count = ",", self.count
        while character == "," and (yield from self.skip()) != "]":
            yield from self.call()
            character, comment = (yield from self.ahead()), ""
            if character == "#":
                comment, _ = yield from self.until("\n")
                character = yield from self.ahead()
            if character not in ",]":
                raise BrokenCall
            self.end_call()
            self.show(comment)
            if character == ",":
                self.advance(1)
        if self.count == count:
            raise BrokenCall
        yield from self.expect("]")
        self.drop()

    def _arguments(self, name: str) -> Steps[None]:
        self.begin(name)
        while (yield from self.skip()) != ")":
            key = yield from self.run(_KEYWORD)
            yield from self.skip()
            yield from self.expect("=")
            self.write_key(key)
            yield from self._value(")")
            if (yield from self.skip()) == ",":
                self.advance(1)
        self.advance(1)
        self.write("}" if self._keys else "{}")

    def _value(self, ends: str) -> Steps[None]:
        """Write a literal as JSON.

        Args:
            ends: the closing brackets of the call and of all open containers. The innermost bracket is the last.
        """
        character = yield from self.skip()
        if character == "[" and len(ends) <= _DEPTH + 1:
            self.advance(1)
            self.write("[")
            if (yield from self.skip()) != "]":
                yield from self._value(ends + "]")
            yield from self._items(ends + "]")
        elif character in _ENDS and len(ends) <= _DEPTH + 1:
            yield from self._group(ends + _ENDS[character])
        elif character in "\"'":
            yield from self._strings("", ends)
        else:
            bare = yield from self.run(_UNQUOTED)
            if self.held[0] in "\"'" and _PREFIX.match(bare + self.held[0]):
                yield from self._strings(bare.lower(), ends)
            else:
                self.write(_WORDS.get(bare) or _number(bare))

    def _items(self, ends: str) -> Steps[None]:
        """Write the items of a list after its first item, up to its end."""
        while (character := (yield from self.skip())) != ends[-1]:
            if character != ",":
                raise BrokenCall
            self.advance(1)
            if (yield from self.skip()) != ends[-1]:
                self.write(", ")
                yield from self._value(ends)
        self.advance(1)
        self.write("]")

    def _group(self, ends: str) -> Steps[None]:
        """Write a value in parentheses, a tuple, a set or a dictionary. The first value shows which it is."""
        is_tuple = self.advance(1) == "("
        if (yield from self.skip()) == ends[-1]:
            self.advance(1)
            self.write("[]" if is_tuple else "{}")
            return
        first = yield from self.captured(self._value(ends))
        character = yield from self.skip()
        if is_tuple and character == ")":
            self.advance(1)
            self.write(first)
        elif character == ":" and not is_tuple:
            yield from self._members(first, ends)
        else:
            self.write(f"[{first}")
            yield from self._items(ends)

    def _members(self, key: str, ends: str) -> Steps[None]:
        """Write a dictionary.

        Args:
            key: the JSON of its first key.
        """
        keys: set[str] = set()
        while key:
            key = key if key[0] == '"' else dumps(key)
            if key in keys or key[1:2] in "[{":
                raise BrokenCall
            yield from self.expect(":")
            self.write(f"{', ' if keys else '{'}{key}: ")
            keys.add(key)
            yield from self._value(ends)
            if (yield from self.skip()) == ",":
                self.advance(1)
            if (yield from self.skip()) == "}":
                key = ""
            else:
                key = yield from self.captured(self._value(ends))
                yield from self.skip()
        self.advance(1)
        self.write("}")

    def _strings(self, prefix: str, ends: str) -> Steps[None]:
        """Write adjacent strings as one string."""
        value = ParameterValue(STRING, self.write)
        value.feed("")
        character = '"'
        while character in "\"'":
            yield from self._string(value, prefix, ends)
            character, prefix = (yield from self.ahead()), ""
            if character in "rRuUfF":
                prefix = yield from self.run(_PREFIX)
                character = '"'
        value.close()

    def _string(self, value: ParameterValue, prefix: str, ends: str) -> Steps[None]:
        """Read a string up to the quote that ends it.

        If other text than a literal's follows a quote, the string contains quotes of its own kind, as commands do that
        models write. Then the string ends at the first quote that the rest of the call follows.
        """
        quote = yield from self.expect(*_QUOTES)
        braces = ("{", "}") if "f" in prefix else ()
        self._quotes = False
        while True:
            character = yield from self.stream_until(value.feed, quote, "\\", *braces)
            if character == quote:
                self.accept()
                while (ended := self._continues(ends) if self._quotes else self._is_closed(ends)) is None:
                    yield from self._open()
                if ended:
                    self._quotes = False
                    return
                self._quotes = True
            elif character != "\\":
                yield from self.expect(character)  # a single brace begins an expression
            elif "r" in prefix:
                yield from self.skip("")
                character += self.advance(1)
            else:
                character = yield from self._escape()
            value.feed(character)

    def _open(self) -> Steps[None]:
        if self._quotes:
            yield  # the string may be a call and the text after it
        else:
            yield from super()._open()

    def _escape(self) -> Steps[str]:
        character = yield from self.skip("")
        if character in "01234567":
            return chr(int((yield from self.run(_OCTAL)), 8))
        self.advance(1)
        if character not in _HEX:
            return PYTHON_ESCAPES.get(character, character if character in "\\'\"" else "\\" + character)
        while len(self.held) < _HEX[character]:
            yield
        return _character(self.advance(_HEX[character]))

    def _is_closed(self, ends: str) -> bool | None:
        """Return whether the text after a quote can follow a string, or None if it is undecided."""
        rest = self.held.lstrip()
        if _CLOSED.match(rest):
            return True
        if not rest or _PREFIX.match(f"{rest}'"):
            return None
        if ends != ")" or not _NEXT_KEYWORD_PERHAPS.fullmatch(rest):
            return ends == ")" and _NEXT_KEYWORD.match(rest) is not None
        return None

    def _continues(self, ends: str) -> bool | None:
        """Return whether the text after a quote continues the call, or None if it is undecided."""
        rest = self.held.lstrip()
        for end in reversed(ends):
            if rest[:1] != end:
                break
            rest = rest[1:].lstrip()
        else:
            return self.follows.match(rest) is not None if rest else None
        if rest[:1] != ",":
            return (rest[0] == ":" and end == "}") if rest else None
        if end != ")" or _KEYWORD_FOLLOWS.match(rest):
            return True
        return None if _KEYWORD_MAY_FOLLOW.fullmatch(rest) else False


def _number(text: str) -> str:
    """Return the JSON of a number in Python notation.

    Raises:
        BrokenCall: the text is not a number.
    """
    text = _ZEROS.sub(r"\1", text)
    if NUMBER.fullmatch(text):
        return text
    try:
        value = float(text) if _FLOAT.fullmatch(text) else int(text, 0)
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise BrokenCall from None


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
    follows = re.compile(r"[\w<]")
    section_end = _OLMO3_END

    def calls(self, begin: str) -> Steps[None]:
        while True:
            yield from self.skip()
            if (yield from self.take(_OLMO3_END)):
                return
            yield from self.call()
            if self._unsent and (yield from self.ahead("")) not in f"{SPACES}<":
                raise BrokenCall  # arguments follow a call without arguments
            self.end_call()


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
