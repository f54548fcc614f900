"""Reads lines with a path, headers and a body, which are written by hand or by `option.capture_requests`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from handler.core.secrets import path_without_credentials
from proof.replay.exchange import Recorded, Request, Unreadable
from proof.replay.sources.files import (
    ABSENT,
    File,
    Malformed,
    Member,
    from_base64,
    from_member,
    is_status,
    members,
    read_lines,
    seconds,
    without_credentials,
)

_FIELDS = ("id", "at", "method", "path", "headers", "body", "body_base64", "answer")
_GRPC = re.compile(r"/inference\.GRPCInferenceService/Model(Stream)?Infer/")
"""Matches the paths of calls from Triton gRPC clients, whose bodies are the same as those of `infer` over HTTP."""
_METHODS = ("POST", "GET", "PUT", "PATCH", "DELETE")


def is_line(fields: Mapping[str, Member]) -> bool:
    """Return whether a line is a request in this format."""
    return "path" in fields


def read(files: list[File]) -> Iterator[Request | Unreadable]:
    """Yield the requests in the files."""
    for file in files:
        yield from read_lines(file, _request)


def _request(location: str, fields: dict[str, Member]) -> Request:
    if unknown := fields.keys() - set(_FIELDS):
        raise Malformed(f"{sorted(unknown)[0]!r} is unknown; the fields of a line are {', '.join(_FIELDS)}")
    path = fields.get("path", ABSENT).value
    if not isinstance(path, str) or not path.startswith("/"):
        raise Malformed("path: must be a string that begins with /, such as /invocations")
    over_grpc = _GRPC.match(path)
    return Request(
        _text(fields, "id", location),
        f"/v2/models/{path[over_grpc.end() :]}/infer" if over_grpc else path_without_credentials(path),
        _headers(fields),
        _body(fields, ""),
        _method(fields),
        _at(fields),
        None if over_grpc else _response(fields),  # gRPC messages, but the server will respond by HTTP
    )


def _text(fields: Mapping[str, Member], name: str, default: str) -> str:
    value = fields.get(name, ABSENT).value
    if value is None or value == "":
        return default
    if not isinstance(value, str):
        raise Malformed(f"{name}: must be a string")
    return value


def _method(fields: Mapping[str, Member]) -> str:
    method = _text(fields, "method", "POST").upper()
    if method not in _METHODS:
        raise Malformed(f"method: must be one of {', '.join(_METHODS)}")
    return method


def _at(fields: Mapping[str, Member]) -> float | None:
    value = fields.get("at", ABSENT).value
    at = seconds(value)
    if value is not None and at is None:
        raise Malformed("at: must be a number of seconds since 1970, or a time in ISO 8601")
    return at


def _headers(fields: Mapping[str, Member]) -> dict[str, str]:
    value = fields.get("headers", ABSENT).value
    if value is None:
        return {"content-type": "application/json"}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Malformed("headers: must be an object of strings")
    return without_credentials(value.items())


def _body(fields: Mapping[str, Member], of: str) -> bytes:
    if "body" in fields and "body_base64" in fields:
        raise Malformed(f"{of}body and {of}body_base64: only one of them can be the body")
    if "body_base64" in fields:
        return from_base64(fields["body_base64"].value, f"{of}body_base64")
    return from_member(fields.get("body", ABSENT), f"{of}body")


def _response(fields: Mapping[str, Member]) -> Recorded | None:
    value: Any = fields.get("answer", ABSENT).value
    if value is None:
        return None
    if not isinstance(value, dict):
        raise Malformed("answer: must be an object")
    status = value.get("status", 0)
    if not is_status(status):
        raise Malformed("answer.status: must be an HTTP status, or 0 if it is unknown")
    response = members(fields["answer"].text)
    content_type = value.get("content_type", "")
    if not isinstance(content_type, str):
        raise Malformed("answer.content_type: must be a string")
    return Recorded(status, content_type, _body(response, "answer."))
