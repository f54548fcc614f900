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
    streams = traits(request).streams
    media = response.content_type.partition(";")[0].strip().lower()
    return next(_faults(profile, body, streams, values, media), "")


def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(request.body)
    except ValueError:
        raise NoForm("its body is not JSON") from None
    if not isinstance(body, dict) or body.keys().isdisjoint(_PROMPTS):
        raise NoForm(f"it has none of the fields {', '.join(_PROMPTS)}")
    return body


def _faults(profile: str, body: dict[str, Any], streams: bool, values: list[Any], media: str) -> Iterator[str]:
    parameters = body.get("parameters")
    details = isinstance(parameters, dict) and parameters.get("details") is True
    if any(isinstance(value, dict) and "error" in value for value in values):
        yield "an error with status 200"
    if streams:
        expected = OF_PROFILE[profile].content_type if "inputs" in body else "text/event-stream"
        if media != expected:
            yield f"the content type {media or 'is missing'}, not {expected}"
        if not any(map(piece_of, values)):
            yield "no event with text"
    elif len(values) != 1 or text_of(values[0]) is None:
        yield "no text"
    elif "inputs" in body:
        value = values[0]
        if isinstance(value, list) != (profile == "tgi"):
            yield "an object, not a list" if profile == "tgi" else "a list, not an object"
        first = value[0] if isinstance(value, list) else value
        if details and "details" not in first:
            yield "no details, although the request asks for them"
