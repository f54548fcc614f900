"""A response's `tools` and `tool_choice` as those of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter
from handler.protocols.assistant.tools.request import FIELDS
from handler.protocols.kernel.schema.shapes import FLAG, TEXT, Shape, listing, nullable, record
from handler.protocols.kernel.validation import Named, show
from handler.protocols.responses.messages import full_name

_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer", "tool_search")
"""How the types of tools begin that run at OpenAI."""

_READ: Mapping[str, Shape] = {
    "type": {"enum": ["function", "namespace"]},
    "name": TEXT,
    "description": nullable(TEXT),
    "parameters": {"type": ["object", "null"]},
    "strict": nullable(FLAG),
}
TOOLS: Mapping[str, Shape] = {
    "tools": nullable(listing({**record(_READ), "required": ["type", "name"]})),
    "tool_choice": FIELDS["tool_choice"],
}
"""What `ToolsReader` and `read_choice` read."""


class ToolsReader:
    """Reads one request's tools.

    Attributes:
        tools: in the chat's form, whose reader checks names and schemas; as given where it is no list.
        namespaces: a tool's name in the prompt -> its namespace and its name there.
    """

    def __init__(self) -> None:
        self.tools: Any = None
        self.namespaces: dict[str, tuple[str, str]] = {}

    def read(self, value: Any) -> None:
        """Read the tools; those of a namespace get its name in front.

        Raises:
            InvalidParameter: a tool is no function.
        """
        self.tools = value if not isinstance(value, list) else []
        if isinstance(value, list):
            for index, tool in enumerate(value):
                self._tool(tool, f"tools[{index}]", "")

    def _tool(self, tool: Any, at: str, namespace: str) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and not namespace and isinstance(tool.get("tools"), list):
            if not isinstance(tool.get("name"), str) or not tool["name"]:
                raise InvalidParameter(f"{at}.name: must be a string")
            for index, own in enumerate(tool["tools"]):
                self._tool(own, f"{at}.tools[{index}]", tool["name"])
            return
        if kind != "function":
            hosted = isinstance(kind, str) and kind.startswith(_HOSTED)
            why = "hosted tools run at OpenAI" if hosted else "it must be a function"
            raise InvalidParameter(f"{at}.type={show(kind)}: is not supported: {why}")
        name = tool.get("name")
        if namespace and isinstance(name, str):
            self.namespaces[full_name(namespace, name)] = (namespace, name)
            name = full_name(namespace, name)
        others = {key: item for key, item in tool.items() if key not in _READ and item not in (None, False)}
        function = {"name": name, "description": tool.get("description"), "parameters": tool.get("parameters")}
        function |= {"strict": tool["strict"]} if "strict" in tool else {}
        self.tools.append({"type": "function", "function": {**others, **function}})


def read_choice(value: Any, tools: Any) -> Any:
    """Return `tool_choice` of a chat.

    Raises:
        InvalidParameter: it names no tool, or is of another kind.
    """
    if not isinstance(value, dict):
        return value
    name = full_name(value.get("namespace"), str(value.get("name")))
    known = [tool["function"]["name"] for tool in tools] if isinstance(tools, list) else []
    if value.get("type") != "function" or name not in known:
        raise Named("tool_choice", value).refused(
            "must be none, auto, required, or a 'function' with a 'name' in tools"
        )
    return {"type": "function", "function": {"name": name}}
