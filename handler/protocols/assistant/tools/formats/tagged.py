"""Tool calls with parameters between tags, which are converted to JSON according to the schema of the tool.

Source: the models' chat templates, unless a format names another source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from handler.core.framing import refuse_constant
from handler.protocols.assistant.events import Ending
from handler.protocols.assistant.tools.formats.json_calls import JsonCalls
from handler.protocols.assistant.tools.formats.open_values import OpenValues, Tags
from handler.protocols.assistant.tools.grammar import ANY, Notation, ToolSchema, pairs
from handler.protocols.assistant.tools.json_text import STRING, ParameterValue, dumps
from handler.protocols.assistant.tools.parsing import NAME, BrokenCall, Format, Steps, Tool

_KEY = re.compile(r"[^>\"'\n]{1,256}")
_KIND = re.compile(r'\s*(?:string="(true|false)"\s*)?')
"""Matches the attributes of a parameter, besides its name."""


class TaggedCalls(OpenValues):
    """Base class of parsers for tool calls that consist of a tag with a name, tags for the parameters, and an end tag.

    A parameter without an end tag ends where the next parameter begins, or where its call or all calls end. The markers
    around a call may be missing.

    Attributes:
        block, block_end: the markers around all calls. `begins` may contain other spellings of `block`.
        between: markers that may precede or follow a call.
        call, call_end: the tags around a call. `call` ends before the name.
        parameter, parameter_end: the tags around a parameter. `parameter` ends before the name.
        stops: the special tokens after a message. They are also in `begins`.
        trim: whether a newline before a value and a newline after it belong to the tags.
    """

    block = block_end = ""
    between: tuple[str, ...] = ()
    call = call_end = ""
    parameter = parameter_end = ""
    stops: tuple[str, ...] = ()
    trim = False
    within: tuple[str, ...] = ('"', "'", ">")
    _in_block = False  # whether the marker before all calls has been read

    def calls(self, begin: str) -> Steps[None]:
        self._in_block = begin != self.call
        if begin == self.call:
            yield from self._call()
        while True:
            yield from self.skip()
            mark = yield from self.expect(*self.between, self.block_end, self.call, *self.begins)
            if mark == self.block_end:
                return
            if mark == self.call:
                yield from self._call()

    def _call(self) -> Steps[None]:
        name = self.tool((yield from self._name(NAME)))
        yield from self.expect(">")
        self.begin(name)
        schema = self.schema(name)
        ends = (self.parameter, self.call_end, self.block_end, self.call, *self.begins)
        if (yield from self.ahead()) == "{":
            yield from self.json()
            yield from self.rest(self.call_end)
            self.end_call()
            return
        end = ""
        while end != self.call_end:
            if end == self.parameter:
                end = yield from self._parameter(schema)
            else:
                end = self._until_call((yield from self.beside(*ends)))
        self.end_values()

    def tool(self, name: str) -> str:
        """Return the name of the tool. Subclasses may correct the name that the model wrote."""
        return name

    def _parameter(self, schema: ToolSchema) -> Steps[str]:
        key = yield from self._name(_KEY)
        types = schema.types(schema.property(schema.root, key))
        attributes, _ = yield from self.until(">")
        kind = _KIND.fullmatch(attributes)
        if kind is None:  # this tag has no end
            raise BrokenCall
        if kind[1] == "true" and (not types or "string" in types):
            types = STRING
        elif kind[1] == "false" and not types:
            types = ANY
        self.wrap(schema, key)
        self.write_key(key)
        value = ParameterValue(types, self.write, trim=self.trim)
        end = yield from self.value(value, schema)
        value.close()
        return self._until_call(end)

    def value(self, value: ParameterValue, schema: ToolSchema) -> Steps[str]:
        """Read a value up to the tag that ends it, and return the tag."""

        def is_parameter(text: str) -> bool:
            match = _KEY.match(text.lstrip("\"'"))
            return match is not None and schema.property(schema.root, match[0].strip()) is not None

        return (yield from self.read_value(value.feed, self._tags(), is_parameter))

    def _tags(self) -> Tags:
        outer: tuple[str, ...] = ()
        begins = (self.call, *(begin for begin in self.begins if begin not in self.stops))
        if self._in_block:
            outer = (self.block_end, *begins, *self.between)
        parameter = (self.parameter, self.parameter_end, self.parameter)
        return Tags(*parameter, self.call, self.call_end, outer, begins, self.block_end, self.stops)

    def wrap(self, schema: ToolSchema, key: str) -> None:
        """Prepare for a parameter with this name, which may contain all arguments."""

    def _until_call(self, mark: str) -> str:
        """Return the marker if it belongs to the tool call. Otherwise put it back, and return `call_end`."""
        if mark not in (self.block_end, self.call, *self.begins):
            return mark
        if not self._keys and mark != self.block_end:  # a call without arguments has an end
            raise BrokenCall
        self.put_back(mark)
        return self.call_end

    def _name(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume and return a name, which may be in quotes."""
        quote = yield from self.take('"', "'")
        name = yield from self.run(pattern)
        if quote:
            yield from self.expect(quote)
        return name.strip()


