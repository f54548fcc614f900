"""A response's bodies in the API's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.framing import SSE
from handler.protocols.kernel.dialect import ServerContext
from handler.protocols.kernel.parameters import Answer, Description, Operation, request_shape
from handler.protocols.kernel.schema import COUNT, FLAG, TEXT, Shape, nullable, record
from handler.protocols.openai.api import OpenAiError, OpenAiErrorFields
from handler.protocols.responses.api import (
    DeletedResponse,
    OpenAiResponse,
    OpenAiResponseEvent,
    ResponseItems,
    ResponseTokens,
)
from handler.protocols.responses.request import RESPONSE_FIELDS, TABLE

_MESSAGE: dict[str, Any] = {
    "id": "msg_0",
    "type": "message",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}],
}
_USAGE = {
    "input_tokens": 12,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 15,
}
_ANSWER = {
    "id": "resp_0", "object": "response", "created_at": 1760000000, "model": "model", "background": False,
    "frequency_penalty": 0.0, "instructions": None, "max_output_tokens": 16, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "presence_penalty": 0.0, "previous_response_id": None, "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None}, "safety_identifier": None, "service_tier": "default",
    "store": False, "temperature": 1.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
    "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": None, "status": "completed",
    "completed_at": 1760000001, "error": None, "incomplete_details": None, "output": [_MESSAGE], "usage": _USAGE,
}  # fmt: skip

_WITHOUT_STORE = request_shape(RESPONSE_FIELDS, TABLE, "input")


def _request(context: ServerContext) -> Shape:
    """Return the schema of a body, with what is read only where responses are stored."""
    shape = _WITHOUT_STORE(context)
    if not context.config.stores_responses:
        return shape
    stored = {"store": nullable(FLAG), "previous_response_id": nullable(TEXT)}
    reference = {"anyOf": [record({"id": TEXT}), *shape["properties"]["input"]["anyOf"]]}
    return {**shape, "properties": {**shape["properties"], **stored, "input": reference}}


_NOT_FOUND: OpenAiErrorFields = {
    "message": "Response with id 'resp_0' not found.",
    "type": "invalid_request_error",
    "param": None,
    "code": None,
}
_NONE: Answer = ("application/json", OpenAiError, {"error": _NOT_FOUND})
_ITEM = {"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}
_PAGE: ResponseItems = {
    "object": "list", "data": [_ITEM], "first_id": "msg_1", "last_id": "msg_1", "has_more": False,
}  # fmt: skip
_WHERE = "where option.responses_store keeps any"

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/v1/responses/{response}"): Operation(
        "OpenAI", f"Show a stored response, {_WHERE}",
        {200: ("application/json", OpenAiResponse, {**_ANSWER, "store": True}), 404: _NONE},
    ),
    ("DELETE", "/v1/responses/{response}"): Operation(
        "OpenAI", f"Delete a stored response, {_WHERE}",
        {200: ("application/json", DeletedResponse, {"id": "resp_0", "object": "response", "deleted": True}),
         404: _NONE},
    ),
    ("GET", "/v1/responses/{response}/input_items"): Operation(
        "OpenAI", f"List the input of a stored response, {_WHERE}",
        {200: ("application/json", ResponseItems, _PAGE), 404: _NONE},
        query={"limit": COUNT, "order": TEXT, "after": TEXT},
    ),
}  # fmt: skip
"""Method and path of the routes of stored responses."""

DESCRIPTIONS: Mapping[str, Description] = {
    "openai_responses": Description(
        "OpenAI responses",
        "OpenAiResponsesRequest",
        _request,
        OpenAiError,
        {"model": "", "input": "Name the capital of France.", "max_output_tokens": 16},
        OpenAiResponse,
        _ANSWER,
        OpenAiResponseEvent | OpenAiError,
        (SSE.content_type,),
    ),
    "openai_responses_count": Description(
        "OpenAI response's token count",
        "OpenAiResponsesCountRequest",
        _request,
        OpenAiError,
        {"model": "", "input": "Name the capital of France."},
        ResponseTokens,
        {"object": "response.input_tokens", "input_tokens": 12},
    ),
}
"""By the dialect's name."""
