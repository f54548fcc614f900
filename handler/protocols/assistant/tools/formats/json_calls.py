"""Tool calls as JSON objects with `name` and `arguments` (or `parameters`), possibly in a list."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.framing import refuse_constant
from handler.protocols.assistant.events import Event
from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.json_text import ControlEscapes, JsonEnd, dumps, is_object
from handler.protocols.assistant.tools.parsing import NAME, SPACES, BrokenCall, CallParser, Format, Steps, Tool

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_BEGUN = re.compile(
    r'\{\s*(?:"(?:n(?:a(?:me?)?)?)?|"name"\s*|"name"\s*:\s*|"name"\s*:\s*"(?:[^"\\]|\\.)*\\?|'
    r'"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*(?:,\s*(?:"\w*|"\w*"\s*|"(?:arguments|parameters)"\s*:\s*)?)?)?'
)
"""Matches the start of a tool call, up to its arguments. The start may be incomplete."""

_OPEN = re.compile(r'\{\s*(?:"name"\s*:\s*"(?:[^"\\]|\\.)*\\?)?')
"""Matches the start of a tool call up to an incomplete name."""

_LONGEST_HEAD = 2048
"""Maximum number of characters before the arguments of a tool call. Each character of a name may be escaped as six."""


class JsonCalls(CallParser):
    """Base class of parsers for tool calls that are JSON objects.

    Arguments after the name of a call are emitted as they arrive. Arguments before the name are emitted once the
    call is complete. In a list, an object that is not a call is emitted as text, and the other objects remain calls.

    Attributes:
        end: the marker after the calls, or "" if they end with the list or the last object.
        marked: whether a marker precedes the calls. Otherwise an object without arguments or an empty list is text.
        name_key, arguments_keys: the keys of the name and the arguments.
        head: matches the start of a call up to its arguments, with its name as a JSON string in the first group.
        open: matches the start of a call up to an incomplete name.
    """

    end = ""
    marked = True
    name_key = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    head = _HEAD
    open = _OPEN

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._others: list[str] = []  # objects of a list that are not calls, since the last call

    def calls(self, begin: str) -> Steps[None]:
        listed, count = False, self.count
        self._others.clear()
        while True:
            sign = yield from self.skip(SPACES + ",;")
            if self.end and (yield from self.take(self.end)):
                return self._end_list(count)
            if sign == "{":
                yield from self._object(listed=listed)
            elif sign == "[" and not listed:
                self.advance(1)
                listed = True
            elif sign == "]" and listed:
                self.advance(1)
                self._end_list(count)
                if not self.end:
                    return
                if self.count:
                    self.drop()
            else:
                raise BrokenCall

    def send(self) -> None:
        self._show_others()
        super().send()

    def _end_list(self, count: int) -> None:
        """Emit the objects of a list that are not calls.

        Args:
            count: the number of calls before the list.

        Raises:
            BrokenCall: the list contains no calls.
        """
        if self.count == count and (self._others or not self.marked):
            raise BrokenCall
        self._show_others()

    def _show_others(self) -> None:
        self.show("".join(self._others))
        self._others.clear()

    def _object(self, *, listed: bool) -> Steps[None]:
        """Read an object. In a list, an object that is not a tool call is emitted as text."""
        head = yield from self._head()
        if head:
            yield from self._streamed(head)
            return
        text = yield from self.whole()
        call = self.called(text)
        if call is None:  # nested objects are not searched for calls, as each would be read several times
            if not listed:
                raise BrokenCall
            self._others.append(text)
            return
        name, arguments, others = call
        self.begin(name)
        self.write(arguments)
        self.put_beside(others)
        if self._unsent and (yield from self.ahead(SPACES + ",;")) == '"':  # the arguments follow the object
            raise BrokenCall
        self.end_call()

    def _head(self) -> Steps[re.Match[str] | None]:
        """Return the start of a tool call up to its arguments, or None if the arguments do not follow the name."""
        end, scanned = JsonEnd(), 0
        while True:
            head = self.head.match(self.held, 0, _LONGEST_HEAD)
            if head:
                return head
            if len(self.held) > _LONGEST_HEAD:
                if self.open.fullmatch(self.held, 0, _LONGEST_HEAD):
                    raise BrokenCall
                return None
            if end.feed(self.held[scanned:]) is not None:
                return None
            scanned = len(self.held)
            yield

    def called(self, text: str) -> tuple[str, str, str] | None:
        """Return the name and the arguments of a complete object, and other members, or None if it is not a tool call.

        An object with other members is a call only if it has arguments.
        """
        if (members := _members(text)) is None:
            return None
        name, keys = members.pop(self.name_key, None), [key for key in self.arguments_keys if key in members]
        if not isinstance(name, str) or len(keys) > 1 or not (keys or self.marked):
            return None
        value = members.pop(keys[0]) if keys else None
        written = value if isinstance(value, str) else dumps({} if value is None else value)
        others = _others(members)
        if not name or _SURROGATE.search(name) or (others and written in ("", "{}")):
            return None
        return (name, written or "{}", others) if is_object(ControlEscapes().feed(written or "{}")) else None

    def _streamed(self, head: re.Match[str]) -> Steps[None]:
        try:
            name = json.loads(head[1])
            name.encode()
        except ValueError:
            name = ""
        if not name:
            raise BrokenCall
        self.advance(head.end())
        self.begin(name)
        yield from self.json()
        self.put_beside((yield from self._members_after()))
        self.end_call()

    def _members_after(self) -> Steps[str]:
        """Consume a call after its arguments, up to its end, and return its other members.

        The closing brace may be missing.

        Raises:
            BrokenCall: the rest of the object is not JSON, or has another name or other arguments.
        """
        end, parts = JsonEnd(depth=1, stop="<"), list[str]()
        self._closable = True
        while (size := end.feed(self.held)) is None:
            parts.append(self.advance(len(self.held)))
            self._closable = self._closable and not parts[-1].strip()
            yield
        self._closable = False
        parts.append(self.advance(size))
        rest = "".join(parts).strip()
        if rest == "]":
            self.put_back(rest)
        members = _members("{" + (rest if rest.strip("]") else "}").removeprefix(","))
        if members is None or not members.keys().isdisjoint((self.name_key, *self.arguments_keys)):
            raise BrokenCall
        return _others(members)


class List(JsonCalls):
    """Parses a response that structured output constrains to a list of tool calls."""

    at_start = True


class Hermes(JsonCalls):
    begins = ("<tool_call>",)
    end = "</tool_call>"


class LongCat(JsonCalls):
    begins = ("<longcat_tool_call>",)
    end = "</longcat_tool_call>"


class Jamba(JsonCalls):
    begins = ("<tool_calls>",)
    end = "</tool_calls>"


class Nemotron(JsonCalls):
    begins = ("<TOOLCALL>",)
    end = "</TOOLCALL>"


class Granite(JsonCalls):
    begins = ("<|tool_call|>", "<tool_call>")


class Granite20bFc(JsonCalls):
    begins = ("<function_call>",)


class GigaChat3(JsonCalls):
    begins = ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|function_call|>")


class InternLm(JsonCalls):
    """Parses InternLM's tool calls. A second marker after the first distinguishes calls from Python code."""

    begins = ("<|action_start|>",)
    end = "<|action_end|>"

    def calls(self, begin: str) -> Steps[None]:
        yield from self.skip()
        yield from self.expect("<|plugin|>")
        yield from super().calls(begin)


