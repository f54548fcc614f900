"""Inkling's calls: an object in a block of its own, which special tokens begin and end (vLLM 0.33)."""

from __future__ import annotations

import re

from handler.protocols.assistant.tools.formats.json_calls import JsonCalls
from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.parsing import NAME, Format, Steps

_MESSAGE, _CALL, _END = "<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>"
_BLOCKS = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_ENDS = (_END, "<|content_model_end_sampling|>")


class Inkling(JsonCalls):
    """A call has the members `name` and `args`, and its name may precede its block. Other marks are in no event."""

    begins = (_CALL, _MESSAGE, *_BLOCKS, *_ENDS)
    at_start = True
    head = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"args"\s*:\s*(?=\{)')

    def calls(self, begin: str) -> Steps[None]:
        if begin == _MESSAGE:
            self.drop()
        if begin in ("", _MESSAGE):
            if not (yield from self.take(_CALL)):
                if begin and (yield from self.take(*_BLOCKS)):
                    return
                yield from self.run(NAME)
                yield from self.expect(_CALL)
        elif begin != _CALL:
            return
        yield from super().calls(_CALL)

    def called(self, text: str) -> None:
        return None  # the name comes first


INKLING = Format(
    "inkling",
    Inkling,
    Inkling.begins,
    r"<\|content_invoke_tool_json\|>",
    {"": Notation((f'{_CALL}{{"name": "NAME", "args": ', f"}}{_END}"), between=_MESSAGE, mark=_CALL)},
)
