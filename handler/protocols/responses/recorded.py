"""Items that only other servers write, in the conversations that clients send: calls of hosted tools and their outputs.

A recorded conversation is history, so these items are read as calls of functions. Source: the input items in OpenAI's
Python client, 3.57.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from handler.core.framing import dumps_decoded, loads

_RESULTS = ("error", "output", "outputs", "result", "results")
_OF_ITEM = ("type", "id", "call_id", "status", "caller", "approval_request_id", "execution", "fingerprint")
_NO_RESULT = "(The result is not part of the conversation.)"
_IMAGE = "(An image, which is not part of the conversation.)"


def id_of(item: Mapping[str, Any]) -> str:
    """Return the id of a call, or "" if it has none."""
    return next(iter(_ids(item, "call_id", "id")), "")


def _ids(item: Mapping[str, Any], *names: str) -> list[str]:
    return [item[name] for name in names if isinstance(item.get(name), str)]


def read_arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call."""
    arguments = {name: value for name, value in item.items() if name not in (*_OF_ITEM, *_RESULTS)}
    if "arguments" in arguments:  # tool searches and MCP calls
        arguments |= _object(arguments.pop("arguments"))
    return arguments


def read_results(item: Mapping[str, Any]) -> str:
    """Return the text of the results in a call."""
    results = {name: item[name] for name in _RESULTS if item.get(name) is not None}
    if item["type"] == "image_generation_call" and "result" in results:
        results["result"] = _IMAGE
    return _text(results) if results else _NO_RESULT


def read_output(item: Mapping[str, Any]) -> tuple[list[str], str]:
    """Read the output of a call. Return the ids that its call may have, and the text."""
    results = {name: value for name, value in item.items() if name not in _OF_ITEM and value is not None}
    output = results.get("output")
    if isinstance(output, dict) and output.get("type") == "computer_screenshot":
        results["output"] = _IMAGE
    return _ids(item, "call_id", "approval_request_id", "id"), _text(results)


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