class Qwen3Coder(TaggedCalls):
    block, block_end = "<tool_call>", "</tool_call>"
    call, call_end = "<function=", "</function>"
    parameter, parameter_end = "<parameter=", "</parameter>"
    begins = (block, call)
    trim = True


class MiMo(Qwen3Coder):
    """Parses MiMo's tool calls, in which newlines next to the tags belong to the values."""

    trim = False


class SeedOss(Qwen3Coder):
    block, block_end = "<seed:tool_call>", "</seed:tool_call>"
    begins = (block, Qwen3Coder.call)


class MinimaxM2(TaggedCalls):
    block, block_end = "<minimax:tool_call>", "</minimax:tool_call>"
    call, call_end = "<invoke name=", "</invoke>"
    parameter, parameter_end = "<parameter name=", "</parameter>"
    begins = (block, call)


_WRAPPERS = ("arguments", "input")


class DeepSeekV32(TaggedCalls):
    """Parses DeepSeek V3.2's tool calls.

    The model sometimes wraps all arguments in one parameter that the tool does not have. Such arguments are unwrapped.
    """

    block, block_end = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    call, call_end = "<｜DSML｜invoke name=", "</｜DSML｜invoke>"
    parameter, parameter_end = "<｜DSML｜parameter name=", "</｜DSML｜parameter>"
    begins: tuple[str, ...] = (block, call)

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._wrapper: tuple[ToolSchema, str] | None = None  # the call's only parameter so far, if it may be a wrapper
        self._wrapped: list[str] = []  # the text of the arguments while there may be a wrapper
        self._num_wrapped = 0  # the pieces of the consumed text whose meaning is in it

    def write(self, text: str) -> None:
        if self._wrapper is None:
            super().write(text)
        else:
            self._wrapped.append(text)
            self._num_wrapped = len(self._taken)

    def wrap(self, schema: ToolSchema, key: str) -> None:
        self._write_wrapped()
        wraps = not self._keys and key in _WRAPPERS
        if wraps and schema.root is not None and schema.property(schema.root, key) is None:
            self._wrapper = schema, key

    def end_call(self, ending: Ending = Ending.WHOLE) -> None:
        if ending is Ending.BROKEN:  # all of the call is text
            self._wrapped, self._wrapper = [], None
        if self._wrapper is not None:
            self._wrapped = [_unwrap("".join(self._wrapped), *self._wrapper)]
            if ending is Ending.OPEN:
                ending = Ending.BROKEN
        self._write_wrapped()
        super().end_call(ending)

    def _end_response(self) -> None:
        if self._wrapper is not None:
            self._closable = False  # closing brackets would not unwrap the arguments
            self._write_wrapped()
            self._num_written = self._num_wrapped
        super()._end_response()

    def _write_wrapped(self) -> None:
        self._wrapper = None
        self.write("".join(self._wrapped))
        self._wrapped = []


def _unwrap(text: str, schema: ToolSchema, wrapper: str) -> str:
    """Return the JSON of the arguments wrapped in a parameter, or the text itself if the tool has no such arguments.

    Args:
        text: the JSON of all arguments.
        wrapper: the name of the parameter.
    """
    try:
        inner = json.loads(text)[wrapper]
        if isinstance(inner, str):
            inner = json.loads(inner, strict=False, parse_constant=refuse_constant)
        fits = isinstance(inner, dict) and all(schema.property(schema.root, key) is not None for key in inner)
        return dumps(inner) if fits else text
    except (ValueError, RecursionError):
        return text


class DeepSeekV4(DeepSeekV32):
    """Parses DeepSeek V4's tool calls. The model sometimes misspells the opening tag (source: vLLM 0.33)."""

    block, block_end = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
    begins = (block, "<｜DSML｜toolcalls>", "<｜DSML｜tool>", DeepSeekV32.call)


class DeepSeekV41(DeepSeekV32):
    """Parses DeepSeek V4.1's tool calls, whose tags contain a space after `｜DSML｜`."""

    block, block_end = "<｜DSML｜ calls>", "</｜DSML｜ calls>"
    call, call_end = "<｜DSML｜ invoke name=", "</｜DSML｜ invoke>"
    parameter, parameter_end = "<｜DSML｜ parameter name=", "</｜DSML｜ parameter>"
    begins = (block, call)


