"""The calls of DeepSeek R1, V3 and V3.1: a name and its arguments between marks (the models' templates)."""

from __future__ import annotations

from handler.protocols.assistant.tools.formats.sections import SectionedCalls
from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.parsing import NAME, Format, Steps

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _JSON_FENCE = "```", "```json"


class DeepSeekV31(SectionedCalls):
    """A call is its name, a separator, and its arguments."""

    section_end, call = _CALLS_END, _CALL
    begins = (_CALLS, _CALLS_END, _CALL)

    def head(self) -> Steps[str]:
        yield from self.skip()
        name = yield from self.run(NAME)
        yield from self.skip()
        yield from self.expect(_SEPARATOR)
        return name

    def tail(self) -> Steps[None]:
        yield from self.take(_CALL_END)


class DeepSeekV3(DeepSeekV31):
    """A call is its type, a separator, its name, and its arguments in a fence."""

    def head(self) -> Steps[str]:
        yield from self.until(_SEPARATOR)
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