class Apertus(JsonCalls):
    """Parses Apertus's tool calls, which are objects whose only key is the name of the tool."""

    begins = ("<|tools_prefix|>",)
    end = "<|tools_suffix|>"
    head = re.compile(rf"\{{\s*({_STRING})\s*:\s*(?=\{{)")
    open = re.compile(r'\{\s*(?:"(?:[^"\\]|\\.)*\\?)?')

    def called(self, text: str) -> None:
        return None  # the name always precedes the arguments


class Cohere(JsonCalls):
    """Parses Cohere's tool calls, which have the keys `tool_name` and `parameters`, possibly after an id."""

    begins = ("<|START_ACTION|>",)
    end = "<|END_ACTION|>"
    head = re.compile(
        rf'\{{\s*(?:"tool_call_id"\s*:\s*(?:{_STRING}|[0-9]+)\s*,\s*)?'
        rf'"tool_name"\s*:\s*({_STRING})\s*,\s*"parameters"\s*:\s*(?=\{{)'
    )
    open = re.compile(
        rf'\{{\s*(?:"tool_call_id"\s*:\s*(?:{_STRING}|[0-9]+)\s*,\s*)?'
        r'(?:"(?:tool_call_id|tool_name)"\s*:\s*"(?:[^"\\]|\\.)*\\?)?'
    )
    name_key, arguments_keys = "tool_name", ("parameters",)


