"""The tables of background responses: each event is read once and in order, and a response ends once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from handler.config.config import Config
from handler.core.errors import Unavailable
from handler.core.owners import owner_by_key
from handler.protocols.kernel.stored import Detached, KeptResponse, Kind
from handler.protocols.responses.background import split_events
from handler.serving.background.tables import LEAST_SECONDS, BackgroundTables, EventPage, NewEvents
from handler.serving.stored_responses import ResponseDatabase

ANN, BOB = owner_by_key("ann"), owner_by_key("bob")
ID = "resp_1"
NOW = 1_000_000.0
DONE = {"status": "completed", "output": [{"id": "msg_1", "type": "message"}]}


def framed(number: int, size: int = 10) -> bytes:
    return b"event: response.e%d\ndata: %s\n\n" % (number, b"x" * size)


def queued(*, streams: bool = True, kind: Kind = "response") -> Detached:
    """A response that is queued with two events."""
    kept = KeptResponse(ID, kind, "", False, {"id": ID, "status": "queued"}, [("", b'{"text":"hi"}')], ())
    return Detached(kept, [framed(0), framed(1)], streams=streams)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Sequence[ResponseDatabase]]:
    """Two servers that share a directory."""
    config = Config(
        responses_max_bytes=1 << 24, responses_total_bytes=1 << 30, responses_max=2, responses_expiration=5000
    )
    opened = [ResponseDatabase(tmp_path, config, lambda: NOW) for _ in range(2)]
    yield opened
    for database in opened:
        database.background.close()
        database.close()


def expiry(database: ResponseDatabase) -> float:
    """The seconds for which the response is stored."""
    with database.writing() as connection:
        (expires,) = connection.execute("SELECT expires FROM answers WHERE id = ?", (ID,)).fetchone()
    return float(expires) - NOW


def read_all(tables: BackgroundTables, limit: int) -> Sequence[bytes]:
    """The events of a response, read as pages of about `limit` bytes."""
    events: list[bytes] = []
    while page := tables.read(ANN, ID, len(events), limit).events:
        assert sum(map(len, page[:-1])) < limit
        events += page
    return events


@pytest.mark.parametrize("seed", range(5))
def test_pages_give_each_event_once_and_in_order_before_and_after_the_end(
    servers: Sequence[ResponseDatabase], seed: int
) -> None:
    draw, (here, there) = random.Random(seed), servers
    here.background.queue(ANN, queued())
    events = [framed(0), framed(1)]
    for _ in range(20):
        new = [framed(len(events) + number, draw.randrange(30_000)) for number in range(draw.randrange(4))]
        assert here.background.append([NewEvents(ID, len(events), new)]) == set()
        events += new
    assert read_all(there.background, draw.randrange(1, 50_000)) == events
    assert not there.background.read(ANN, ID, 0, 1 << 24).ended
    last = [framed(len(events)), framed(len(events) + 1)]
    assert here.background.end(ANN, queued(), DONE, last)
    events += last
    assert read_all(there.background, draw.randrange(1, 50_000)) == events
    first = draw.randrange(len(events) + 1)
    assert there.background.read(ANN, ID, first, 1 << 24) == EventPage(events[first:], ended=True)


def test_a_response_has_ended_once(servers: Sequence[ResponseDatabase]) -> None:
    here, there = servers
    here.background.queue(ANN, queued())
    assert not there.background.end(ANN, queued(), DONE, ())  # it does not run there
    assert there.background.cancel(ANN, ID)
    assert not there.background.cancel(ANN, ID)
    assert here.background.append([NewEvents(ID, 2, [framed(2)], {"status": "in_progress"})]) == {ID}
    assert not here.background.end(ANN, queued(), DONE, [framed(2)])
    response = here.response(ANN, ID)
    assert response is not None
    assert (response["status"], response["output"]) == ("cancelled", [])
    assert here.background.read(ANN, ID, 0, 1 << 20) == EventPage([framed(0), framed(1)], ended=True)


def test_the_end_is_stored_with_its_output(servers: Sequence[ResponseDatabase]) -> None:
    here, there = servers
    here.background.queue(ANN, queued(streams=False))
    assert here.background.append([NewEvents(ID, 0, (), {"id": ID, "status": "in_progress"})]) == set()
    assert (there.response(ANN, ID) or {})["status"] == "in_progress"
    assert here.background.end(ANN, queued(streams=False), DONE, [framed(2)])
    assert there.response(ANN, ID) == DONE
    assert there.background.streams(ANN, ID) is False
    assert there.background.read(ANN, ID, 0, 1 << 20) == EventPage([], ended=True)


def test_owners_are_separate(servers: Sequence[ResponseDatabase]) -> None:
    tables = servers[0].background
    tables.queue(ANN, queued())
    assert (tables.streams(ANN, ID), tables.streams(BOB, ID)) == (True, None)
    assert tables.read(BOB, ID, 0, 1 << 20) == EventPage(None)
    assert not tables.cancel(BOB, ID)
    assert tables.append([NewEvents(ID, 2, [framed(2)])]) == set()  # it still runs


def test_a_response_fails_when_its_server_has_ended_and_not_before(servers: Sequence[ResponseDatabase]) -> None:
    here, there = servers
    here.background.queue(ANN, queued())
    while there.background.recover():
        pass
    assert (there.response(ANN, ID) or {})["status"] == "queued"
    here.background.close()
    here.background.close()
    while there.background.recover():
        pass
    assert (there.response(ANN, ID) or {})["status"] == "failed"
    page = there.background.read(ANN, ID, 0, 1 << 20)
    assert page.ended
    assert page.events is not None
    assert page.events[:2] == [framed(0), framed(1)]
    (last,) = split_events(b"".join(page.events[2:]))
    assert last.startswith(b"event: response.failed\n")
    assert b'"sequence_number":2' in last


@pytest.mark.parametrize(("kind", "seconds"), [("response", 5000), ("background", LEAST_SECONDS)])
def test_a_response_is_kept_while_it_runs_and_then_as_long_as_its_kind(
    servers: Sequence[ResponseDatabase], kind: Kind, seconds: float
) -> None:
    here, _ = servers
    here.background.queue(ANN, queued(kind=kind))
    assert expiry(here) > Config().background_timeout + 5000
    assert here.background.end(ANN, queued(kind=kind), DONE, ())
    assert expiry(here) == seconds


def test_a_final_state_that_has_no_room_changes_nothing(servers: Sequence[ResponseDatabase]) -> None:
    here, _ = servers
    here.background.queue(ANN, queued())
    large = {**DONE, "output": [{"id": "msg_1", "text": "x" * (1 << 25)}]}
    with pytest.raises(Unavailable):
        here.background.end(ANN, queued(), large, ())
    assert (here.response(ANN, ID) or {})["status"] == "queued"
    assert here.background.end(ANN, queued(), {"status": "failed", "output": []}, (), needs_room=False)
    assert (here.response(ANN, ID) or {})["status"] == "failed"
