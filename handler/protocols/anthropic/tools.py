"""Anthropic's `tools` and `tool_choice` as those of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter
from handler.protocols.assistant.tools.request import MAX_TOOLS
from handler.protocols.kernel.schema.shapes import FLAG, TEXT, Shape, listing, nullable, record
from handler.protocols.kernel.validation import Named, show

_SERVER = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
"""How the types of tools begin that run at Anthropic."""

_NEUTRAL: Mapping[str, Any] = {
    "allowed_callers": ["direct"],
    "defer_loading": False,
    "eager_input_streaming": False,
    "input_examples": [],
}
"""Names of a tool with the value that means nothing; another one is without effect, and listed."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


_TOOL: Mapping[str, Shape] = {
    "type": {"enum": ["custom", None]},
    "name": TEXT,
    "description": nullable(TEXT),
    "input_schema": {"type": "object"},
    "cache_control": {},
    "strict": nullable(FLAG),
}
_CHOICE: Mapping[str, Shape] = {
    "type": {"enum": [*_CHOICES, "tool"]},
    "name": TEXT,
    "disable_parallel_tool_use": nullable(FLAG),
}
TOOLS: Mapping[str, Shape] = {
    "tools": nullable(listing({**record(_TOOL), "required": ["name", "input_schema"]}, maxItems=MAX_TOOLS)),
    "tool_choice": nullable({**record(_CHOICE), "required": ["type"], "additionalProperties": False}),
}
"""What `read_tools` and `read_choice` read."""


def read_tools(value: Any) -> Any:
    """Return the tools in the chat's form, whose reader checks names and schemas.

    Raises:
        InvalidParameter: a tool is no client's own.
    """
    if not isinstance(value, list):
        return value
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def _tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidParameter(f"{at}: must be an object with 'name' and 'input_schema'")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        if isinstance(kind, str) and kind.startswith(_SERVER):
            raise InvalidParameter(f"{at}.type={show(kind)}: is not supported: server tools run at Anthropic")
        raise InvalidParameter(f"{at}.type={show(kind)}: is not supported: send name, description and input_schema")
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidParameter(f"{at}.input_schema: must be a JSON schema, which is an object")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    function |= {"strict": tool["strict"]} if "strict" in tool else {}
    others = {name: item for name, item in tool.items() if name not in _TOOL and item is not None}
    others = {name: item for name, item in others.items() if name not in _NEUTRAL or item != _NEUTRAL[name]}
    return {"type": "function", "function": {**others, **function}}


def read_choice(value: Any, tools: Any) -> dict[str, Any]:
    """Return `tool_choice` and `parallel_tool_calls` of a chat.

    Raises:
        InvalidParameter: naming what is wrong.
    """
    if value is None:
        return {}
    given = Named("tool_choice", value)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _CHOICE["type"]["enum"] or value.keys() - _CHOICE.keys():
        raise given.refused("must be an object with a 'type' that is auto, any, tool or none")
    single = value.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise given.refused("'disable_parallel_tool_use' must be true or false")
    parallel = {} if single is None else {"parallel_tool_calls": not single}
    if kind != "tool":
        return {"tool_choice": _CHOICES[kind], **parallel}
    names = [tool.get("name") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if value.get("name") not in names:
        raise given.refused("'name' must be that of one of the tools")
    return {"tool_choice": {"type": "function", "function": {"name": value["name"]}}, **parallel}
