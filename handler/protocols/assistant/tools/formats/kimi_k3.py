"""Kimi K3's tool calls, which are elements with attributes between special tokens (source: its chat template)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from handler.protocols.assistant.tools.formats.open_values import OpenValues, Tags
from handler.protocols.assistant.tools.formats.sections import SectionedCalls
from handler.protocols.assistant.tools.grammar import ANY, Notation
from handler.protocols.assistant.tools.json_text import STRING, ParameterValue, dumps
from handler.protocols.assistant.tools.parsing import NAME, BrokenCall, Format, Steps

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
TOOLS = f"{OPEN}tools{SEPARATOR}"
RESPONSE, RESPONSE_END = f"{OPEN}response{SEPARATOR}", f"{CLOSE}response{SEPARATOR}"
MESSAGE_END = f"{CLOSE}message{SEPARATOR}"

_TOOLS_END = f"{CLOSE}tools{SEPARATOR}"
_CALL, _CALL_END = f"{OPEN}call ", f"{CLOSE}call{SEPARATOR}"
_ARGUMENT, _ARGUMENT_END = f"{OPEN}argument ", f"{CLOSE}argument{SEPARATOR}"
_JSON, _JSON_END = f"{OPEN}json ", f"{CLOSE}json{SEPARATOR}"
_TAGS = Tags(_ARGUMENT, _ARGUMENT_END, _ARGUMENT, _CALL, _CALL_END, (_TOOLS_END, _CALL), (TOOLS,), _TOOLS_END)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class KimiK3(OpenValues, SectionedCalls):
    """Parses Kimi K3's tool calls, in which each argument has a type. Markers around a response's text are dropped."""

    section_end, call = _TOOLS_END, _CALL
    begins = (TOOLS, RESPONSE, RESPONSE_END, MESSAGE_END)
    within = (_CALL_END, _ARGUMENT, _ARGUMENT_END, _JSON, _JSON_END)

    def calls(self, begin: str) -> Steps[None]:
        if begin == TOOLS:
            yield from super().calls(begin)

    def one(self) -> Steps[None]:
        name = (yield from self._attributes("tool", "index")).get("tool", "")
        if not NAME.fullmatch(name):
            raise BrokenCall
        self.begin(name)
        schema = self.schema(name)

        def is_parameter(text: str) -> bool:
            match = _ATTRIBUTE.match(text)
            return match is not None and schema.property(schema.root, match[2]) is not None

        ends = (_CALL_END, _CALL, _TOOLS_END)
        end = yield from self.beside(_ARGUMENT, _JSON, *ends)
        if end == _JSON:
            yield from self._attributes("type")
            self.put_back((yield from self.rest("{")))
            yield from self.json()
            if (end := (yield from self.rest(_JSON_END, *ends))) == _JSON_END:
                end = yield from self.beside(*ends)
            self.end_call()
        else:
            while end == _ARGUMENT:
                attributes = yield from self._attributes("key", "type")
                self.write_key(attributes["key"])
                value = ParameterValue(STRING if attributes.get("type", "string") == "string" else ANY, self.write)
                end = yield from self.read_value(value.feed, _TAGS, is_parameter)
                value.close()
                if end == _ARGUMENT_END:
                    end = yield from self.beside(_ARGUMENT, *ends)
            self.end_values()
        if end != _CALL_END:  # the end marker is missing, and another call or the end of all calls follows
            self.put_back(end)

    def _attributes(self, *names: str) -> Steps[dict[str, str]]:
        """Consume and return the attributes of an element, up to its content.

        Args:
            names: the names of the attributes, of which the element has the first.

        Raises:
            BrokenCall: the text is not only attributes with these names.
        """
        text, _ = yield from self.until(SEPARATOR)
        attributes = {
            match[1]: match[2].replace("&quot;", '"').replace("&amp;", "&") for match in _ATTRIBUTE.finditer(text)
        }
        if names[0] not in attributes or not attributes.keys() <= {*names} or _ATTRIBUTE.sub("", text).strip():
            raise BrokenCall
        return attributes


_TYPES = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}


def _write(arguments: Mapping[str, Any]) -> str:
    written = list[str]()
    for key, value in arguments.items():
        name, kind = key.replace("&", "&amp;").replace('"', "&quot;"), _TYPES.get(type(value), "null")
        text = value if isinstance(value, str) else dumps(value)
        written.append(f'{_ARGUMENT}key="{name}" type="{kind}"{SEPARATOR}{text}{_ARGUMENT_END}')
    return "".join(written)


_NOTATION = Notation(
    (f'{_CALL}tool="NAME" index="NUMBER"{SEPARATOR}', _CALL_END), (TOOLS, _TOOLS_END), style="", arguments=_write
)
KIMI_K3 = Format("kimi_k3", KimiK3, (OPEN, CLOSE, SEPARATOR), r"<\|open\|>", {"": _NOTATION})
