"""Reads SageMaker data capture files, whose paths are `ENDPOINT/VARIANT/yyyy/mm/dd/hh/*.jsonl`.

A shadow variant has its own files, and its response to an event may be written an hour after that of the serving
variant. Therefore, the events of two hours are stored in a table, which is on disk instead of in memory.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from proof.replay.exchange import EMULATED, Recorded, Request, Unreadable
from proof.replay.sources.files import (
    ABSENT,
    File,
    Malformed,
    Member,
    SourceLine,
    database,
    from_base64,
    from_text,
    lines,
    read_lines,
    seconds,
)

PATH = "/invocations"
"""The path of all requests, because a capture contains no paths. Custom attributes may contain a `route=`."""

_SHARED = " of an emulated account, whose one container serves all variants"
_READERS = {"JSON": from_text, "CSV": from_text, "BASE64": from_base64}


class Event(NamedTuple):
    """A request and its response, as captured for one variant.

    Attributes:
        input: the body of the request, or None if only outputs are captured.
        output: the response, or None if only inputs are captured or there was no response.
    """

    id: str
    location: str
    at: float | None
    headers: Mapping[str, str]
    input: bytes | None
    output: Recorded | None


def is_line(fields: Mapping[str, Member]) -> bool:
    """Return whether a line is from a data capture."""
    return "captureData" in fields


def _event(location: str, fields: Mapping[str, Member]) -> Event:
    data = fields.get("captureData", ABSENT).value
    about = fields.get("eventMetadata", ABSENT).value or {}
    if not isinstance(data, dict):
        raise Malformed("captureData: must be an object")
    if not isinstance(about, dict):
        raise Malformed("eventMetadata: must be an object")
    request, output = data.get("endpointInput"), data.get("endpointOutput")
    if request is None and output is None:
        raise Malformed("captureData: must contain endpointInput or endpointOutput")
    id = about.get("eventId") or location
    if not isinstance(id, str):
        raise Malformed("eventMetadata.eventId: must be a string")
    headers = _headers(about)
    body = None
    if request is not None:
        content_type, body = _part(request, "endpointInput")
        headers = {**({"content-type": content_type} if content_type else {}), **headers}
    return Event(
        id,
        location,
        seconds(about.get("inferenceTime")),
        headers,
        body,
        None if output is None else Recorded(0, *_part(output, "endpointOutput")),
    )


def _headers(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers in an event. Custom attributes are either a string or a list of strings."""
    headers = {}
    attributes = about.get("customAttributes")
    if isinstance(attributes, list):
        attributes = ",".join(text for text in attributes if isinstance(text, str))
    for name, value in (("custom-attributes", attributes), ("inference-id", about.get("inferenceId"))):
        if isinstance(value, str) and value:
            headers[f"x-amzn-sagemaker-{name}"] = value
    return headers


def _part(part: Any, name: str) -> tuple[str, bytes]:
    """Return the content type and the body of an input or output."""
    if not isinstance(part, dict):
        raise Malformed(f"{name}: must be an object")
    encoding = part.get("encoding", "JSON")
    if not isinstance(encoding, str) or encoding not in _READERS:
        raise Malformed(f"{name}.encoding: must be one of {', '.join(_READERS)}, not {str(encoding)[:40]!r}")
    content_type = part.get("observedContentType") or ""
    if not isinstance(content_type, str):
        raise Malformed(f"{name}.observedContentType: must be a string")
    return content_type, _READERS[encoding](part.get("data"), f"{name}.data")


# -- files, hour by hour -----------------------------------------------------------------------------------------------

_HOUR = re.compile(r"(?:(?P<above>.*)/)?(?P<hour>[0-9]{4}/[0-9][0-9]/[0-9][0-9]/[0-9][0-9])")
_NUMBERS = re.compile(r"[0-9]{4}|[0-9][0-9]")

_EVENTS = """CREATE TABLE events (
    id TEXT, variant INTEGER, hour INTEGER, place TEXT, at REAL, headers TEXT, input BLOB,
    answered INTEGER, type TEXT, output BLOB, PRIMARY KEY (id, variant))"""
_DUE = "CREATE TABLE due (mine INTEGER, theirs INTEGER)"

_FIND = """INSERT INTO due SELECT e.rowid, o.rowid FROM events e
    LEFT JOIN events o ON o.id = e.id AND o.variant <> e.variant
    WHERE e.hour < ? AND (e.variant = 0 OR o.rowid IS NULL) ORDER BY e.at, e.rowid"""
"""Selects events of earlier hours in order of arrival, and joins each shadow event to that of the serving variant."""

_SELECT_EVENT = "SELECT id, place, at, headers, input, answered, type, output FROM events WHERE rowid = ?"
_NOTHING_TO_SEND = "only the output was captured (no endpointInput), so there is nothing to send"
_DONE = "DELETE FROM events WHERE rowid IN (SELECT mine FROM due UNION ALL SELECT theirs FROM due)"


class _Placed(NamedTuple):
    """A file, with the endpoint, variant and hour from the names of its folders."""

    endpoint: str
    variant: str
    hour: str
    file: File


def read(files: Sequence[File]) -> Iterator[Request | Unreadable]:
    """Yield the requests of a data capture, one endpoint after the other."""
    for _, placed in groupby(sorted(map(_placed_file, files)), key=lambda item: item.endpoint):
        yield from _endpoint(list(placed))


