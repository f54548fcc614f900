"""Items that only other servers write, in the conversations that clients send: calls of hosted tools and their outputs.

A recorded conversation is history, so these items are read as calls of functions. Source: the input items in OpenAI's
Python client, 3.57.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.framing import dumps_decoded, loads
from handler.protocols.responses.types import ITEMS

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
    arguments = {name: value for name, value in item.items() if name not in (*_OF_ITEM, *_RESULTS)}
    if "arguments" in arguments:  # tool searches and MCP calls
        arguments |= _object(arguments.pop("arguments"))
    id = next((item[name] for name in ("call_id", "id") if isinstance(item.get(name), str)), "")
    known = ITEMS[item["type"]]
    if known.meaning == "recorded call":
        return RecordedCall(id, known.of, arguments, None)
    results = {name: item[name] for name in _RESULTS if item.get(name) is not None}
    if item["type"] == "image_generation_call" and "result" in results:
        results["result"] = _IMAGE
    return RecordedCall(id, known.of, arguments, _text(results) if results else _NO_RESULT)


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
