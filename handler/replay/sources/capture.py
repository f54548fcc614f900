"""Lines of SageMaker's data capture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.replay.request import Recorded, Unreadable
from handler.replay.sources.fields import from_base64, from_text
from handler.replay.sources.files import Line
from handler.replay.sources.json_members import ABSENT, Malformed, Member, members
from handler.replay.sources.times import seconds

PATH = "/invocations"
"""A capture does not name a route. A request's may be in its custom attributes (`route=`)."""

_READERS = {"JSON": from_text, "CSV": from_text, "BASE64": from_base64}


class Event(NamedTuple):
    """What a variant captured of a request.

    Attributes:
        input: the request's; None where outputs alone are captured.
        output: None where inputs alone are captured, or the model gave no answer.
    """

    id: str
    place: str
    at: float | None
    headers: Mapping[str, str]
    input: bytes | None
    output: Recorded | None


def is_line(found: Mapping[str, Member]) -> bool:
    """Whether a line is one of a capture."""
    return "captureData" in found


def event(line: Line) -> Event | Unreadable:
    """Read a line."""
    try:
        return _event(line.place, members(line.text))
    except Malformed as error:
        return Unreadable(line.place, str(error))


def _event(place: str, found: Mapping[str, Member]) -> Event:
    data = found.get("captureData", ABSENT).value
    about = found.get("eventMetadata", ABSENT).value or {}
    if not isinstance(data, dict):
        raise Malformed("captureData: must be an object")
    if not isinstance(about, dict):
        raise Malformed("eventMetadata: must be an object")
    given, answered = data.get("endpointInput"), data.get("endpointOutput")
    if given is None and answered is None:
        raise Malformed("captureData: has neither endpointInput nor endpointOutput")
    id = about.get("eventId") or place
    if not isinstance(id, str):
        raise Malformed("eventMetadata.eventId: must be a string")
    headers = _headers(about)
    body = None
    if given is not None:
        content_type, body = _part(given, "endpointInput")
        headers = {**({"content-type": content_type} if content_type else {}), **headers}
    return Event(
        id,
        place,
        seconds(about.get("inferenceTime")),
        headers,
        body,
        None if answered is None else Recorded(0, *_part(answered, "endpointOutput")),
    )


def _headers(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that an event keeps. Attributes are a string, or a list of them."""
    headers = {}
    attributes = about.get("customAttributes")
    if isinstance(attributes, list):
        attributes = ",".join(one for one in attributes if isinstance(one, str))
    for name, value in (("custom-attributes", attributes), ("inference-id", about.get("inferenceId"))):
        if isinstance(value, str) and value:
            headers[f"x-amzn-sagemaker-{name}"] = value
    return headers


def _part(part: Any, name: str) -> tuple[str, bytes]:
    """Return content type and body."""
    if not isinstance(part, dict):
        raise Malformed(f"{name}: must be an object")
    encoding = part.get("encoding", "JSON")
    if not isinstance(encoding, str) or encoding not in _READERS:
        raise Malformed(f"{name}.encoding: must be one of {', '.join(_READERS)}, not {str(encoding)[:40]!r}")
    content_type = part.get("observedContentType") or ""
    if not isinstance(content_type, str):
        raise Malformed(f"{name}.observedContentType: must be a string")
    return content_type, _READERS[encoding](part.get("data"), f"{name}.data")
