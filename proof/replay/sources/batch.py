"""Reads OpenAI batch files, whose lines contain custom_id, method, url and body, and their response files."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence

from proof.replay.exchange import Recorded, Request, Unreadable
from proof.replay.sources.files import (
    ABSENT,
    File,
    Malformed,
    Member,
    database,
    from_member,
    is_status,
    members,
    path_of,
    read_lines,
    split_url,
)

_JSON = "application/json"


def is_request(fields: Mapping[str, Member]) -> bool:
    """Return whether a line is a request in a batch."""
    return "custom_id" in fields and "url" in fields


def is_response(fields: Mapping[str, Member]) -> bool:
    """Return whether a line is from the output or error file of a batch."""
    return "custom_id" in fields and "response" in fields


def read(requests: Sequence[File], responses: Sequence[File]) -> Iterator[Request | Unreadable]:
    """Yield the requests in request files, with their responses from response files."""
    table = "CREATE TABLE answers (id TEXT PRIMARY KEY, status INTEGER, body BLOB) WITHOUT ROWID"
    with database(table) as stored:
        for file in responses:
            yield from _keep(stored, file)
        for file in requests:
            yield from read_lines(file, lambda _, fields: _request(stored, fields))


def _keep(stored: sqlite3.Connection, file: File) -> Iterator[Unreadable]:
    """Store the responses from a file in the table, and yield an `Unreadable` for each line that is not used."""
    stored.execute("BEGIN")
    try:
        for response in read_lines(file, lambda location, fields: (location, _response(fields))):
            if isinstance(response, Unreadable):
                yield response
                continue
            location, row = response
            if row is not None and stored.execute("INSERT OR IGNORE INTO answers VALUES (?,?,?)", row).rowcount == 0:
                yield Unreadable(location, f"an earlier response for custom_id {row[0]!r} is used instead")
    finally:
        stored.execute("COMMIT")


def _response(fields: Mapping[str, Member]) -> tuple[str, int, bytes] | None:
    """Return the ID, status and body of a response, or None if the request never ran."""
    id, response = _id(fields), fields.get("response", ABSENT)
    if response.value is None:
        return None
    if not isinstance(response.value, dict):
        raise Malformed("response: must be an object, or null")
    status = response.value.get("status_code", 0)
    if not is_status(status):
        raise Malformed("response.status_code: must be an HTTP status")
    return id, status, from_member(members(response.text).get("body", ABSENT), "response.body")


def _request(stored: sqlite3.Connection, fields: Mapping[str, Member]) -> Request:
    id, url = _id(fields), fields.get("url", ABSENT).value
    method = fields.get("method", Member("POST", "")).value
    if method != "POST":
        raise Malformed(f"method: must be POST, not {str(method)[:20]!r}")
    if not isinstance(url, str) or not (parts := split_url(url, "url")).path.startswith("/"):
        raise Malformed("url: must be a path, such as /v1/chat/completions")
    if not isinstance(fields.get("body", ABSENT).value, dict):
        raise Malformed("body: must be an object")
    row = stored.execute("SELECT status, body FROM answers WHERE id = ?", (id,)).fetchone()
    response = None if row is None else Recorded(row[0], _JSON, row[1])
    body = from_member(fields["body"], "body")
    return Request(id, path_of(parts), {"content-type": _JSON}, body, response=response)


def _id(fields: Mapping[str, Member]) -> str:
    id = fields.get("custom_id", ABSENT).value
    if not isinstance(id, str) or not id:
        raise Malformed("custom_id: must be a non-empty string")
    try:
        id.encode()
    except UnicodeEncodeError:
        raise Malformed("custom_id: has a lone surrogate, which is not text") from None
    return id
