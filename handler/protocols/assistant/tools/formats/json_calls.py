"""Calls as JSON objects with `name` and `arguments` (or `parameters`), alone or in a list."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.json_text import ControlEscapes, JsonEnd, dumps, is_object, refuse_constant
from handler.protocols.assistant.tools.parsing import SPACES, Broken, CallParser, Format, Steps, Tool

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BEGUN = re.compile(
    r'\{\s*(?:"(?:n(?:a(?:me?)?)?)?|"name"\s*|"name"\s*:\s*|"name"\s*:\s*"(?:[^"\\]|\\.)*\\?|'
    r'"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*(?:,\s*(?:"\w*|"\w*"\s*|"(?:arguments|parameters)"\s*:\s*)?)?)?'
)
"""The start of a call, as far as it has come."""

_OPEN = re.compile(r'\{\s*(?:"name"\s*:\s*"(?:[^"\\]|\\.)*\\?)?')
"""The start of a call, up to an unfinished name."""

_LONGEST_HEAD = 512
"""The longest head of a call, in characters: names have at most 64, each perhaps written as an escape."""


class JsonCalls(CallParser):
    """Arguments stream where the name precedes them; another call comes whole.

    In a list an object that is no call is text, and the others are calls all the same.

    Attributes:
        end: the mark after the calls; without one they end where a list does, or where no other object follows.
        marked: something before them says that they are calls. Otherwise a name alone is none, nor is an empty list.
    """

    end = ""
    marked = True

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._others: list[str] = []  # objects of a list that are no calls, since its last one

    def calls(self, begin: str) -> Steps[None]:
        listed, count = False, self.count
        self._others.clear()
        while True:
            sign = yield from self.skip(SPACES + ",;")
            if self.end and (yield from self.take(self.end)):
                return
            if sign == "{":
                yield from self._object(listed=listed)
            elif sign == "[" and not listed:
                self.advance(1)
                listed = True
            elif sign == "]" and listed:
                self.advance(1)
                if self.count == count and (self._others or not self.marked):
                    raise Broken
                self._show_others()
                if not self.end:
                    return
                if self.count:
                    self.drop()
            else:
                raise Broken

    def begin(self, name: str) -> None:
        self._show_others()
        super().begin(name)

    def _show_others(self) -> None:
        self.show("".join(self._others))
        self._others.clear()

    def _object(self, *, listed: bool) -> Steps[None]:
        """Read a call: first up to its name."""
        head = yield from self._head()
        if head:
            yield from self._streamed(head)
            return
        text = yield from self.whole()
        call = _call(text, alone=self.marked)
        if call is None:  # nor is anything in it: to look would be to read nested ones again and again
            if not listed:
                raise Broken
            self._others.append(text)
            return
        self.begin(call[0])
        self.write(call[1])
        self.end_call()

    def _head(self) -> Steps[re.Match[str] | None]:
        """Return the start of a call up to its arguments; None for an object in another order."""
        end, scanned = JsonEnd(), 0
        while True:
            head = _HEAD.match(self.held, 0, _LONGEST_HEAD)
            if head:
                return head
            if len(self.held) > _LONGEST_HEAD:
                if _OPEN.fullmatch(self.held, 0, _LONGEST_HEAD):
                    raise Broken
                return None
            if end.feed(self.held[scanned:]) is not None:
                return None
            scanned = len(self.held)
            yield

    def _streamed(self, head: re.Match[str]) -> Steps[None]:
        try:
            name = json.loads(head[1])
            name.encode()
        except ValueError:
            raise Broken from None
        self.advance(head.end())
        self.begin(name)
        yield from self.json()
        end = JsonEnd(depth=1, stop="<")
        while (size := end.feed(self.held)) is None:
            self.advance(len(self.held))
            yield
        self.advance(size)
        self.end_call()


class List(JsonCalls):
    """The answer is a list of calls, which structured output makes."""

    at_start = True


class Hermes(JsonCalls):
    begins = ("<tool_call>",)
    end = "</tool_call>"


class Granite(JsonCalls):
    begins = ("<|tool_call|>", "<tool_call>")


_SIGNS = ("{", "[")


class CallsInText(JsonCalls):
    """Without a mark, what follows other text is a call only where the request has a tool of its name."""

    def calls(self, begin: str) -> Steps[None]:
        if begin not in _SIGNS:
            self.marked = bool(begin)
            yield from super().calls(begin)
            return
        if begin == "{":
            self.held = begin + self.held
            self.drop()
        listed, count = begin == "[", self.count
        while (yield from self.skip(SPACES + ",;")) == "{":
            yield from self._called()
        if self.count == count or not listed or self.held[0] != "]":
            raise Broken
        self.advance(1)

    def _called(self) -> Steps[None]:
        """Read an object whose name is a tool's, and comes first."""
        while (head := _HEAD.match(self.held, 0, _LONGEST_HEAD)) is None:
            if len(self.held) > _LONGEST_HEAD or not _BEGUN.fullmatch(self.held):
                self._break()
            yield
        if head[1][1:-1] not in self.tools:
            self._break()
        yield from self._streamed(head)

    def _break(self) -> None:
        self.advance(1)  # what follows the brace may be a call
        raise Broken


