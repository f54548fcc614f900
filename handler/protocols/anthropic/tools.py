"""`tools` and `tool_choice` of Anthropic's requests, translated to those of a chat, and changes of tools in messages.

Sources: "Mid-conversation system messages and tool changes" in Anthropic's documentation, and the types of its Python
package 2.14.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.protocols.anthropic.api import ToolUnresolved
from handler.protocols.assistant.tools.request import MAX_TOOLS, read_name
from handler.protocols.kernel.messages import string_at
from handler.protocols.kernel.readers import NamedValue, boolean, only, show, unread
from handler.protocols.kernel.schema import FLAG, NULL, TEXT, Shape, listing, nullable, record

_SERVER = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
"""Prefixes of the `type` of tools that run on Anthropic's servers."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


_TOOL: Mapping[str, Shape] = {
    "type": {"enum": ["custom", None]},
    "name": TEXT,
    "description": nullable(TEXT),
    "input_schema": {"type": "object"},
    "cache_control": {},
    "strict": nullable(FLAG),
    "defer_loading": nullable(FLAG),
    "allowed_callers": nullable(listing(TEXT)),
}
_CHOICE: Mapping[str, Shape] = {
    "type": {"enum": [*_CHOICES, "tool"]},
    "name": TEXT,
    "disable_parallel_tool_use": nullable(FLAG),
}
TOOLS: Mapping[str, Shape] = {
    "tools": nullable(listing({**record(_TOOL), "required": ["name", "input_schema"]}, maxItems=MAX_TOOLS)),
    "tool_choice": nullable({**record(_CHOICE), "required": ["type"], "additionalProperties": NULL}),
}
"""The schemas of the fields that `read_tools` and `read_choice` read."""


# -- changes of the tools, in messages ---------------------------------------------------------------------------------


CHANGES = ("tool_addition", "tool_removal")
"""The types of the blocks of system messages that change which tools the model may call."""

_REFERENCE, _DEFINITION = "tool_reference", "tool_definition"
_KINDS = {"tool_addition": (_REFERENCE, _DEFINITION), "tool_removal": (_REFERENCE,)}
_FIELDS = {_REFERENCE: ("type", "name"), _DEFINITION: ("type", "definition")}
_MCP = ("mcp_tool_reference", "mcp_toolset_reference")


class ToolChange(NamedTuple):
    """A part of a message that changes which tools the model may call.

    Attributes:
        kind: the type of the block, or `found` if the model has found or called the tool.
        name: the tool's name.
        at: the path of the block in the request body.
        tool: the tool's definition in the format of a chat, or None if the block refers to an earlier one.
        deferred: whether the definition is withheld from the model until a later reference.
    """

    kind: Literal["tool_addition", "tool_removal", "found"]
    name: str
    at: str
    tool: Mapping[str, Any] | None = None
    deferred: bool = False


def read_change(block: Mapping[str, Any], at: str, unknown: dict[str, None]) -> ToolChange:
    """Read a block `tool_addition` or `tool_removal`.

    Args:
        unknown: the paths of names that have no effect, to which those of this block are added.

    Raises:
        InvalidPayload: `tool` is malformed, or refers to tools of an MCP server.
        InvalidParameter: the definition in the block is invalid.
    """
    kind, tool = block["type"], block.get("tool")
    form = tool.get("type") if isinstance(tool, dict) else None
    if form in _MCP:
        raise InvalidPayload(f"{at}.tool.type={show(form)}: is not supported: tools run on the client")
    if not isinstance(tool, dict) or form not in _KINDS[kind]:
        raise InvalidPayload(f"{at}.tool must be an object with a 'type' that is {' or '.join(_KINDS[kind])}")
    for name in unread(tool, "tool", _FIELDS[form]):
        unknown[f"messages[].content[].{name}"] = None
    if form == _REFERENCE:
        return ToolChange(kind, string_at(tool.get("name"), f"{at}.tool.name"), at)
    definition = _tool(tool.get("definition"), f"{at}.tool.definition")
    deferred = bool(tool["definition"].get("defer_loading"))
    return ToolChange(kind, definition["function"]["name"], at, definition, deferred)


def check_positions(roles: Sequence[str], changing: Mapping[int, str]) -> None:
    """Check that each run of system messages with changes follows a user and precedes an assistant, or is the last.

    Args:
        roles: the roles of all messages.
        changing: maps the indices of the messages with changes to the paths of a change.

    Raises:
        InvalidPayload: a change is elsewhere.
    """
    if not changing:
        return
    runs = [(role, [index for index, _ in run]) for role, run in groupby(enumerate(roles), lambda item: item[1])]
    for number, (_, indices) in enumerate(runs):
        at = next((changing[index] for index in indices if index in changing), None)
        follows = number > 0 and runs[number - 1][0] == "user"
        precedes = number + 1 == len(runs) or runs[number + 1][0] == "assistant"
        if at is not None and not (follows and precedes):
            raise InvalidPayload(
                f"{at}: a system message that changes the tools must follow a message of the user, "
                "and precede one of the assistant or be the last"
            )