_SIGNS = ("{", "[")


class CallsInText(JsonCalls):
    """Base class of parsers for tool calls within text.

    Without a marker, an object that follows text is a call only if the request has a tool with its name.
    """

    def calls(self, begin: str) -> Steps[None]:
        self._others.clear()
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
            raise BrokenCall
        self.advance(1)

    def _called(self) -> Steps[None]:
        """Read a tool call that begins with the name of a tool.

        Raises:
            BrokenCall: the object does not begin with the name of a tool.
        """
        while (head := _HEAD.match(self.held, 0, _LONGEST_HEAD)) is None:
            if len(self.held) > _LONGEST_HEAD or not _BEGUN.fullmatch(self.held):
                self._break()
            yield
        if head[1][1:-1] not in self.tools:
            self._break()
        yield from self._streamed(head)

    def _break(self) -> None:
        self.advance(1)  # a call may follow the brace
        raise BrokenCall


class Llama3(CallsInText):
    begins = ("<|python_tag|>", *_SIGNS)
    at_start = True


class Phi4(CallsInText):
    begins = ("functools", *_SIGNS)


class XLam(CallsInText):
    """Parses xLAM's calls: a list that is the whole response, or follows a code fence, a marker or the reasoning."""

    begins = ("<tool_call>", "```json", *_SIGNS)
    at_start = True

    def calls(self, begin: str) -> Steps[None]:
        if not begin:
            yield from self.skip()
            begin = yield from self.take("[TOOL_CALLS]", *self.begins[:2])
        elif begin == "[":
            begin += yield from self.take("TOOL_CALLS]")
        yield from super().calls(begin)
        self.drop()
        if len(begin) > 1:
            yield from self.skip()
            yield from self.take("</tool_call>", "```")


_SURROGATE = re.compile("[\ud800-\udfff]")
_BESIDE = {"id", "index", "type", "tool_call_id", "call_id"}
"""Members of a tool call that its client does not need, because it gets others."""


def _members(text: str) -> dict[str, Any] | None:
    """Return the members of a JSON object, or None if it is not JSON or two members of an object have the same name."""
    text = ControlEscapes().feed(text)
    try:
        members: dict[str, Any] = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None
    return members


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError
    return members


def _others(members: Mapping[str, Any]) -> str:
    """Return the JSON of the members that no client needs, or ""."""
    others = {key: value for key, value in members.items() if key not in _BESIDE}
    return dumps(others) if others else ""


_TEMPLATE = r"(?s)\A(?!.*(?:<tool_calls>|minimax\[)).*<tool_call>"
"""Matches chat templates with <tool_call>, except Apriel's and MiniMax M3's, which show other formats."""

_OBJECT = ('{"name": "NAME", "arguments": ', "}")

_CALL_PER_MARKER = Notation(
    ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"), between="\n", mark="<tool_call>"
)


def _list_between(parser: type[JsonCalls], call: tuple[str, str] = _OBJECT) -> dict[str, Notation]:
    return {"": Notation(call, (f"{parser.begins[0]}[", f"]{parser.end}"), ", ", mark=parser.begins[0])}


HERMES = Format("hermes", Hermes, ("<tool_call>", "</tool_call>"), _TEMPLATE, {"": _CALL_PER_MARKER})
"""Each tool call is an object between its own markers (Hermes 2 Pro, Qwen 2.5 and 3, SmolLM3)."""