def variants(files: Sequence[File]) -> tuple[str, str]:
    """Return the variants that sent the recorded responses and those of the shadow, as texts for the report."""
    placed = sorted(map(_placed_file, files), key=lambda item: item.endpoint)
    orders = [_in_order(list(group)) for _, group in groupby(placed, key=lambda item: item.endpoint)]
    shared = _SHARED if any(map(_is_emulated, files[:1])) else ""
    names = [sorted({order[at] for order in orders if len(order) == 2 or (order and not at)} - {""}) for at in range(2)]
    serving, shadow = (f"variant {', '.join(side)}{shared}" if side else "" for side in names)
    return serving, shadow


def _is_emulated(file: File) -> bool:
    """Return whether a file is from an emulated account, according to its first line."""
    line = next(lines(file), None)
    return isinstance(line, SourceLine) and f'"{EMULATED}"' in line.text


def _placed_file(file: File) -> _Placed:
    """Read the endpoint, variant and hour from the folders of a file. Without an hour, the variant is last."""
    match = _HOUR.fullmatch("/".join(file.folders))
    above = (match["above"] or "").split("/") if match else list(file.folders)
    if match is None:
        while above and _NUMBERS.fullmatch(above[-1]):  # the argument named a part of a day
            above.pop()
    hour = match["hour"] if match else "/".join(file.folders[len(above) :])
    return _Placed("/".join(above[:-1]), above[-1] if above else "", hour, file)


def _endpoint(placed: Sequence[_Placed]) -> Iterator[Request | Unreadable]:
    order = _in_order(placed)
    paired = len(order) == 2  # SageMaker allows one shadow variant next to one serving variant
    numbers = {name: number if paired else 0 for number, name in enumerate(order)}
    with database(_EVENTS, _DUE) as events:
        hours = groupby(sorted(placed, key=lambda f: (f.hour, f.variant, f.file)), key=lambda f: f.hour)
        hour = 0
        for hour, (_, files) in enumerate(hours, 1):
            for file in files:
                yield from _keep(events, numbers[file.variant], hour, file.file)
            yield from _requests(events, before=hour if paired else hour + 1)
        yield from _requests(events, before=hour + 1)


def _in_order(placed: Sequence[_Placed]) -> list[str]:
    """Return the names of the variants, with the serving variant first.

    A shadow variant has "shadow" in its name, or smaller files, because it receives a share of the requests.
    """
    sizes: dict[str, int] = defaultdict(int)
    for item in placed:
        sizes[item.variant] += item.file.size
    return sorted(sizes, key=lambda name: ("shadow" in name.lower(), -sizes[name], name))


def _keep(events: sqlite3.Connection, variant: int, hour: int, file: File) -> Iterator[Unreadable]:
    """Store the events from a file in the table, and yield an `Unreadable` for each line that is not used."""
    events.execute("BEGIN")
    try:
        for event in read_lines(file, _event):
            if isinstance(event, Unreadable):
                yield event
            elif not _put(events, variant, hour, event):
                yield Unreadable(event.location, f"an earlier line for the event {event.id} is used instead")
    finally:
        events.execute("COMMIT")


def _put(events: sqlite3.Connection, variant: int, hour: int, event: Event) -> bool:
    output = event.output
    row = (
        event.id.encode("utf-8", "backslashreplace").decode(), variant, hour, event.location, event.at,
        json.dumps(dict(event.headers)), event.input, output is not None,
        "" if output is None else output.content_type.encode("utf-8", "replace").decode(),
        None if output is None else output.body,
    )  # fmt: skip
    return events.execute("INSERT OR IGNORE INTO events VALUES (?,?,?,?,?,?,?,?,?,?)", row).rowcount == 1


def _requests(events: sqlite3.Connection, before: int) -> Iterator[Request | Unreadable]:
    """Yield the requests of events before the hour `before`, and delete these events."""
    events.execute(_FIND, (before,))
    for mine, theirs in events.execute("SELECT mine, theirs FROM due ORDER BY rowid"):
        yield _request(_stored_event(events, mine), None if theirs is None else _stored_event(events, theirs))
    events.execute(_DONE)
    events.execute("DELETE FROM due")


def _stored_event(events: sqlite3.Connection, number: int) -> Event:
    id, location, at, headers, request, has_response, *output = events.execute(_SELECT_EVENT, (number,)).fetchone()
    return Event(id, location, at, json.loads(headers), request, Recorded(0, *output) if has_response else None)


def _request(mine: Event, theirs: Event | None) -> Request | Unreadable:
    """Return the request of an event.

    A request without a body cannot be sent, but its two responses can be compared if both were recorded.
    """
    other = None if theirs is None else theirs.output
    whole = mine.output is not None and other is not None
    body = mine.input if mine.input is not None or theirs is None else theirs.input
    if body is None and not whole:
        return Unreadable(mine.location, _NOTHING_TO_SEND)
    headers = {**(theirs.headers if theirs else {}), **mine.headers}
    return Request(
        mine.id,
        PATH,
        headers,
        body or b"",
        at=mine.at,
        response=mine.output,
        other=other if whole else None,
        unsendable=_NOTHING_TO_SEND if body is None else "",
    )
