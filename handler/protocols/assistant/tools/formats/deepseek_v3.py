"""The calls of DeepSeek R1, V3 and V3.1: a name and its arguments between marks (the models' templates)."""

from __future__ import annotations

from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.parsing import NAME, Broken, CallParser, Format, Steps

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _JSON_FENCE = "```", "```json"


class DeepSeekV31(CallParser):
    """A call is its name, a separator, and its arguments.

    A call that is none stays text alone: the next one's mark begins calls again, and all calls end after it.
    """

    begins = (_CALLS, _CALLS_END, _CALL)

    def calls(self, begin: str) -> Steps[None]:
        if begin == _CALLS_END and not self.count:
            raise Broken
        mark = begin
        while mark != _CALLS_END:
            if mark == _CALL:
                yield from self._call()
            yield from self.skip()
            mark = yield from self.expect(_CALL, _CALLS_END)

    def _call(self) -> Steps[None]:
        name = yield from self._head()
        if (yield from self.skip()) != "{":
            raise Broken
        self.begin(name)
        yield from self.json()
        self.end_call()
        yield from self._tail()

    def _head(self) -> Steps[str]:
        yield from self.skip()
        name = yield from self.run(NAME)
        yield from self.skip()
        yield from self.expect(_SEPARATOR)
        return name

    def _tail(self) -> Steps[None]:
        yield from self.skip()
        yield from self.take(_CALL_END)


class DeepSeekV3(DeepSeekV31):
    """A call is its type, a separator, its name, and its arguments in a fence."""

    def _head(self) -> Steps[str]:
        yield from self.until(_SEPARATOR)
        name = yield from self.run(NAME)
        yield from self.skip()
        yield from self.expect(_JSON_FENCE)
        return name

    def _tail(self) -> Steps[None]:
        yield from self.skip()
        yield from self.take(_FENCE)
        yield from super()._tail()


_MARKS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
_V31 = Notation((f"{_CALL}NAME{_SEPARATOR}", _CALL_END), (_CALLS, _CALLS_END), mark=_CALLS)
_V3 = _V31._replace(call=(f"{_CALL}function{_SEPARATOR}NAME\n{_JSON_FENCE}\n", f"\n{_FENCE}{_CALL_END}"), between="\n")
DEEPSEEK_V3 = Format("deepseek_v3", DeepSeekV3, _MARKS, r"(?s)tool▁calls▁begin.*```json", {"": _V3})
DEEPSEEK_V31 = Format("deepseek_v31", DeepSeekV31, _MARKS, "tool▁calls▁begin", {"": _V31})
