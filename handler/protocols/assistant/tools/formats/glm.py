"""Tool calls of GLM 4.5 to 4.7, Hunyuan 3 and 4, and K2 Horizon, with tags for parameter names and values."""

from __future__ import annotations

from handler.protocols.assistant.tools.formats.open_values import OpenValues, Tags
from handler.protocols.assistant.tools.formats.sections import SectionedCalls
from handler.protocols.assistant.tools.grammar import Notation, pairs
from handler.protocols.assistant.tools.json_text import ParameterValue
from handler.protocols.assistant.tools.parsing import NAME, BrokenCall, Format, Steps


class PairedCalls(OpenValues, SectionedCalls):
    """Base class of parsers for tool calls with tags for parameter names and values.

    Attributes:
        call, call_end: the markers around a call.
        key, key_end: the markers around a parameter's name.
        value, value_end: the markers around a parameter's value.
        separator: a marker that may follow the name of the call, or "" if there is none.
    """

    call, call_end = "<tool_call>", "</tool_call>"
    key, key_end = "<arg_key>", "</arg_key>"
    value, value_end = "<arg_value>", "</arg_value>"
    separator = ""

    def one(self) -> Steps[None]:
        """Read a tool call after its marker. The marker of the next call also ends the call, and is not consumed."""
        yield from self.skip()
        name = yield from self.run(NAME)
        yield from self.skip()
        if self.separator and (yield from self.take(self.separator)):
            yield from self.skip()
        end = yield from self.expect(self.key, self.call_end)
        self.begin(name)
        schema = self.schema(name)
        while end == self.key:
            key, _ = yield from self.until(self.key_end)
            if "<" in key:  # its own end tag is missing
                raise BrokenCall
            key = key.strip()
            yield from self.skip()
            yield from self.expect(self.value)
            self.write_key(key)
            value = ParameterValue(schema.types(schema.property(schema.root, key)), self.write)
            end = yield from self.value_end_tag(value)
            value.close()
            if end == self.value_end:
                end = yield from self.rest(self.key, self.call_end, self.call)
        if end == self.call:  # the end marker is missing, and the next call follows
            self.put_back(end)
        self.end_values()

    def value_end_tag(self, value: ParameterValue) -> Steps[str]:
        """Read a value up to the tag that ends it, and return the tag."""
        outer = (self.section_end, self.call) if self.section_end else ()
        block_end = self.section_end or self.call_end
        calls = Tags(self.value, self.value_end, self.key, self.call, self.call_end, outer, (self.call,), block_end)
        return (yield from self.read_value(value.feed, calls, lambda text: False))


class Glm(PairedCalls):
    """Parses GLM's tool calls. GLM 4.5 writes each tag on its own line, but GLM 4.7 writes no newlines."""

    begins = (PairedCalls.call,)

    def calls(self, begin: str) -> Steps[None]:
        yield from self.skip()
        if (yield from self.take(self.call_end)):
            return
        yield from self.one()


class Hunyuan(PairedCalls):
    """Parses Hunyuan's tool calls. Hunyuan 3 writes a separator after the name, but Hunyuan 4 does not.

    A checkpoint may add its own suffix to all markers, such as `<tool_calls:opensource>`. The suffix is read from the
    first marker.
    """

    begins = ("<tool_calls>", "<tool_calls:")

    def calls(self, begin: str) -> Steps[None]:
        ending = ""
        if begin.endswith(":"):
            ending, _ = yield from self.until(">", limit=_LONGEST_ENDING)
            ending = f":{ending}"
        for name in ("call", "call_end", "key", "key_end", "value", "value_end"):
            setattr(self, name, getattr(Hunyuan, name).replace(">", f"{ending}>"))
        self.separator, self.section_end = f"<tool_sep{ending}>", f"</tool_calls{ending}>"
        yield from super().calls(begin)


_LONGEST_ENDING = 32  # characters


class K2Horizon(PairedCalls):
    begins = ("<ifm|tool_calls>",)
    section_end = "</ifm|tool_calls>"
    call, call_end = "<ifm|tool_call>", "</ifm|tool_call>"
    key, key_end = "<ifm|arg_key>", "</ifm|arg_key>"
    value, value_end = "<ifm|arg_value>", "</ifm|arg_value>"


def _marks(parser: type[PairedCalls]) -> tuple[str, ...]:
    return (parser.call, parser.call_end, parser.key, parser.key_end, parser.value, parser.value_end)


def _notation(parser: type[PairedCalls], after_name: str = "", line_end: str = "\n") -> Notation:
    arguments = pairs(parser.key, f"{parser.key_end}{line_end}{parser.value}", f"{parser.value_end}{line_end}")
    call = (f"{parser.call}NAME{after_name}{line_end}", parser.call_end)
    return Notation(call, between="\n", mark=parser.call, style="", arguments=arguments)


_GLM45 = _notation(Glm)._replace(style="glm_xml")
_GLM47 = _notation(Glm, line_end="")._replace(style="glm_xml")
_HUNYUAN = _notation(Hunyuan)._replace(block=("<tool_calls>\n", "\n</tool_calls>"))

GLM45 = Format("glm45", Glm, _marks(Glm), Glm.key, {"": _GLM45})
GLM47 = GLM45._replace(name="glm47", notations={"": _GLM47})

HY_V3 = Format(
    "hy_v3",
    Hunyuan,
    ("<tool_calls>", "</tool_calls>", "<tool_sep>", *_marks(Hunyuan)),
    r"<tool_calls(?:\{\}|:\w+)>|(?s:<tool_calls>.*<arg_key>)",
    {"": _notation(Hunyuan, "<tool_sep>")._replace(block=_HUNYUAN.block)},
)
HY_V4 = HY_V3._replace(name="hy_v4", template="", notations={"": _HUNYUAN})
"""Source: the chat template of Hy3, and vLLM 0.33."""

K2_HORIZON = Format(
    "k2_horizon",
    K2Horizon,
    (*K2Horizon.begins, K2Horizon.section_end, *_marks(K2Horizon)),
    r"<ifm\|tool_calls>",
    {"": _notation(K2Horizon)._replace(block=(f"{K2Horizon.begins[0]}\n", f"\n{K2Horizon.section_end}"))},
)
"""Source: vLLM 0.33."""
