"""Whether a response has the form that the contract of an endpoint's container gives it. Nothing is compared here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from proof.conform.dialects import OF_PROFILE, piece_of, text_of
from proof.replay.comparison import traits
from proof.replay.content import NotJson, read_documents
from proof.replay.exchange import Request, Response

PROFILE_OF_KIND = {"tgi": "tgi", "triton": "triton", "vllm": "openai", "sglang": "openai", "llama-cpp": "openai"}
"""Maps kinds of containers to the profile of `lmi conform` with their contract. LMI's depends on its options."""

_PROMPTS = ("inputs", "messages", "prompt", "text_input")
"""Fields of the requests whose responses have text, so that a contract gives them a form."""


class NoForm(ValueError):
    """The contract gives the response to this request no form that can be tested here."""


def fault(profile: str, request: Request, response: Response) -> str:
    """Return how a response breaks the contract of a profile, or "".

    Args:
        profile: a profile of `lmi conform` that generates text.

    Raises:
        NoForm: the request is not for generated text.
    """
    body = _body(request)
    if response.lost:
        return f"no complete response: {response.lost}"
    if not 200 <= response.status < 300:
        return f"status {response.status}"
    try:
        values = read_documents(response.body).values
    except NotJson as error:
        return str(error)
    if not traits(request).streams:
        return next(_faults(profile, body, values), "")
    at_root = request.route in ("/", "/invocations")
    expected = OF_PROFILE[profile].content_type if at_root else "text/event-stream"
    media = response.content_type.partition(";")[0].strip().lower()
    return next(_stream_faults(expected, media, values), "")


def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(request.body)
    except ValueError:
        raise NoForm("its body is not JSON") from None
    if not isinstance(body, dict) or body.keys().isdisjoint(_PROMPTS):
        raise NoForm(f"it has none of the fields {', '.join(_PROMPTS)}")
    return body


def _faults(profile: str, body: dict[str, Any], values: list[Any]) -> Iterator[str]:
    parameters = body.get("parameters")
    details = isinstance(parameters, dict) and parameters.get("details") is True
    if any(map(_is_error, values)):
        yield "an error with status 200"
    if len(values) != 1 or text_of(values[0]) is None:
        yield "no text"
    elif "inputs" in body:
        value = values[0]
        if isinstance(value, list) != (profile == "tgi"):
            yield "an object, not a list" if profile == "tgi" else "a list, not an object"
        if details and "details" not in (value[0] if isinstance(value, list) else value):
            yield "no details, although the request asks for them"


def _stream_faults(expected: str, media: str, values: list[Any]) -> Iterator[str]:
    if any(map(_is_error, values)):
        yield "an error with status 200"
    if media != expected:
        yield f"the content type {media or 'is missing'}, not {expected}"
    if not any(piece_of(value) or _is_delta(value) for value in values):
        yield "no event with text"


def _is_error(value: Any) -> bool:
    return isinstance(value, dict) and "error" in value


def _is_delta(value: Any) -> bool:
    """Return whether an event is a part of a chat, whose text may be reasoning or a tool call."""
    match value:
        case {"choices": [{"delta": {}}, *_]}:
            return True
    return False
