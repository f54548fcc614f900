"""Background responses of OpenAI's Responses API: their states and their events.

See https://developers.openai.com/api/docs/guides/background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from handler.core.errors import BadRequest
from handler.core.framing import typed_event
from handler.protocols.kernel.context import RequestContext
from handler.protocols.kernel.readers import NamedValue, boolean
from handler.protocols.kernel.stored import Detached, Keeping, Kind
from handler.protocols.responses.api import OpenAiResponse, ResponseState, ResponseStatus
from handler.protocols.responses.types import BACKGROUND

_END = b"\n\n"  # of an event


def read_background(body: Mapping[str, Any], context: RequestContext) -> bool:
    """Return whether the response is generated in the background.

    Raises:
        InvalidParameter: the field is invalid, or the client could not poll the response.
    """
    if context.keeper is None:
        return False
    field = NamedValue(BACKGROUND, body.get(BACKGROUND))
    if not field.optional(boolean):
        return False
    if not context.may_detach:
        raise field.refused(
            "a background response can only be created by POST /v1/responses, because its client polls it there; omit "
            "background, or use SageMaker's asynchronous inference"
        )
    return True


def detached(response: OpenAiResponse, keeping: Keeping, *, streams: bool) -> Detached:
    """Return a response that is generated in the background.

    Args:
        response: the response before it has begun.
        keeping: the object that would store the response in the foreground. It passes the response to the result.
        streams: whether the client has asked for a stream.
    """
    queued = with_status(response, "queued")
    head = {name: value for name, value in queued.items() if name != "output"}
    kind: Kind = "response" if response["store"] else "background"
    events = [_event("created", 0, queued), _event("queued", 1, queued)]
    return keeping.detach(response["id"], kind, head, events, streams=streams)


def with_status(response: Mapping[str, Any], status: ResponseStatus, message: str = "") -> OpenAiResponse:
    """Return a response without output with another status.

    Args:
        message: the reason why it failed.
    """
    error = {"code": "server_error", "message": message} if status == "failed" else None
    state = {"status": status, "completed_at": None, "error": error, "incomplete_details": None}
    return cast(OpenAiResponse, {**response, **state, "output": [], "usage": None})


def _event(kind: str, number: int, response: Mapping[str, Any]) -> bytes:
    state = cast(ResponseState, f"response.{kind}")
    return typed_event({"type": state, "sequence_number": number, "response": response})


def failed_event(number: int, response: Mapping[str, Any]) -> bytes:
    """Return the last event of a response that failed."""
    return _event("failed", number, response)


def split_events(data: bytes) -> Sequence[bytes]:
    """Split data that consists of complete events. Each remains framed."""
    return [event + _END for event in data.split(_END)[:-1]]


def no_events() -> BadRequest:
    """Return the error for a response without events whose events are requested."""
    return BadRequest("only a response that was created with background=true and stream=true can be streamed")


def not_cancellable(id: str) -> BadRequest:
    return BadRequest(
        f"only a response that was created with background=true can be cancelled; this one was not: {id[:128]}"
    )
