"""The calls of GLM 4.5 to 4.7: a name, and pairs of tags with a parameter's name and its value (the templates)."""

from __future__ import annotations

from handler.protocols.assistant.tools.grammar import Notation
from handler.protocols.assistant.tools.json_text import ParameterValue, dumps
from handler.protocols.assistant.tools.parsing import NAME, CallParser, Format, Steps

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class Glm(CallParser):
    """GLM 4.5 has a line for each tag, 4.7 has no line ends."""

    begins = (_CALL,)

    def calls(self, begin: str) -> Steps[None]:
        yield from self.skip()
        if (yield from self.take(_CALL_END)):
            return
        name = yield from self.run(NAME)
        yield from self.skip()
        end = yield from self.expect(_KEY, _CALL_END)
        self.begin(name)
        schema = self.schema(name)
        before = "{"
        while end == _KEY:
            key, _ = yield from self.until(_KEY_END)
            key = key.strip()
            yield from self.skip()
            yield from self.expect(_VALUE)
            self.write(f"{before}{dumps(key)}: ")
            value = ParameterValue(schema.types(schema.property(schema.root, key)), self.write)
            end = yield from self.stream_until(value.feed, _VALUE_END, _CALL_END, _CALL)
            value.close()
            before = ", "
            if end == _VALUE_END:
                self._closable = True  # only the call's end may lack
                yield from self.skip()
                self._closable = False
                end = yield from self.expect(_KEY, _CALL_END, _CALL)
        self.write("{}" if before == "{" else "}")
        self.end_call()
        if end == _CALL:  # the next call's: this one lacks its end
            self.held = _CALL + self.held


_GLM47 = Notation((f"{_CALL}NAME", _CALL_END), between="\n", mark=_CALL, style="glm_xml")
_GLM45 = _GLM47._replace(call=(f"{_CALL}NAME\n", _CALL_END))

GLM45 = Format("glm45", Glm, (_CALL, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END), _KEY, {"": _GLM45})
GLM47 = GLM45._replace(name="glm47", notations={"": _GLM47})
