"""Kimi K2's calls: `functions.NAME:INDEX` and the arguments between marks, in a section (the model's template)."""

from __future__ import annotations

from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.parsing import NAME, SPACES, Broken, CallParser, Format, Steps

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiK2(CallParser):
    """A call that is none stays text alone: the next one's mark begins calls again, and a section ends after it."""

    begins = (_SECTION, _SECTION_END, _CALL)

    def calls(self, begin: str) -> Steps[None]:
        if begin == _SECTION_END and not self.count:
            raise Broken
        mark = begin
        while mark != _SECTION_END:
            if mark == _CALL:
                yield from self._call()
            yield from self.skip()
            mark = yield from self.expect(_CALL, _SECTION_END)

    def _call(self) -> Steps[None]:
        id, _ = yield from self.until(_ARGUMENTS)
        name = id.strip(SPACES).rpartition(":")[0].removeprefix("functions.")
        if not NAME.fullmatch(name) or (yield from self.skip()) != "{":
            raise Broken
        self.begin(name)
        yield from self.json()
        self.end_call()
        yield from self.skip()
        yield from self.take(_CALL_END)


_NOTATION = Notation((f"{_CALL}functions.NAME:NUMBER{_ARGUMENTS}", _CALL_END), (_SECTION, _SECTION_END), mark=_SECTION)
KIMI_K2 = Format(
    "kimi_k2",
    KimiK2,
    (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END),
    r"<\|tool_calls_section_begin\|>",
    {"": _NOTATION},
)
