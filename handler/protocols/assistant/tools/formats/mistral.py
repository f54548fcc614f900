"""Mistral's calls: `[TOOL_CALLS]` and a list of objects, or a name and its arguments (the models' templates)."""

from __future__ import annotations

from handler.protocols.assistant.tools.formats.json_calls import JsonCalls
from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.parsing import NAME, Broken, Format, Steps

_CALLS, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(JsonCalls):
    """A list or an object as far as tokenizer 10; later a name, perhaps the call's id, and the arguments."""

    begins = (_CALLS,)

    def calls(self, begin: str) -> Steps[None]:
        yield from self.skip()
        while (yield from self.take(_CALLS)):  # a model may write it twice; alone its bracket would be a list's
            yield from self.skip()
        if self.held[0] in "[{":
            yield from super().calls(begin)
            return
        name = yield from self.run(NAME)
        yield from self.skip()
        if (yield from self.take(_CALL_ID)):
            yield from self.run(NAME)
        yield from self.take(_ARGUMENTS)
        if (yield from self.skip()) != "{":
            raise Broken
        self.begin(name)
        yield from self.json()
        self.end_call()


_NAMED = Notation((f"{_CALLS}NAME{_ARGUMENTS}", ""), mark=_CALLS)
_LIST = Notation(('{"name": "NAME", "arguments": ', "}"), (f"{_CALLS}[", "]"), ", ", mark=_CALLS)

MISTRAL = Format("mistral", Mistral, (_CALLS, _CALL_ID, _ARGUMENTS), r"\[TOOL_CALLS\]", {_ARGUMENTS: _NAMED, "": _LIST})