class Step3(TaggedCalls):
    """Parses Step 3's tool calls. Each call is enclosed in additional markers, and its type precedes the tags."""

    block, block_end = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
    call, call_end = "<steptml:invoke name=", "</steptml:invoke>"
    parameter, parameter_end = "<steptml:parameter name=", "</steptml:parameter>"
    between = ("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>", "function")
    begins = (block,)


class Dots(TaggedCalls, JsonCalls):
    """Parses the tool calls of dots models: tags or JSON objects between the markers."""

    block, block_end = "<dots_function_call>", "</dots_function_call>"
    end = block_end
    call, call_end = MinimaxM2.call, MinimaxM2.call_end
    parameter, parameter_end = MinimaxM2.parameter, MinimaxM2.parameter_end
    begins = (block,)

    def calls(self, begin: str) -> Steps[None]:
        form = JsonCalls if (yield from self.skip()) in "[{" else TaggedCalls
        yield from form.calls(self, begin)


_DATA, _DATA_END = "<![CDATA[", "]]>"


class MiniCpm5(TaggedCalls):
    """Parses MiniCPM 5's tool calls, which have no markers around them. A value may be in a CDATA section."""

    call, call_end = "<function name=", "</function>"
    block_end = call_end
    parameter, parameter_end = "<param name=", "</param>"
    begins = (call,)
    within = (*TaggedCalls.within, _DATA, _DATA_END)

    def calls(self, begin: str) -> Steps[None]:
        yield from self._call()
        yield from self.take(self.call_end)

    def value(self, value: ParameterValue, schema: ToolSchema) -> Steps[str]:
        if not (yield from self.take(_DATA)):
            return (yield from super().value(value, schema))
        tags = self._tags()._replace(value=_DATA, end=f"{_DATA_END}{self.parameter_end}")
        return (yield from self.read_value(value.feed, tags, lambda text: False))


_QWEN = Notation(
    ("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>"),
    between="\n",
    mark="<tool_call>",
    style="qwen_xml",
    arguments=pairs("<parameter=", ">\n", "\n</parameter>\n"),
)
QWEN3_CODER = Format(
    "qwen3_coder", Qwen3Coder, ("<tool_call>", "</tool_call>"), "(?s)<function=.*<parameter=", {"": _QWEN}
)
QWEN3_XML = QWEN3_CODER._replace(name="qwen3_xml")
"""Nemotron 3 and Step 3.5 also use this format (source: their chat templates)."""

_MIMO = _QWEN._replace(style="", arguments=pairs("<parameter=", ">", "</parameter>\n"))
MIMO = QWEN3_CODER._replace(name="mimo", make=MiMo, template="", notations={"": _MIMO})
"""The format of MiMo V2, whose values have no newlines around them (source: vLLM 0.33)."""

_SEED = _QWEN._replace(
    call=("<seed:tool_call>\n<function=NAME>\n", "</function>\n</seed:tool_call>"), mark=SeedOss.block
)
SEED_OSS = Format("seed_oss", SeedOss, (SeedOss.block, SeedOss.block_end), "<seed:tool_call>", {"": _SEED})


def invocations(parser: type[TaggedCalls], style: str = "", attribute: str = "") -> dict[str, Notation]:
    """Return the `notations` of a format whose tags contain names as attributes: one notation for all templates.

    Args:
        style: xgrammar's name for the notation of arguments, or "" if xgrammar does not support it.
        attribute: an additional attribute of the parameter tag.
    """
    call, block = (f'{parser.call}"NAME">\n', f"{parser.call_end}\n"), (f"{parser.block}\n", parser.block_end)
    arguments = pairs(f'{parser.parameter}"', f'"{attribute}>', f"{parser.parameter_end}\n")
    return {"": Notation(call, block, mark=parser.block, style=style, arguments=arguments)}


MINIMAX_M2 = Format(
    "minimax_m2",
    MinimaxM2,
    (MinimaxM2.block, MinimaxM2.block_end),
    MinimaxM2.block,
    invocations(MinimaxM2, "minimax_xml"),
)

_DEEPSEEK = ("deepseek_xml", ' string="STRING"')
DEEPSEEK_V32 = Format(
    "deepseek_v32",
    DeepSeekV32,
    ("｜DSML｜",),
    "(?s)｜DSML｜.*function_calls",
    invocations(DeepSeekV32, *_DEEPSEEK),
)
DEEPSEEK_V41 = Format(
    "deepseek_v41",
    DeepSeekV41,
    ("｜DSML｜",),
    r"(?s)\A(?=.*｜DSML｜).*['\"｜] calls>",
    invocations(DeepSeekV41, attribute=_DEEPSEEK[1]),
)
"""xgrammar has no style for the tags of V4.1."""

DEEPSEEK_V4 = Format("deepseek_v4", DeepSeekV4, ("｜DSML｜",), "｜DSML｜", invocations(DeepSeekV4, *_DEEPSEEK))
"""The tag of a parameter also states whether the value is a string."""

