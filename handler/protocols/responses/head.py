"""What a response repeats of its request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from handler.core.errors import InvalidPayload
from handler.core.framing import encoded
from handler.protocols.kernel.generation import GenerationDefaults
from handler.protocols.responses.answers import ResponseHead

_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def read_head(body: Mapping[str, Any], generation: GenerationDefaults, *, store: bool = False) -> ResponseHead:
    """Return what a response repeats of its request.

    Args:
        generation: the model's own defaults.
        store: the response is kept.
    """
    reasoning = body.get("reasoning") or {}
    parallel, text = body.get("parallel_tool_calls"), body.get("text")
    used = {
        name: generation.sampling.get(name, default) if body.get(name) is None else body[name]
        for name, default in _SAMPLING.items()
    }
    tools = body.get("tools") or []
    return {
        "background": False,
        "frequency_penalty": used["frequency_penalty"],
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "presence_penalty": used["presence_penalty"],
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": store,
        "temperature": used["temperature"],
        "text": {"format": _format(text.get("format") if isinstance(text, dict) else None)},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_tool(tool) for tool in tools] if isinstance(tools, list) else tools,
        "top_logprobs": 0,
        "top_p": used["top_p"],
        "truncation": "disabled",
        "user": body.get("user"),
    }


def encode_head(head: ResponseHead) -> ResponseHead:
    """Encode what a response repeats, once for all events of a stream; numbers and null stay as they are.

    Raises:
        InvalidPayload: it can be read, but not written.
    """
    written: dict[str, Any] = {}
    for name, value in head.items():
        try:  # as deep as in an event: orjson writes fewer levels than it reads
            written[name] = value if isinstance(value, int | float | None) else encoded(value, depth=4)
        except TypeError as error:
            raise InvalidPayload(f"'{name}' cannot be repeated in the response: {error}") from None
    return cast(ResponseHead, written)


def without_strict(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools whose schemas nothing enforces."""
    return [
        {**tool, "tools": without_strict(tool["tools"])} if "tools" in tool else {**tool, "strict": False}
        for tool in tools
    ]


def _tool(tool: Any) -> Any:
    """Return a tool with all that a response's has; what is wrong with it the tools' reader says."""
    if not isinstance(tool, dict):
        return tool
    if isinstance(tool.get("tools"), list):
        return {**tool, "tools": [_tool(own) for own in tool["tools"]]}
    return {"description": None, "parameters": None, **tool, "strict": tool.get("strict") is True}


def _format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given or {"type": "text"}
    return {"description": None, **given, "strict": given.get("strict") is True}
