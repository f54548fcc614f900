"""Kimi K2's calls: `functions.NAME:INDEX` and the arguments between marks, in a section (the model's template)."""

from __future__ import annotations

from handler.protocols.assistant.tools.formats.sections import SectionedCalls
from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.parsing import NAME, SPACES, Broken, Format, Steps

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiK2(SectionedCalls):
    section_end, call = _SECTION_END, _CALL
    begins = (_SECTION, _SECTION_END, _CALL)

    def head(self) -> Steps[str]:
        id, _ = yield from self.until(_ARGUMENTS)
        name = id.strip(SPACES).rpartition(":")[0].removeprefix("functions.")
        if not NAME.fullmatch(name):
            raise Broken
        return name

    def tail(self) -> Steps[None]:
        yield from self.take(_CALL_END)


_NOTATION = Notation((f"{_CALL}functions.NAME:NUMBER{_ARGUMENTS}", _CALL_END), (_SECTION, _SECTION_END), mark=_SECTION)
KIMI_K2 = Format(
    "kimi_k2",
    KimiK2,
    (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END),
    r"<\|tool_calls_section_begin\|>",
    {"": _NOTATION},
)