class Llama3(CallsInText):
    begins = ("<|python_tag|>", *_SIGNS)
    at_start = True


class Phi4(CallsInText):
    begins = ("functools", *_SIGNS)


def _call(text: str, *, alone: bool) -> tuple[str, str] | None:
    """Return a whole call's name and arguments, in any order; None when it is no call.

    Args:
        alone: a name without arguments is a call.
    """
    try:
        value = json.loads(ControlEscapes().feed(text), parse_constant=refuse_constant)
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {} if alone else None))
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return None
        name.encode()
    except (ValueError, RecursionError):
        return None
    written = (arguments or "{}") if isinstance(arguments, str) else dumps(arguments)
    return (name, written) if is_object(ControlEscapes().feed(written)) else None


_TEMPLATE = r"(?s)\A(?!.*(?:<tool_calls>|minimax\[)).*<tool_call>"
"""Apriel's lists and MiniMax M3's tags are other formats around the same mark."""

_OBJECT = ('{"name": "NAME", "arguments": ', "}")

_ONE_A_MARK = Notation(
    ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"), between="\n", mark="<tool_call>"
)
_LIST = Notation(_OBJECT, ("<tool_call>[", "]</tool_call>"), ", ", mark="<tool_call>")

HERMES = Format("hermes", Hermes, ("<tool_call>", "</tool_call>"), _TEMPLATE, {"": _ONE_A_MARK})
"""An object between the marks, several of both for several calls (Hermes 2 Pro, Qwen 2.5 and 3, SmolLM3)."""

SMOLLM2 = Format("smollm2", Hermes, HERMES.marks, notations={"": _LIST})
"""A list of objects between the marks (SmolLM2's documentation)."""

GRANITE4 = Format("granite4", Hermes, HERMES.marks, notations=HERMES.notations)
"""As hermes (the template of granite-4.0 says so)."""

_AFTER_A_MARK = Notation(_OBJECT, ("<|tool_call|>[", "]"), ", ", mark="<|tool_call|>")

GRANITE = Format("granite", Granite, ("<|tool_call|>",), r"<\|tool_call\|>", {"": _AFTER_A_MARK})
"""A list of objects after a mark: a special token in Granite 3.0, text in 3.1 (both templates)."""

_LLAMA3 = r"(?s)\A(?!.*<function=).*(?:<\|python_tag\|>|dictionary of argument name)"
"""Functionary's tags are another format after the same mark."""

_WHOLE_ANSWER = Notation(('{"name": "NAME", "parameters": ', "}"), several=False)

LLAMA3_JSON = Format("llama3_json", Llama3, ("<|python_tag|>",), _LLAMA3, {"": _WHOLE_ANSWER})
"""The answer is an object with `parameters`, after a mark or without one (the templates of Llama 3.1 to 3.3)."""

_AFTER_A_WORD = Notation(_OBJECT, ("functools[", "]"), ", ", mark="functools[")

PHI4_MINI_JSON = Format("phi4_mini_json", Phi4, (), "functools", {"": _AFTER_A_WORD})
"""A list of objects after a word (vLLM's template for Phi-4-mini)."""