# -- the tools ---------------------------------------------------------------------------------------------------------


class DefinedTools:
    """The tools that a request defines, and which of them the model may call in the response.

    Attributes:
        defined: maps the names of all tools to their definitions in the format of a chat.
        deferred: the names of the tools that are withheld until a reference to them.
        removed: the names of the tools that were withdrawn.
    """

    def __init__(self) -> None:
        self.defined: dict[str, Mapping[str, Any]] = {}
        self.deferred = set[str]()
        self.removed = set[str]()

    def define(self, name: str, tool: Mapping[str, Any], *, deferred: bool) -> None:
        """Define a tool. An equal definition of a tool that the model may call changes nothing."""
        if deferred and (self.defined.get(name) != tool or name in self.removed):
            self.deferred.add(name)
        elif not deferred:
            self.deferred.discard(name)
        self.removed.discard(name)
        self.defined[name] = tool

    def change(self, change: ToolChange) -> None:
        """Apply a change. Adding a tool that the model may already call, or removing it twice, has no effect.

        Raises:
            ToolUnresolved: no tool has this name.
        """
        name = change.name
        if change.tool is not None:
            self.define(name, change.tool, deferred=change.deferred)
        elif change.kind == "found":
            self.deferred.discard(name)
        elif name not in self.defined:
            raise ToolUnresolved(f"{change.at}.tool.name={show(name)}: must be the name of a tool defined before it")
        elif change.kind == "tool_removal":
            self.removed.add(name)
        else:
            self.deferred.discard(name)
            self.removed.discard(name)

    def shown(self) -> list[Mapping[str, Any]] | None:
        """Return the tools that the model may call, or None if the request defines none."""
        hidden = self.deferred | self.removed
        return [tool for name, tool in self.defined.items() if name not in hidden] if self.defined else None


def read_tools(value: Any, changes: Iterable[ToolChange]) -> DefinedTools:
    """Read `tools`, and apply the changes in the messages.

    Raises:
        InvalidParameter: a tool does not run on the client, is malformed, or has the name of another.
        ToolUnresolved: a change refers to a tool that is not defined.
    """
    if not isinstance(value, list | None):
        raise NamedValue("tools", value).refused(f"must be a list of at most {MAX_TOOLS} tools")
    tools = DefinedTools()
    for index, declared in enumerate(value or ()):
        tool = _tool(declared, f"tools[{index}]")
        name = tool["function"]["name"]
        if name in tools.defined:
            raise InvalidParameter("tools: two tools have the same name")
        tools.define(name, tool, deferred=bool(declared.get("defer_loading")))
    for change in changes:
        tools.change(change)
    return tools


def _tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidParameter(f"{at}: must be an object with 'name' and 'input_schema'")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        if isinstance(kind, str) and kind.startswith(_SERVER):
            raise InvalidParameter(
                f"{at}.type={show(kind)}: is not supported: server tools only run on Anthropic's servers"
            )
        raise InvalidParameter(f"{at}.type={show(kind)}: is not supported: send name, description and input_schema")
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidParameter(f"{at}.input_schema: must be a JSON schema object")
    if not isinstance(tool.get("description"), str | None):
        raise InvalidParameter(f"{at}.description: must be a string")
    if not isinstance(tool.get("strict"), bool | None):
        raise InvalidParameter(f"{at}.strict: must be true or false")
    NamedValue(f"{at}.defer_loading", tool.get("defer_loading")).optional(boolean)
    _check_callers(NamedValue(f"{at}.allowed_callers", tool.get("allowed_callers")))
    name = read_name(tool.get("name"), f"{at}.name")
    function = {"name": name, "description": tool.get("description"), "parameters": tool["input_schema"]}
    function |= {"strict": tool["strict"]} if "strict" in tool else {}
    unknown_fields = {name: item for name, item in tool.items() if name not in _TOOL}
    return {"type": "function", "function": {**unknown_fields, **function}}


def _check_callers(callers: NamedValue) -> None:
    """Raise InvalidParameter if only other tools may call a tool. Here, only the model calls tools."""
    if callers.value not in (None, []) and (not isinstance(callers.value, list) or "direct" not in callers.value):
        raise callers.refused("must contain 'direct', because only the model calls tools")


def read_choice(value: Any, *, tools: DefinedTools) -> dict[str, Any]:
    """Return `tool_choice` and `parallel_tool_calls` in the format of a chat request.

    A tool that the choice names is no longer deferred.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _CHOICE["type"]["enum"]:
        raise ValueError("must be an object with a 'type' that is auto, any, tool or none")
    only(value, *_CHOICE)
    single = value.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise ValueError("'disable_parallel_tool_use' must be true or false")
    parallel = {} if single is None else {"parallel_tool_calls": not single}
    if kind != "tool":
        return {"tool_choice": _CHOICES[kind], **parallel}
    name = value.get("name")
    if not isinstance(name, str) or name not in tools.defined:
        raise ValueError("'name' must be the name of one of the tools")
    if name in tools.removed:
        raise ValueError("'name' must be the name of a tool that no tool_removal has removed")
    tools.deferred.discard(name)
    return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel}