SMOLLM2 = Format("smollm2", Hermes, HERMES.marks, notations=_list_between(Hermes))
"""A list of objects between the markers (source: SmolLM2's documentation)."""

GRANITE4 = Format("granite4", Hermes, HERMES.marks, notations=HERMES.notations)
"""The same format as hermes (source: the chat template of granite-4.0)."""

GRANITE = Format("granite", Granite, ("<|tool_call|>",), r"<\|tool_call\|>", _list_between(Granite))
"""A list of objects after a marker, which is a special token in Granite 3.0 and text in 3.1 (source: templates)."""

_LLAMA3 = r"(?s)\A(?!.*<function=).*(?:<\|python_tag\|>|dictionary of argument name)"
"""Matches the chat templates of Llama 3, except Functionary's, which show another format."""

_WHOLE_RESPONSE = Notation(('{"name": "NAME", "parameters": ', "}"), between="; ", several=False)

LLAMA3_JSON = Format("llama3_json", Llama3, ("<|python_tag|>",), _LLAMA3, {"": _WHOLE_RESPONSE})
"""An object with `parameters` as the whole response, possibly after a marker (source: Llama 3.1 to 3.3 templates)."""

_AFTER_A_WORD = Notation(_OBJECT, ("functools[", "]"), ", ", mark="functools[")

PHI4_MINI_JSON = Format("phi4_mini_json", Phi4, (), "functools", {"": _AFTER_A_WORD})
"""A list of objects after the word `functools` (source: vLLM's chat template for Phi-4-mini)."""

LONGCAT = Format(
    "longcat",
    LongCat,
    (*LongCat.begins, LongCat.end),
    "<longcat_tool_call>",
    {
        "": _CALL_PER_MARKER._replace(
            call=(f"{LongCat.begins[0]}{_OBJECT[0]}", f"}}{LongCat.end}"), mark=LongCat.begins[0]
        )
    },
)
"""Like hermes, but with other markers (source: vLLM 0.33)."""


JAMBA = Format("jamba", Jamba, (*Jamba.begins, Jamba.end), "<tool_calls>", _list_between(Jamba))
"""Objects in a list or on separate lines between the markers (Jamba, Hunyuan A13B, Apriel and MiniMax M1)."""

NEMOTRON_JSON = Format(
    "nemotron_json", Nemotron, (*Nemotron.begins, Nemotron.end), "<TOOLCALL>", _list_between(Nemotron)
)
"""A list of objects between the markers (source: the chat template of Nemotron Nano v2)."""

GRANITE_20B_FC = Format(
    "granite-20b-fc",
    Granite20bFc,
    Granite20bFc.begins,
    "<function_call>",
    {"": Notation((f"<function_call> {_OBJECT[0]}", "}"), between="\n", mark="<function_call>")},
)
"""Each tool call is an object after its own marker (source: vLLM 0.33)."""

GIGACHAT3 = Format(
    "gigachat3",
    GigaChat3,
    ("<|message_sep|>", "<|role_sep|>", "<|function_call|>"),
    r"<\|function_call\|>|(?s:'function call'.*<\|message_sep\|>)|(?s:<\|message_sep\|>.*'function call')",
    {
        "<|function_call|>": Notation((f"<|function_call|>{_OBJECT[0]}", "}"), mark="<|function_call|>"),
        "": Notation((f"{GigaChat3.begins[0]}{_OBJECT[0]}", "}"), mark=GigaChat3.begins[0]),
    },
)
"""An object in a message of its own (GigaChat 3) or after a marker (3.1). Source: both chat templates."""

INTERNLM = Format(
    "internlm",
    InternLm,
    ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    r"<\|action_start\|>",
    {
        "": Notation(
            ('<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ', "}<|action_end|>"), mark="<|action_start|>"
        )
    },
)
"""An object between markers (source: the tool documentation of InternLM 2 and 3, and vLLM 0.33)."""

APERTUS = Format(
    "apertus",
    Apertus,
    ("<|tools_prefix|>", "<|tools_suffix|>"),
    r"<\|tools_prefix\|>",
    _list_between(Apertus, ('{"NAME": ', "}")),
)
"""A list of objects between markers (source: the model's chat template)."""

