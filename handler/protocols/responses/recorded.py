"""Items that only other servers write, in the conversations that clients send: calls of hosted tools and their outputs.

A recorded conversation is history, so these items are read as calls of functions. Source: the input items in OpenAI's
Python client, 3.57.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.framing import dumps_decoded, loads

CALLS: Mapping[str, str] = {
    "apply_patch_call": "apply_patch",
    "computer_call": "computer",
    "local_shell_call": "local_shell",
    "mcp_approval_request": "mcp_approval",
    "program": "program",
    "shell_call": "shell",
    "tool_search_call": "tool_search",
}
"""Maps types of calls to names of functions, for calls whose output is a separate item."""

OUTPUTS: Mapping[str, str] = {
    "apply_patch_call_output": "apply_patch_call",
    "computer_call_output": "computer_call",
    "local_shell_call_output": "local_shell_call",
    "mcp_approval_response": "mcp_approval_request",
    "program_output": "program",
    "shell_call_output": "shell_call",
    "tool_search_output": "tool_search_call",
}
"""Maps the types of outputs to those of their calls."""

HOSTED: Mapping[str, str] = {
    "code_interpreter_call": "code_interpreter",
    "file_search_call": "file_search",
    "image_generation_call": "image_generation",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcp_list_tools",
    "web_search_call": "web_search",
}
"""Maps types of calls to names of functions, for calls that contain their results."""

REFUSED: Mapping[str, str] = {
    "additional_tools": "send all tools in 'tools'",
    "configuration_update": "send 'reasoning' and 'text' in the request",
}
"""Maps types of items that change how the model responds to their replacements. They cannot be read as history."""

TYPES = (*CALLS, *OUTPUTS, *HOSTED)

_RESULTS = ("error", "output", "outputs", "result", "results")
_OF_ITEM = ("type", "id", "call_id", "status", "caller", "approval_request_id", "execution", "fingerprint")
_NO_RESULT = "(The result is not part of the conversation.)"
_IMAGE = "(An image, which is not part of the conversation.)"


class RecordedCall(NamedTuple):
    """A call of a hosted tool, read as a function call.

    Attributes:
        id: id of the call, or "" if the item has none.
        output: text of its results, or None if they are in another item.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    output: str | None


def read_call(item: Mapping[str, Any]) -> RecordedCall:
    """Read a call."""
    kind = item["type"]
    arguments = {name: value for name, value in item.items() if name not in (*_OF_ITEM, *_RESULTS)}
    if "arguments" in arguments:  # tool searches and MCP calls
        arguments |= _object(arguments.pop("arguments"))
    id = next((item[name] for name in ("call_id", "id") if isinstance(item.get(name), str)), "")
    if kind in CALLS:
        return RecordedCall(id, CALLS[kind], arguments, None)
    results = {name: item[name] for name in _RESULTS if item.get(name) is not None}
    if kind == "image_generation_call" and "result" in results:
        results["result"] = _IMAGE
    return RecordedCall(id, HOSTED[kind], arguments, _text(results) if results else _NO_RESULT)


def read_output(item: Mapping[str, Any]) -> tuple[Sequence[str], str]:
    """Read the output of a call. Return the ids that its call may have, and the text."""
    ids = [item[name] for name in ("call_id", "approval_request_id", "id") if isinstance(item.get(name), str)]
    results = {name: value for name, value in item.items() if name not in _OF_ITEM and value is not None}
    output = results.get("output")
    if isinstance(output, dict) and output.get("type") == "computer_screenshot":
        results["output"] = _IMAGE
    return ids, _text(results)


def _object(value: Any) -> dict[str, Any]:
    """Return arguments, which may be JSON, as an object."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = loads(value)
    return value if isinstance(value, dict) else {"arguments": value}


def _text(results: Mapping[str, Any]) -> str:
    """Return results as text. If there is only one, its name is omitted."""
    values = [*results.values()]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return dumps_decoded(values[0] if len(values) == 1 else results).decode()