_STEP3 = Notation(
    ('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">', "</steptml:invoke><｜tool_call_end｜>"),
    (f"{Step3.block}\n", f"\n{Step3.block_end}"),
    "\n",
    style="",
    arguments=pairs('<steptml:parameter name="', '">', "</steptml:parameter>"),
)
STEP3 = Format(
    "step3",
    Step3,
    (Step3.block, Step3.block_end, *Step3.between[:3]),
    "<steptml:|<｜tool_calls_begin｜>",
    {"": _STEP3},
)
"""Source: vLLM 0.33 and Step 3's documentation."""

DOTS = Format("dots", Dots, (Dots.block, Dots.block_end), "<dots_function_call>", invocations(Dots, "minimax_xml"))
"""Source: vLLM 0.33."""

_MINICPM5 = Notation(
    ('<function name="NAME">', "</function>"),
    between="\n",
    style="",
    arguments=pairs('<param name="', f'">{_DATA}', f"{_DATA_END}</param>"),
)
MINICPM5 = Format("minicpm5", MiniCpm5, (MiniCpm5.call_end, MiniCpm5.parameter_end), "<function name=", {"": _MINICPM5})
"""Source: the chat template of MiniCPM 5."""


# -- Muse Glimmer's calls: tags in messages to a tool (source: the model's chat template, and vLLM 0.33) ---------------


_MUSE_START, _MUSE_MESSAGE = "<|start|>", "<|message|>"
_MUSE_ENDS = ("<|eom|>", "<|eot|>")
_MUSE_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_MUSE_NO_TOOLS = ("self", "user")


class MuseGlimmer(TaggedCalls):
    """Parses Muse Glimmer's tool calls.

    A message is a header, possibly with a recipient, followed by text. Only messages to a tool may contain tags.
    The response begins within a header, whose start is in the prompt. Calls without a header are also read.
    """

    block, block_end = "<atem:function_calls>", "</atem:function_calls>"
    call, call_end = "<atem:invoke name=", "</atem:invoke>"
    parameter, parameter_end = "<atem:parameter name=", "</atem:parameter>"
    stops = (_MUSE_START, _MUSE_MESSAGE, *_MUSE_ENDS)
    begins = (*stops, block, call)
    at_start = True

    def calls(self, begin: str) -> Steps[None]:
        if begin in _MUSE_ENDS:
            return
        if begin in (self.block, self.call):
            self.held, self._taken = begin + self.held, []
            yield from self._call_message()
            return
        begin = begin or (yield from self.take(_MUSE_START, _MUSE_MESSAGE, " to=", "to="))
        if not begin:
            return
        if begin != _MUSE_MESSAGE:
            yield from self.until(_MUSE_MESSAGE)
        recipient = _MUSE_RECIPIENT.search(self.taken.replace(_MUSE_START, " ").replace(_MUSE_MESSAGE, " "))
        self.drop()
        if recipient is None or recipient[1] in _MUSE_NO_TOOLS:
            self._end((yield from self.stream_until(self.show_taken, *_MUSE_ENDS, _MUSE_START)))
        else:
            yield from self._call_message()

    def tool(self, name: str) -> str:
        """Return the tool name. The chat template shows a tool `f` as a namespace, so the model may write `f.f`."""
        first, _, last = name.partition(".")
        return first if first == last and name not in self.tools and first in self.tools else name

    def _call_message(self) -> Steps[None]:
        marks = (self.block, self.block_end, self.call, *_MUSE_ENDS, _MUSE_START)
        while True:
            yield from self.skip()
            mark = (yield from self.take(*marks)) or (yield from self.stream_until(self.show_taken, *marks))
            self._in_block = self._in_block or mark == self.block
            if mark == self.call:
                yield from self._call()
            elif mark == self.block_end and self.after_call:
                self.drop()
            elif mark not in (self.block, self.block_end):
                return self._end(mark)

    def _end(self, mark: str) -> None:
        if mark == _MUSE_START:
            self.held = mark + self.held


_MUSE_TAGS = invocations(MuseGlimmer)[""]
_MUSE_NOTATION = _MUSE_TAGS._replace(
    call=(
        f"{_MUSE_START}assistant to=NAME{_MUSE_MESSAGE}{_MUSE_TAGS.block[0]}{_MUSE_TAGS.call[0]}",
        f"{_MUSE_TAGS.call[1]}{_MUSE_TAGS.block[1]}{_MUSE_ENDS[0]}",
    ),
    block=("", ""),
)
MUSE_GLIMMER = Format(
    "muse_glimmer", MuseGlimmer, (_MUSE_START, _MUSE_MESSAGE, *_MUSE_ENDS), MuseGlimmer.block, {"": _MUSE_NOTATION}
)
