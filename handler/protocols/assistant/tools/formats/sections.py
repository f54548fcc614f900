"""Tool calls in a section between two markers, in which each call follows its own marker."""

from __future__ import annotations

from handler.core.numbers import is_digits
from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.parsing import NAME, SPACES, BrokenCall, CallParser, Format, Steps


class SectionedCalls(CallParser):
    """Base class of parsers for tool calls in sections.

    Unless `one` is overridden, a call consists of a head with its name, its arguments, and possibly a tail. If
    `begins` contains `call`, an invalid call does not turn later calls into text: the next marker begins calls again.

    Attributes:
        section_end: the marker after all calls.
        call, call_end: the markers around each call. The end marker may be missing.
        arguments_end: a marker between the arguments and `call_end`, or "" if there is none.
    """

    section_end = call = call_end = arguments_end = ""

    def calls(self, begin: str) -> Steps[None]:
        if begin == self.section_end and not self.count:
            raise BrokenCall
        mark = begin
        while mark != self.section_end:
            if mark == self.call:
                yield from self.one()
            yield from self.skip()
            mark = yield from self.expect(self.call, self.section_end)

    def head(self) -> Steps[str]:
        """Consume the text before the arguments of a tool call, and return the name of the tool.

        Raises:
            BrokenCall: the text is not a call.
        """
        raise NotImplementedError

    def tail(self) -> Steps[None]:
        """Consume the last part of a tool call, after its arguments."""
        yield from self.take(self.call_end)

    def one(self) -> Steps[None]:
        """Read a tool call after the marker that begins it."""
        name = yield from self.head()
        yield from self.call_with_json(name, self.arguments_end or self.call_end)
        yield from self.skip()
        yield from self.tail()


# -- the calls of DeepSeek R1, V3 and V3.1: a name and its arguments between markers (the models' templates) -----------


_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_TYPE, _FENCE, _JSON_FENCE = "function", "```", "```json"


class DeepSeekV31(SectionedCalls):
    """Parses DeepSeek V3.1's tool calls, which consist of a name, a separator and arguments."""

    section_end, call, call_end = _CALLS_END, _CALL, _CALL_END
    begins = (_CALLS, _CALLS_END, _CALL)

    def head(self) -> Steps[str]:
        yield from self.skip()
        name = yield from self.run(NAME)
        yield from self.skip()
        yield from self.expect(_SEPARATOR)
        return name


class DeepSeekV3(DeepSeekV31):
    """Parses DeepSeek V3's tool calls, which consist of a type, a separator, a name, and arguments in a code fence."""

    arguments_end = _FENCE

    def head(self) -> Steps[str]:
        yield from self.skip()
        yield from self.expect(_TYPE)
        yield from self.skip()
        yield from self.expect(_SEPARATOR)
        name = yield from self.run(NAME)
        yield from self.skip()
        yield from self.expect(_JSON_FENCE)
        return name

    def tail(self) -> Steps[None]:
        yield from self.take(_FENCE)
        yield from self.skip()
        yield from super().tail()


_MARKS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
_V31 = Notation((f"{_CALL}NAME{_SEPARATOR}", _CALL_END), (_CALLS, _CALLS_END), mark=_CALLS)
_V3 = _V31._replace(call=(f"{_CALL}function{_SEPARATOR}NAME\n{_JSON_FENCE}\n", f"\n{_FENCE}{_CALL_END}"), between="\n")
DEEPSEEK_V3 = Format("deepseek_v3", DeepSeekV3, _MARKS, r"(?s)tool▁calls▁begin.*```json", {"": _V3})
DEEPSEEK_V31 = Format("deepseek_v31", DeepSeekV31, _MARKS, "tool▁calls▁begin", {"": _V31})


# -- Kimi K2: `functions.NAME:INDEX` and the arguments between markers, in a section -----------------------------------


_KIMI_SECTION, _KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiK2(SectionedCalls):
    section_end, call, call_end = _KIMI_SECTION_END, _KIMI_CALL, _KIMI_CALL_END
    begins = (_KIMI_SECTION, _KIMI_SECTION_END, _KIMI_CALL)

    def head(self) -> Steps[str]:
        id, _ = yield from self.until(_KIMI_ARGUMENTS)
        name, _, index = id.strip(SPACES).rpartition(":")
        name = name.removeprefix("functions.")
        if not NAME.fullmatch(name) or not is_digits(index):
            raise BrokenCall
        return name


_KIMI_NOTATION = Notation(
    (f"{_KIMI_CALL}functions.NAME:NUMBER{_KIMI_ARGUMENTS}", _KIMI_CALL_END),
    (_KIMI_SECTION, _KIMI_SECTION_END),
    mark=_KIMI_SECTION,
)
KIMI_K2 = Format(
    "kimi_k2",
    KimiK2,
    (_KIMI_SECTION, _KIMI_SECTION_END, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END),
    r"<\|tool_calls_section_begin\|>",
    {"": _KIMI_NOTATION},
)
