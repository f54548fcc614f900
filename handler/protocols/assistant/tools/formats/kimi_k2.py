"""Kimi K2's calls: `functions.NAME:INDEX` and the arguments between marks, in a section (the model's template)."""

from __future__ import annotations

from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.parsing import NAME, SPACES, Broken, CallParser, Format, Steps

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiK2(CallParser):
    begins = (_SECTION,)

    def calls(self, begin: str) -> Steps[None]:
        while True:
            yield from self.skip()
            if (yield from self.expect(_CALL, _SECTION_END)) == _SECTION_END:
                return
            id, _ = yield from self.until(_ARGUMENTS)
            name = id.strip(SPACES).rpartition(":")[0].removeprefix("functions.")
            if not NAME.fullmatch(name) or (yield from self.skip()) != "{":
                raise Broken
            self.begin(name)
            yield from self.json()
            yield from self.skip()
            yield from self.expect(_CALL_END)
            self.end_call()


_NOTATION = Notation((f"{_CALL}functions.NAME:NUMBER{_ARGUMENTS}", _CALL_END), (_SECTION, _SECTION_END), mark=_SECTION)
KIMI_K2 = Format(
    "kimi_k2",
    KimiK2,
    (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END),
    r"<\|tool_calls_section_begin\|>",
    {"": _NOTATION},
)
