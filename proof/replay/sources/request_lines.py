"""Reads lines with a path, headers and a body, as people and `option.capture_requests` write them, or bodies alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from handler.core.secrets import path_without_credentials
from proof.replay.exchange import Recorded, Request, Unreadable
from proof.replay.sources.files import (
    ABSENT,
    BROKEN,
    File,
    Malformed,
    Member,
    from_base64,
    from_member,
    from_text,
    is_status,
    members,
    read_lines,
    seconds,
    without_credentials,
)

_FIELDS = ("id", "at", "method", "path", "headers", "body", "body_base64", "answer")
_GRPC = re.compile(r"/inference\.GRPCInferenceService/Model(Stream)?Infer/")
"""Matches the paths of calls from Triton gRPC clients, whose bodies are the same as those of `infer` over HTTP."""
_JSON_HEADERS = {"content-type": "application/json"}
_MAX_WHOLE = 64 << 20  # maximum bytes of a file that is read as one JSON document
_METHODS = ("POST", "GET", "PUT", "PATCH", "DELETE")


_PATH = "/invocations"
"""The path of requests without a path. It is SageMaker's only path."""
_OF_BODIES = (
    "inputs", "messages", "prompt", "input", "text_input", "state", "questions", "query", "queries", "documents",
    "texts", "text_1", "source_sentence", "content", "tokens",
)  # fmt: skip
"""Fields of which each body for inference has at least one."""


def is_line(fields: Mapping[str, Member]) -> bool:
    """Return whether a line is a request in this format, or a body."""
    return not {"path", "body", "body_base64"}.isdisjoint(fields) or is_body(fields)


def is_body(fields: Mapping[str, Member]) -> bool:
    """Return whether a line is only the body of a request."""
    return "path" not in fields and not fields.keys().isdisjoint(_OF_BODIES)


def bodies(file: File) -> list[Request] | None:
    """Return the requests of a file that is one JSON body or a list of bodies, on any number of lines, or else None."""
    try:
        with file.open() as stream:
            text = stream.read(_MAX_WHOLE + 1)
        value = json.loads(text) if len(text) <= _MAX_WHOLE else None
    except (*BROKEN, ValueError, RecursionError):
        return None
    documents = value if isinstance(value, list) else [value]
    if not documents or not all(isinstance(body, dict) and is_body(body) for body in documents):
        return None
    several = isinstance(value, list)
    return [
        Request(
            f"{file.name}[{number}]" if several else file.name,
            _PATH,
            dict(_JSON_HEADERS),
            json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass") if several else text.strip(),
        )
        for number, body in enumerate(documents)
    ]


def read(files: list[File]) -> Iterator[Request | Unreadable]:
    """Yield the requests in the files."""
    for file in files:
        yield from read_lines(file, _request)


def _request(location: str, fields: dict[str, Member]) -> Request:
    if is_body(fields) and fields.keys().isdisjoint(("body", "body_base64")):
        parts = (f"{json.dumps(name)}: {member.text}" for name, member in fields.items())
        return Request(location, _PATH, dict(_JSON_HEADERS), from_text(f"{{{', '.join(parts)}}}", "the body"))
    if unknown := fields.keys() - set(_FIELDS):
        raise Malformed(f"{sorted(unknown)[0][:80]!r} is unknown; the fields of a line are {', '.join(_FIELDS)}")
    if "body" not in fields and "body_base64" not in fields and "path" not in fields:
        raise Malformed("path: is missing")
    path = fields.get("path", Member(_PATH, "")).value
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
        return dict(_JSON_HEADERS)
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