COHERE3 = Format(
    "cohere_command3",
    Cohere,
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    r"<\|START_ACTION\|>",
    {
        "": Notation(
            ('{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ', "}"),
            ("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
            ",\n    ",
            "<|START_ACTION|>",
        )
    },
)
COHERE4 = COHERE3._replace(name="cohere_command4", template="")
"""A list of objects between markers (source: the chat templates of Command R7B, A and A+)."""

XLAM = Format("xlam", XLam, ("[TOOL_CALLS]",), notations={"": Notation(_OBJECT, ("[", "]"), ", ")})
"""A list of objects that is the whole response (source: xLAM 2's documentation)."""


# -- Inkling's calls: an object in a block of its own between special tokens (source: vLLM 0.33) -----------------------


_MESSAGE, _CALL, _END = "<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>"
_BLOCKS = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_ENDS = (_END, "<|content_model_end_sampling|>")


class Inkling(JsonCalls):
    """Parses Inkling's tool calls, which have the keys `name` and `args`. The name may also precede the block.

    Other markers are dropped.
    """

    begins = (_CALL, _MESSAGE, *_BLOCKS, *_ENDS)
    at_start = True
    arguments_keys = ("args",)
    _before = ""  # the name before the block
    head = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"args"\s*:\s*(?=\{)')

    def calls(self, begin: str) -> Steps[None]:
        self._before = ""
        if begin == _MESSAGE:
            self.drop()
        if begin in ("", _MESSAGE):
            if not (yield from self.take(_CALL)):
                if begin and (yield from self.take(*_BLOCKS)):
                    return
                name = yield from self.run(NAME)
                yield from self.expect(_CALL)
                self._before = name
        elif begin != _CALL:
            return
        yield from super().calls(_CALL)

    def begin(self, name: str) -> None:
        super().begin(name)
        if self._before != name:
            self.put_beside(self._before)
        self._before = ""

    def called(self, text: str) -> None:
        return None  # the name always comes first


INKLING = Format(
    "inkling",
    Inkling,
    Inkling.begins,
    r"<\|content_invoke_tool_json\|>",
    {"": Notation((f'{_CALL}{{"name": "NAME", "args": ', f"}}{_END}"), between=_MESSAGE, mark=_CALL)},
)


# -- Mistral: `[TOOL_CALLS]` and a list of objects, or a name and its arguments ----------------------------------------


_CALLS, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(JsonCalls):
    """Parses Mistral's tool calls.

    With tokenizers up to version 10, they are a list or an object. With later tokenizers, a call consists of a name,
    possibly an id, and the arguments. If the response ends after the name, the call has no arguments.
    """

    begins = (_CALLS,)
    within = (_CALL_ID, _ARGUMENTS)
    _at_end = False  # whether the response has ended

    def flush(self) -> list[Event]:
        self._at_end = True
        if self._steps is not None:
            next(self._steps)  # ends a name
        return super().flush()

    def calls(self, begin: str) -> Steps[None]:
        yield from self.skip()
        while (yield from self.take(_CALLS)):  # a model may repeat the marker, whose bracket would begin a list
            yield from self.skip()
        if self.held[0] in "[{":
            yield from super().calls(begin)
            return
        while NAME.fullmatch(self.held) and not self._at_end:
            yield
        if (match := NAME.match(self.held)) is None:
            raise BrokenCall
        name = self.advance(match.end())
        self.begin(name)
        yield from self.ahead()
        if (yield from self.take(_CALL_ID)):
            yield from self.run(NAME)
        yield from self.take(_ARGUMENTS)
        yield from self.call_with_json(name, _CALLS)


_MISTRAL_WITH_NAME = Notation((f"{_CALLS}NAME{_ARGUMENTS}", ""), mark=_CALLS)

MISTRAL = Format(
    "mistral",
    Mistral,
    (_CALLS, _CALL_ID, _ARGUMENTS),
    r"\[TOOL_CALLS\]",
    {_ARGUMENTS: _MISTRAL_WITH_NAME, **_list_between(Mistral)},
)
