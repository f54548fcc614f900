"""The files of SageMaker's data capture: `ENDPOINT/VARIANT/yyyy/mm/dd/hh/*.jsonl`, hour by hour.

Each event of an hour waits in a table on disk until the next hour has been read: a shadow variant's files lie beside
those of the serving one, and its answer to the same event may have been written in the next hour. Two hours of a
capture are so on this machine's disk, and nothing of them in memory.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from handler.replay.request import Recorded, Request, Unreadable
from handler.replay.sources.capture import PATH, Event, event
from handler.replay.sources.database import database
from handler.replay.sources.files import File, lines

_HOUR = re.compile(r"(?:(?P<above>.*)/)?(?P<hour>\d{4}/\d\d/\d\d/\d\d)")
_NUMBERS = re.compile(r"\d{4}|\d\d")

_EVENTS = """CREATE TABLE events (
    id TEXT, variant INTEGER, hour INTEGER, place TEXT, at REAL, headers TEXT, input BLOB,
    answered INTEGER, type TEXT, output BLOB, PRIMARY KEY (id, variant))"""
_DUE = "CREATE TABLE due (mine INTEGER, theirs INTEGER)"

_FIND = """INSERT INTO due SELECT e.rowid, o.rowid FROM events e
    LEFT JOIN events o ON o.id = e.id AND o.variant <> e.variant
    WHERE e.hour < ? AND (e.variant = 0 OR o.rowid IS NULL) ORDER BY e.at, e.rowid"""
"""Whose hour is over, in the order in which they came; a shadow's event goes with its serving variant's."""

_ONE = "SELECT id, place, at, headers, input, answered, type, output FROM events WHERE rowid = ?"
_NOTHING_TO_SEND = "only the output was captured (no endpointInput), so there is nothing to send"
_DONE = "DELETE FROM events WHERE rowid IN (SELECT mine FROM due UNION ALL SELECT theirs FROM due)"


class _Placed(NamedTuple):
    """A file, and what its folders say."""

    endpoint: str
    variant: str
    hour: str
    file: File


def read(files: Sequence[File]) -> Iterator[Request | Unreadable]:
    """Yield the requests of a capture, endpoint by endpoint."""
    for _, placed in groupby(sorted(map(_place, files)), key=lambda one: one.endpoint):
        yield from _endpoint(list(placed))


def _place(file: File) -> _Placed:
    """Read a file's folders. One without hours is of the variant that its folder names."""
    match = _HOUR.fullmatch("/".join(file.folders))
    above = (match["above"] or "").split("/") if match else list(file.folders)
    if match is None:
        while above and _NUMBERS.fullmatch(above[-1]):  # a part of a day was named
            above.pop()
    hour = match["hour"] if match else "/".join(file.folders[len(above) :])
    return _Placed("/".join(above[:-1]), above[-1] if above else "", hour, file)


def _endpoint(placed: Sequence[_Placed]) -> Iterator[Request | Unreadable]:
    order = _in_order(placed)
    paired = len(order) == 2  # of more, none is a shadow: SageMaker has one beside one
    numbers = {name: number if paired else 0 for number, name in enumerate(order)}
    with database(_EVENTS, _DUE) as events:
        hours = groupby(sorted(placed, key=lambda one: (one.hour, one.variant, one.file)), key=lambda one: one.hour)
        hour = 0
        for hour, (_, files) in enumerate(hours, 1):
            for one in files:
                yield from _keep(events, numbers[one.variant], hour, one.file)
            yield from _requests(events, before=hour if paired else hour + 1)
        yield from _requests(events, before=hour + 1)


def _in_order(placed: Sequence[_Placed]) -> list[str]:
    """Return the names of the variants, the serving one first.

    A shadow's is called so, or has the smaller files: it gets a share of the requests.
    """
    sizes: dict[str, int] = defaultdict(int)
    for one in placed:
        sizes[one.variant] += one.file.size
    return sorted(sizes, key=lambda name: ("shadow" in name.lower(), -sizes[name], name))


def _keep(events: sqlite3.Connection, variant: int, hour: int, file: File) -> Iterator[Unreadable]:
    """Put a file's events into the table."""
    events.execute("BEGIN")
    try:
        for line in lines(file):
            found = line if isinstance(line, Unreadable) else event(line)
            if isinstance(found, Unreadable):
                yield found
            elif not _put(events, variant, hour, found):
                yield Unreadable(found.place, f"the event {found.id} has an earlier line, which is used")
    finally:
        events.execute("COMMIT")


def _put(events: sqlite3.Connection, variant: int, hour: int, found: Event) -> bool:
    output = found.output
    row = (
        found.id.encode("utf-8", "backslashreplace").decode(), variant, hour, found.place, found.at,
        json.dumps(dict(found.headers)), found.input, output is not None,
        "" if output is None else output.content_type.encode("utf-8", "replace").decode(),
        None if output is None else output.body,
    )  # fmt: skip
    return events.execute("INSERT OR IGNORE INTO events VALUES (?,?,?,?,?,?,?,?,?,?)", row).rowcount == 1


def _requests(events: sqlite3.Connection, before: int) -> Iterator[Request | Unreadable]:
    """Yield and drop what was captured before an hour."""
    events.execute(_FIND, (before,))
    for mine, theirs in events.execute("SELECT mine, theirs FROM due ORDER BY rowid"):
        yield _request(_event(events, mine), None if theirs is None else _event(events, theirs))
    events.execute(_DONE)
    events.execute("DELETE FROM due")


def _event(events: sqlite3.Connection, number: int) -> Event:
    id, place, at, headers, given, answered, content_type, output = events.execute(_ONE, (number,)).fetchone()
    recorded = Recorded(0, content_type, output) if answered else None
    return Event(id, place, at, json.loads(headers), given, recorded)


def _request(mine: Event, theirs: Event | None) -> Request | Unreadable:
    """Return the request of an event; one without a body may still have two answers to compare."""
    other = None if theirs is None else theirs.output
    whole = mine.output is not None and other is not None
    body = mine.input if mine.input is not None or theirs is None else theirs.input
    if body is None and not whole:
        return Unreadable(mine.place, _NOTHING_TO_SEND)
    headers = {**(theirs.headers if theirs else {}), **mine.headers}
    return Request(
        mine.id,
        PATH,
        headers,
        body or b"",
        at=mine.at,
        answer=mine.output,
        other=other if whole else None,
        unsendable=_NOTHING_TO_SEND if body is None else "",
    )
