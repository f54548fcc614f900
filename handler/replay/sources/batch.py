"""OpenAI's batch files, `{"custom_id", "method", "url", "body"}`, and the files of their answers beside them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from handler.core.recorded_headers import path_without_credentials
from handler.replay.request import Recorded, Request, Unreadable
from handler.replay.sources.bodies import BadBody, from_member
from handler.replay.sources.database import database
from handler.replay.sources.files import File, lines
from handler.replay.sources.json_members import ABSENT, Member, NotAnObject, members

_JSON = "application/json"


class BadLine(ValueError):
    """A line that is not as a batch has it; says which field is wrong."""


def is_request(found: Mapping[str, Member]) -> bool:
    """Whether a line is a batch's request."""
    return "custom_id" in found and "url" in found


def is_answer(found: Mapping[str, Member]) -> bool:
    """Whether a line is one of a batch's output, or of its errors."""
    return "custom_id" in found and "response" in found


def read(requests: Sequence[File], answers: Sequence[File]) -> Iterator[Request | Unreadable]:
    """Yield the requests of files, with the answers of others."""
    table = "CREATE TABLE answers (id TEXT PRIMARY KEY, status INTEGER, body BLOB) WITHOUT ROWID"
    with database(table) as known:
        for file in answers:
            yield from _keep(known, file)
        for file in requests:
            for line in lines(file):
                if isinstance(line, Unreadable):
                    yield line
                    continue
                try:
                    yield _request(known, members(line.text))
                except (NotAnObject, BadLine) as error:
                    yield Unreadable(line.place, str(error))


def _keep(known: sqlite3.Connection, file: File) -> Iterator[Unreadable]:
    """Put a file's answers into the table."""
    known.execute("BEGIN")
    try:
        for line in lines(file):
            if isinstance(line, Unreadable):
                yield line
                continue
            try:
                row = _answer(members(line.text))
            except (NotAnObject, BadLine) as error:
                yield Unreadable(line.place, str(error))
                continue
            if row is not None and known.execute("INSERT OR IGNORE INTO answers VALUES (?,?,?)", row).rowcount == 0:
                yield Unreadable(line.place, f"custom_id {row[0]!r} was answered before, and that line counts")
    finally:
        known.execute("COMMIT")


def _answer(found: Mapping[str, Member]) -> tuple[str, int, bytes] | None:
    """Return id, status and body; None of a request that never ran."""
    id, response = _id(found), found.get("response", ABSENT)
    if response.value is None:
        return None
    if not isinstance(response.value, dict):
        raise BadLine("response: must be an object, or null")
    status = response.value.get("status_code", 0)
    if isinstance(status, bool) or not isinstance(status, int) or not 0 <= status < 1000:
        raise BadLine("response.status_code: must be HTTP's status")
    return id, status, _body(members(response.text).get("body", ABSENT), "response.body")


def _request(known: sqlite3.Connection, found: Mapping[str, Member]) -> Request:
    id, url = _id(found), found.get("url", ABSENT).value
    method = found.get("method", Member("POST", "")).value
    if method != "POST":
        raise BadLine(f"method: must be POST, not {str(method)[:20]!r}")
    if not isinstance(url, str) or not (path := _path(url)).startswith("/"):
        raise BadLine("url: must be a path, as /v1/chat/completions")
    if not isinstance(found.get("body", ABSENT).value, dict):
        raise BadLine("body: must be an object")
    row = known.execute("SELECT status, body FROM answers WHERE id = ?", (id,)).fetchone()
    answer = None if row is None else Recorded(row[0], _JSON, row[1])
    return Request(id, path, {"content-type": _JSON}, _body(found["body"], "body"), answer=answer)


def _id(found: Mapping[str, Member]) -> str:
    id = found.get("custom_id", ABSENT).value
    if not isinstance(id, str) or not id:
        raise BadLine("custom_id: must be a string that is not empty")
    try:
        id.encode()
    except UnicodeEncodeError:
        raise BadLine("custom_id: has half of a surrogate pair, which is no text") from None
    return id


def _path(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadLine("url: is no URL") from None
    return path_without_credentials(parts.path + (f"?{parts.query}" if parts.query else ""))


def _body(member: Member, name: str) -> bytes:
    try:
        return from_member(member)
    except BadBody as error:
        raise BadLine(f"{name}: {error}") from None
