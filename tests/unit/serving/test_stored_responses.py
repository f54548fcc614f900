"""The store of answers: whose they are, how long, how many, and where a host steps the event loop."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError, Overloaded, Unavailable
from handler.core.framing import dumps
from handler.core.owners import owner_by_key
from handler.djl.batches import Item
from handler.protocols.kernel.stored import KeptResponse, Recalled, Wanted, kept_items
from handler.protocols.openai.api import Page
from handler.protocols.responses.conversations import new_conversation
from handler.serving import stored_responses
from handler.serving.background.tables import IN_PROGRESS, BackgroundTables
from handler.serving.database import open_database
from handler.serving.stored_responses import OwnersKeeper, ResponseDatabase, ResponseStore, configured_store
from tests.stepped import Bench, Clock, benches

__all__ = ["benches"]
# -- the store of answers: whose they are, how long and how many, in memory and in a file that processes share ---------


ANN, BOB = owner_by_key("ann"), owner_by_key("bob")


def open_store(directory: Path | None, clock: Clock | None = None, **limits: Any) -> ResponseStore:
    limits = {"responses_max_bytes": 1 << 20, "responses_total_bytes": 1 << 30, "max_request_size": 1 << 20, **limits}
    config = Config(**{"responses_expiration": 100, "responses_max": 100, **limits})
    return ResponseStore(ResponseDatabase(directory, config, clock or Clock(1_000_000.0, 0.001)))


def open_with_connection(
    directory: Path | None, clock: Clock | None = None, **limits: Any
) -> tuple[ResponseStore, sqlite3.Connection]:
    """Return a store, and the connection to SQLite on which its thread works."""
    connections: list[sqlite3.Connection] = []
    opens = open_database

    def opened(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connections.append(opens(*arguments, **options))
        return connections[-1]

    with mock.patch.object(stored_responses, "open_database", opened):
        store = open_store(directory, clock, **limits)
    return store, connections[0]


def threads_of_stores() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "responses"}


@pytest.fixture(params=["memory", "directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "kept"


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0, 0.001)


@pytest.fixture
def store(place: Path | None, clock: Clock) -> Iterator[ResponseStore]:
    store = open_store(place, clock)
    yield store
    store.close()


def item(id: str, text: str = "") -> dict[str, Any]:
    return {"id": id, "type": "message", "text": text}


def answer(
    id: str, previous: str = "", *, text: str = "", failed: bool = False, kind: Any = "response"
) -> KeptResponse:
    given = kept_items([item(f"in_{id}", text)])
    return KeptResponse(id, kind, previous, failed, {"id": id, "object": "response"}, given, [item(f"out_{id}")])


def keep(store: ResponseStore, *answers: KeptResponse, owner: str = ANN) -> list[bool]:
    """Return which of them were kept."""
    return [store.write(owner, partial(store.keep, owner, one)).result(20) for one in answers]


def recall(store: ResponseStore, previous: str = "", *items: str, owner: str = ANN, kind: Any = "response") -> Recalled:
    return store.recall(owner, Wanted(kind, True, previous, items), lambda num_bytes: None).result(10)


def ids(items: Sequence[Any]) -> list[str]:
    return [one["id"] for one in items]


def test_a_conversation_is_recalled_in_order(store: ResponseStore) -> None:
    keep(store, answer("a"), answer("b", "a"), answer("c", "b"), answer("other", "a"))
    found = recall(store, "c")
    assert ids(found.history) == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
    assert (found.state, found.head["id"]) == ("found", "a")
    assert ids(recall(store, "other").history) == ["in_a", "out_a", "in_other", "out_other"]
    assert recall(store, "", "out_b", "in_a", "none").items == {"out_b": item("out_b"), "in_a": item("in_a")}
    assert store.response(ANN, "b").result(10) == {"id": "b", "object": "response", "output": [item("out_b")]}


def test_what_is_another_owners_does_not_exist(store: ResponseStore) -> None:
    keep(store, answer("a"))
    keep(store, answer("b", "a"), owner=BOB)
    assert recall(store, "a", owner=BOB).state == "missing"
    assert recall(store, "b", owner=BOB).state == "broken", "it cannot be gone on from by another's"
    assert recall(store, "", "in_a", owner=BOB).items == {}
    assert store.response(BOB, "a").result(10) is None
    assert store.input_items(BOB, "a", Page(9, "", newest_first=True)).result(10) is None
    assert store.delete(BOB, "a").result(10) is False
    assert recall(store, "a").state == "found"
    assert recall(store, "a", kind="thread").state == "missing"


def test_pages_of_the_input(store: ResponseStore) -> None:
    given = [item(f"i{number}") for number in range(5)]
    keep(store, KeptResponse("a", "response", "", False, {}, kept_items(given), [item("out")]))

    def page(limit: int, after: str = "", *, newest: bool = False) -> tuple[list[str], bool]:
        found = store.input_items(ANN, "a", Page(limit, after, newest)).result(10)
        assert found is not None
        items, has_more = found
        return ids(items), has_more

    assert page(9) == (["i0", "i1", "i2", "i3", "i4"], False)
    assert page(2, newest=True) == (["i4", "i3"], True)
    assert page(2, "i3", newest=True) == (["i2", "i1"], True)
    assert page(2, "i2") == (["i3", "i4"], False)
    assert store.input_items(ANN, "a", Page(1, "none", newest_first=True)).result(10) is None


def test_deleted_expired_and_failed_ones(store: ResponseStore, clock: Clock) -> None:
    keep(store, answer("a"), answer("b", "a"), answer("f", "a", failed=True))
    assert recall(store, "f").state == "failed"
    assert store.delete(ANN, "a").result(10) is True
    assert store.delete(ANN, "a").result(10) is False
    assert (recall(store, "a").state, recall(store, "b").state) == ("missing", "broken")
    assert recall(store, "", "in_a").items == {}
    clock.now += 99
    assert store.response(ANN, "b").result(10) is not None
    clock.now += 2
    assert store.response(ANN, "b").result(10) is None


def test_what_is_gone_on_from_lives_on_with_all_before(store: ResponseStore, clock: Clock) -> None:
    keep(store, answer("a"), answer("b", "a"), answer("idle"))
    assert recall(store, "idle").state == "found"
    clock.now += 60
    recall(store, "b")
    clock.now += 60
    recall(store, "b")
    clock.now += 60
    assert recall(store, "idle").state == "missing"
    assert recall(store, "b").state == "found"


def test_the_least_recently_used_go_first(place: Path | None) -> None:
    store = open_store(place, responses_max=3)
    keep(store, answer("a"), answer("b"), answer("c"))
    recall(store, "a")
    keep(store, answer("d"), answer("e"))
    found = {id for id in "abcde" if store.response(ANN, id).result(10) is not None}
    assert found == {"a", "d", "e"}
    store.close()


def pragma(store: ResponseStore, connection: sqlite3.Connection, name: str) -> int:
    (value,) = store.write(ANN, lambda: connection.execute(f"PRAGMA {name}").fetchone()).result(10)
    return int(value)


def test_bytes_are_bounded_in_memory_and_on_disk(place: Path | None) -> None:
    store, connection = open_with_connection(place, responses_max=10_000, responses_max_bytes=1 << 20)
    for number in range(60):
        keep(store, answer(f"r{number}", text="x" * 100_000))
    kept = [number for number in range(60) if store.response(ANN, f"r{number}").result(10) is not None]
    assert kept == [*range(50, 60)]
    pages, size = (pragma(store, connection, name) for name in ("page_count", "page_size"))
    assert pages * size < 2 << 20
    if place is not None:
        assert sum(path.stat().st_size for path in place.iterdir()) < 3 << 20
    keep(store, answer("huge", text="x" * (2 << 20)))
    assert store.response(ANN, "huge").result(10) is None
    store.close()


def test_a_conversation_is_bounded(place: Path | None) -> None:
    store = open_store(place, max_request_size=1000)
    keep(store, answer("a", text="x" * 600), answer("b", "a", text="x" * 600))
    assert recall(store, "a").state == "found"
    assert recall(store, "b").state == "too_long"
    assert recall(store, "", "in_a", "in_b").state == "too_long"
    store.close()


def test_a_long_conversation_costs_what_it_holds(place: Path | None) -> None:
    """Four times the answers take about four times the steps of SQLite's machine."""
    store, connection = open_with_connection(place, responses_max=5000)
    for number in range(400):
        keep(store, answer(f"r{number}", f"r{number - 1}" if number else ""))
        if number % 100 == 0:
            recall(store, f"r{number}")

    def steps(last: str) -> int:
        counted = itertools.count()
        connection.set_progress_handler(lambda: next(counted) < 0, 1)
        recall(store, last)
        connection.set_progress_handler(None, 1)
        return next(counted)

    assert len(recall(store, "r399").history) == 800
    assert 1000 < steps("r399") < 4.5 * steps("r99")
    store.close()


def test_a_file_survives_a_restart_and_is_shared(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    keep(first, answer("a"))
    assert first.response(ANN, "a").result(10) is not None
    keep(second, answer("b", "a"))
    assert ids(recall(second, "b").history) == ["in_a", "out_a", "in_b", "out_b"]
    assert recall(first, "b").state == "found"
    first.close()
    second.close()
    third = open_store(tmp_path)
    assert recall(third, "b").state == "found"
    third.close()
    assert (tmp_path / "responses.sqlite3").stat().st_mode & 0o077 == 0


def test_what_is_deleted_is_not_in_the_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keep(store, answer("a", text="a secret of Ann's"))
    store.response(ANN, "a").result(10)
    assert b"a secret of Ann's" in (tmp_path / "responses.sqlite3").read_bytes()
    assert store.delete(ANN, "a").result(10)
    assert b"a secret of Ann's" not in (tmp_path / "responses.sqlite3").read_bytes()
    assert b"ann" not in (tmp_path / "responses.sqlite3").read_bytes().lower()
    store.close()


def test_expired_ones_go_without_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "_PERIOD", 0.05)
    clock = Clock(1_000_000.0, 0.001)
    store = open_store(tmp_path, clock)
    keep(store, answer("a", text="a secret of Ann's"))
    store.response(ANN, "a").result(10)
    clock.now += 200
    deadline = time.monotonic() + 10
    while b"a secret of Ann's" in (tmp_path / "responses.sqlite3").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    store.close()


def test_many_expired_ones_go_a_few_at_a_time(place: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that deletes them all would keep other owners waiting, and other servers from writing."""
    monkeypatch.setattr(stored_responses, "_MAX_REMOVED", 10)
    monkeypatch.setattr(stored_responses, "_PERIOD", 3600)
    clock = Clock(1_000_000.0, 0.001)
    store, connection = open_with_connection(place, clock)
    keep(store, *(answer(f"r{number}") for number in range(35)))
    clock.now += 200

    def remove() -> tuple[bool, int]:
        more = store._database.remove_expired()
        return more, connection.execute("SELECT count(*) FROM answers").fetchone()[0]

    assert [store.write(BOB, remove).result(10) for _ in range(5)] == [
        (True, 25), (True, 15), (True, 5), (False, 0), (False, 0),
    ]  # fmt: skip
    store.close()


def test_large_expired_ones_go_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "_MAX_REMOVED_BYTES", 1000)
    monkeypatch.setattr(stored_responses, "_PERIOD", 3600)
    clock = Clock(1_000_000.0, 0.001)
    store = open_store(None, clock)
    keep(store, *(answer(f"r{number}", text="x" * 2000) for number in range(3)))
    clock.now += 200
    removed = [store.write(BOB, store._database.remove_expired).result(10) for _ in range(4)]
    assert removed == [True, True, True, False]
    store.close()


def test_expired_ones_go_before_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have been used later, as background responses that are kept for polling."""
    monkeypatch.setattr(ResponseDatabase, "_remove_expired", lambda database: False)
    store, connection = open_with_connection(None, responses_max=3)
    keep(store, answer("a"), answer("b"), answer("c"))
    query = "UPDATE answers SET expires = 0 WHERE id IN ('b', 'c')"
    store.write(ANN, lambda: connection.execute(query)).result(10)
    assert keep(store, answer("d"), answer("e")) == [True, True]
    assert [id for id in "abcde" if store.response(ANN, id).result(10) is not None] == ["a", "d", "e"]
    store.close()


def test_a_new_one_deletes_few_expired_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait until its transaction ends."""
    monkeypatch.setattr(stored_responses, "_MAX_REMOVED", 2)
    monkeypatch.setattr(ResponseDatabase, "_remove_expired", lambda database: False)
    store, connection = open_with_connection(None, responses_max=5)
    keep(store, *(answer(id) for id in "abcde"))
    store.write(ANN, lambda: connection.execute("UPDATE answers SET expires = 0")).result(10)
    assert keep(store, answer("f")) == [True]
    count = store.write(ANN, lambda: connection.execute("SELECT count(*) FROM answers").fetchone()).result(10)
    assert count == (4,)
    store.close()


def test_expired_ones_go_while_calls_never_cease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "_PERIOD", 0.05)
    clock = Clock(1_000_000.0, 0.001)
    store, connection = open_with_connection(None, clock)
    keep(store, answer("a"))
    clock.now += 200
    deadline = time.monotonic() + 10
    found: list[int] = []

    def look() -> None:
        """A call that is always followed by another one which waits already."""
        found[:] = connection.execute("SELECT count(*) FROM answers").fetchone()
        if found[0] and time.monotonic() < deadline:
            store.write(BOB, look)
            time.sleep(0.001)

    store.write(BOB, look)
    store.write(BOB, look)
    while found != [0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    store.close()


def test_a_closed_store_finishes_its_writes_and_closes_its_database(place: Path | None) -> None:
    earlier = threads_of_stores()
    store, connection = open_with_connection(place)
    begun, ended = threading.Event(), threading.Event()
    store.write(ANN, begun.wait)
    last = store.write(ANN, ended.set)
    threading.Timer(0.05, begun.set).start()
    store.close()
    assert last.done()
    assert threads_of_stores() <= earlier
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    store.close()  # without an effect


def test_a_closed_store_finishes_its_writes_although_expired_ones_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "_PERIOD", 0.01)
    earlier = threads_of_stores()
    store = open_store(None)
    closing = threading.Event()

    def work() -> None:
        closing.wait(10)
        time.sleep(0.05)  # the period passes

    store.write(ANN, work)
    last = store.write(ANN, bool)
    threading.Timer(0.05, closing.set).start()
    store.close()
    assert last.done()
    assert threads_of_stores() <= earlier


def test_a_store_goes_on_if_expired_ones_cannot_be_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server's lock file cannot be opened, for example, because too many files are open."""
    monkeypatch.setattr(stored_responses, "_PERIOD", 0.01)
    failed = threading.Event()

    def recover(tables: BackgroundTables) -> bool:
        failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    store = open_store(None)
    monkeypatch.setattr(BackgroundTables, "recover", recover)
    assert failed.wait(10)
    assert keep(store, answer("a")) == [True]
    store.close()


def test_the_store_is_closed_with_the_server() -> None:
    earlier = threads_of_stores()
    bench = Bench(store=open_store(None))
    assert len(threads_of_stores() - earlier) == 1
    bench.model.close()
    assert threads_of_stores() <= earlier


def test_an_answer_in_progress_is_known_until_its_request_ends(store: ResponseStore) -> None:
    held = OwnersKeeper(store, ANN)
    held.begin("a", {"id": "a", "status": "in_progress"})
    assert recall(store, "a").state == "in_progress"
    assert recall(store, "a", owner=BOB).state == "missing"
    assert store.response(ANN, "a").result(10) == {"id": "a", "status": "in_progress"}
    assert store.response(BOB, "a").result(10) is None
    keep(store, answer("a"))
    assert recall(store, "a").state == "found"
    held.begin("b", {})
    assert recall(store, "b").state == "in_progress"
    held.end()
    held.begin("c", {})  # on a thread of a formatter
    assert [recall(store, id).state for id in "abc"] == ["found", "missing", "missing"]
    gone: Any = OwnersKeeper(store, ANN)
    gone.begin("d", {})
    assert recall(store, "d").state == "in_progress"
    del gone
    gc.collect()
    assert recall(store, "d").state == "missing"


def test_calls_that_wait_are_bounded(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "_MAX_WAITING", 3)
    gate = threading.Event()
    store.write(ANN, gate.wait)
    time.sleep(0.05)
    waiting = [store.response(ANN, "a") for _ in range(3)]
    with pytest.raises(Overloaded, match="too many calls to the response store are waiting: 3"):
        store.response(ANN, "a")
    gate.set()
    assert [one.result(10) for one in waiting] == [None] * 3


def test_an_owner_cannot_empty_the_store_of_another(place: Path | None) -> None:
    store = open_store(place, responses_max=3, responses_max_bytes=100_000)
    keep(store, answer("bobs"), owner=BOB)
    keep(store, *(answer(f"r{number}") for number in range(9)), answer("long", text="x" * 90_000))
    assert recall(store, "bobs", owner=BOB).state == "found"
    assert recall(store, "long").state == "found"
    assert recall(store, "r5").state == "missing"
    store.close()


def test_a_full_store_takes_nothing_from_others(place: Path | None) -> None:
    store = open_store(place, responses_max_bytes=60_000, responses_total_bytes=100_000)
    text = "x" * 50_000
    assert keep(store, answer("a", text=text)) == [True]
    assert keep(store, answer("b1"), answer("b2", text=text), owner=BOB) == [True, False]
    with pytest.raises(
        Unavailable, match=r"all API keys together may store 100000 bytes of responses, .*responses_total_bytes"
    ):
        store.check_room(BOB, 50_000).result(10)
    store.check_room(BOB, 30_000).result(10)
    assert recall(store, "b1", owner=BOB).state == "found", "what does not fit costs its owner nothing"
    store.check_room(ANN, 50_000).result(10)
    assert keep(store, answer("c", text=text)) == [True], "it has an older one that makes room"
    assert (recall(store, "a").state, recall(store, "b1", owner=BOB).state) == ("missing", "found")
    store.close()


def test_room_is_reserved_for_each_item(store: ResponseStore) -> None:
    keep(store, answer("a", text="x" * 1000))
    sizes: list[int] = []
    store.recall(ANN, Wanted("response", True, "", ("out_a", "in_a")), sizes.append).result(10)
    assert sizes == [len(dumps(item("out_a"))), len(dumps(item("in_a", "x" * 1000)))]


def test_room_is_reserved_before_a_response_is_read(place: Path | None) -> None:
    """What is refused is neither read nor kept by the error."""
    store, connection = open_with_connection(place)
    keep(store, answer("a", text="x" * 5000)._replace(output=[item("out", "y" * 3000)]))
    statements: list[str] = []
    conversation = new_conversation({})
    spoken = kept_items([{"id": "said", "text": "z" * 4000}])
    store.change_conversation(ANN, lambda one: (one.create(ANN, {**conversation}, spoken), None)).result(10)
    for read, least in (
        (partial(store.response, ANN, "a"), 3000),
        (partial(store.input_items, ANN, "a", Page(9, "", newest_first=True)), 5000),
        (partial(store.recall, ANN, Wanted("response", True, "", ("out",))), 3000),
        (partial(store.recall, ANN, Wanted("response", True, "", ("said",))), 4000),
    ):
        reserved: list[int] = []
        assert read(reserve=reserved.append).result(10) is not None
        assert least < sum(reserved) < least + 500

        def refuse(num_bytes: int) -> None:
            raise Overloaded("no memory")

        connection.set_trace_callback(statements.append)
        refused = read(reserve=refuse).exception(10)
        assert isinstance(refused, Overloaded)
        assert refused.__traceback__ is None
        connection.set_trace_callback(None)
    assert not [one for one in statements if one.startswith(("SELECT head", "SELECT item ", "SELECT item,"))]
    store.close()


def test_a_response_that_no_key_may_have_has_no_room(store: ResponseStore) -> None:
    with pytest.raises(Unavailable, match=r"has 1048577 bytes, .*may store \(option\.responses_max_bytes\)"):
        store.check_room(ANN, (1 << 20) + 1).result(10)


def test_one_owners_calls_leave_anothers_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "_MAX_WAITING", 40)
    store, go_on, done = open_store(None), threading.Event(), list[str]()
    blocked = store.write(ANN, go_on.wait)
    while not blocked.running():
        time.sleep(0.001)
    for number in range(40):
        store.write(ANN, partial(done.append, f"ann {number}"))
    with pytest.raises(Overloaded, match="too many calls to the response store are waiting: 40"):
        store.response(ANN, "a")
    found = store.response(BOB, "b")
    last = [store.write(BOB, partial(done.append, f"bob {number}")) for number in range(2)]
    go_on.set()
    assert found.result(10) is None
    assert [one.result(10) for one in last] == [None, None]
    store.close()
    assert done[:5] == ["ann 0", "ann 1", "bob 0", "ann 2", "bob 1"]
    assert len(done) == 42


def test_it_is_said_whether_an_answer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for a file that another process holds do so together, not one after the other."""
    monkeypatch.setattr(stored_responses, "BUSY_SECONDS", 0.2)
    store = open_store(tmp_path)
    other = sqlite3.connect(tmp_path / "responses.sqlite3", isolation_level=None)
    with contextlib.closing(other):
        other.execute("BEGIN IMMEDIATE")
        waiting = [store.write(ANN, partial(store.keep, ANN, answer(f"r{number}"))) for number in range(100)]
        assert [one.result(10) for one in waiting] == [False] * 100
        other.execute("ROLLBACK")
        assert keep(store, answer("a")) == [True]
    assert keep(store, answer("a")) == [False], "its id is taken"
    store.close()


def test_a_disk_that_is_full_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, connection = open_with_connection(tmp_path)
    pragma(store, connection, f"max_page_count = {pragma(store, connection, 'page_count')}")
    assert keep(store, answer("a", text="x" * 100_000)) == [False]
    assert "a response could not be stored: database or disk is full" in caplog.text
    assert recall(store, "a").state == "missing"
    store.close()


def test_a_full_disk_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, connection = open_with_connection(tmp_path)
    query = f"INSERT INTO answers SELECT 'x', '', '', '', 0, zeroblob({1 << 20}), 0, 0, 0"
    pragma(store, connection, f"max_page_count = {pragma(store, connection, 'page_count')}")
    for _ in range(50):
        with pytest.raises(Unavailable):
            store.write(ANN, lambda: connection.execute(query)).result(10)
    assert 1 <= caplog.text.count("database or disk is full") <= 10
    store.close()


def test_a_response_is_read_as_it_is_at_one_moment(tmp_path: Path) -> None:
    """Another server that shares the directory deletes it amid the reading."""
    one, connection = open_with_connection(tmp_path)
    keep(one, answer("a"), answer("b", "a"))
    assert recall(one, "b").state == "found"
    with sqlite3.connect(
        tmp_path / "responses.sqlite3", timeout=0.1, isolation_level=None, check_same_thread=False
    ) as other:
        other.execute("PRAGMA foreign_keys = ON")
        disturbances: list[str] = []

        def disturb(statement: str) -> None:
            if statement.startswith("SELECT item FROM"):  # the head has been read
                disturbances.append(statement)
                with contextlib.suppress(sqlite3.OperationalError):  # it is locked
                    other.execute("DELETE FROM answers")

        connection.set_trace_callback(disturb)
        found = one.response(ANN, "a").result(10)
        assert found is not None
        assert ids(found["output"]) == ["out_a"]
        assert ids(recall(one, "b").history) == ["in_a", "out_a", "in_b", "out_b"]
        assert len(disturbances) == 3
    other.close()
    one.close()


def test_ids_that_are_no_texts_are_left_out() -> None:
    assert [id for id, _ in kept_items([{"id": {"a": 1}}, {"id": None}, {"id": 5}, {}, {"id": "a"}])] == [
        *[""] * 4,
        "a",
    ]


def test_rows_that_another_hand_has_damaged_are_told(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock)
    keep(store, answer("a"), answer("b", "a"))
    for table, column in (("items", "item"), ("answers", "head")):
        with contextlib.closing(sqlite3.connect(tmp_path / "responses.sqlite3")) as database:
            database.execute(f"UPDATE {table} SET {column} = 'no json'")
            database.commit()
        for call in (
            partial(store.response, ANN, "b"),
            partial(store.recall, ANN, Wanted("response", True, "b"), lambda num_bytes: None),
            partial(store.recall, ANN, Wanted("response", True, "", ("in_a",)), lambda num_bytes: None),
            partial(store.input_items, ANN, "a", Page(9, "", newest_first=True)),
        ):
            with pytest.raises(Unavailable, match="the stored responses cannot be read or written"):
                call().result(10)
    store.close()


def test_a_file_that_breaks_fails_calls_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, connection = open_with_connection(tmp_path)
    store.write(ANN, lambda: connection.execute("DROP TABLE items")).result(10)
    assert keep(store, answer("a")) == [False]
    with pytest.raises(Unavailable, match="the stored responses cannot be read"):
        recall(store, "", "x")
    assert "a response could not be stored: no such table" in caplog.text
    assert store.response(ANN, "a").result(10) is None
    store.close()


def _garbage(directory: Path) -> None:
    (directory / "responses.sqlite3").write_bytes(b"no database" * 100)


def _newer(directory: Path) -> None:
    with contextlib.closing(sqlite3.connect(directory / "responses.sqlite3", isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 7")


def _another(directory: Path) -> None:
    with contextlib.closing(sqlite3.connect(directory / "responses.sqlite3", isolation_level=None)) as database:
        database.execute("CREATE TABLE notes (id)")


def _another_of_version_1(directory: Path) -> None:
    with contextlib.closing(sqlite3.connect(directory / "responses.sqlite3", isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 1")


def _directory(directory: Path) -> None:
    (directory / "responses.sqlite3").mkdir()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_garbage, "not a database"),
        (_newer, "have version 7"),
        (_directory, "Is a directory"),
        (_another, "another program's database"),
        (_another_of_version_1, "no such table: answers"),
    ],
)
def test_a_place_that_cannot_be_used_stops_the_start(tmp_path: Path, spoil: Any, why: str) -> None:
    spoil(tmp_path)
    told = rf"option\.responses_store=.*: responses cannot be stored in this directory: .*{why}"
    with pytest.raises(ConfigError, match=told):
        configured_store(Config(responses_store=str(tmp_path)))


def test_off_is_no_store() -> None:
    assert configured_store(Config()) is None


# -- stored in steps ---------------------------------------------------------------------------------------------------
# Stored responses where a host steps the event loop, as DJL Serving does: by `route`, with a client's own key.


KEY = {"authorization": "Bearer ann"}


@pytest.fixture
def bench() -> Bench:
    most = 1 << 20
    config = Config(responses_max_bytes=most, responses_total_bytes=most, max_request_size=most)
    return Bench(owner_header="authorization", store=ResponseStore(ResponseDatabase(None, config)))


def send(bench: Bench, body: Any, route: str = "/v1/responses", headers: dict[str, str] = KEY) -> Any:
    item = Item(json.dumps(body).encode(), {"route": route, **headers})
    pieces: Sequence[Any] = bench.batch.step(1, {0: item})
    (whole,) = bench.finish([*pieces])
    return json.loads(whole)


def test_a_conversation_goes_on_by_its_id(bench: Bench) -> None:
    first = send(bench, {"input": "one two", "max_output_tokens": 2})
    assert first["store"] is True
    second = send(bench, {"input": "three", "max_output_tokens": 2, "previous_response_id": first["id"]})
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_a_response_is_in_progress_until_its_request_ends(bench: Bench) -> None:
    """Somebody may refer to the request for longer."""
    store = bench.model.preprocessor.store
    assert store is not None
    body = {"input": "one two", "max_output_tokens": 60, "stream": True}
    pieces = bench.batch.step(1, {0: Item(json.dumps(body).encode(), {"route": "/v1/responses", **KEY})})
    data = b""
    while b"resp_" not in (data := data + pieces[0].data):
        pieces = bench.batch.step(1, {})
    id, owner = "resp_" + data.split(b"resp_")[1].split(b'"')[0].decode(), ANN
    assert store.response(owner, id).result(10)["status"] == "in_progress"  # type: ignore[index]
    tasks = [*bench.model.admission.tasks]
    bench.batch.reset()
    assert store.response(owner, id).result(10) is None
    assert tasks


def test_another_key_finds_nothing(bench: Bench) -> None:
    first = send(bench, {"input": "one two", "max_output_tokens": 2})
    again = {"input": "three", "previous_response_id": first["id"]}
    found = send(bench, again, headers={"authorization": "Bearer bob"})
    assert found["error"]["code"] == "previous_response_not_found"


def test_a_thread_goes_on_by_its_id(bench: Bench) -> None:
    asked = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 2}
    first = send(bench, {**asked, "thread": {"type": "create"}}, "/v1/messages")
    more = {"thread": {"type": "continue", "previous_message_id": first["id"]}}
    second = send(bench, {**asked, **more}, "/v1/messages")
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_a_damaged_background_response_keeps_no_other_from_ending(tmp_path: Path) -> None:
    """After a crash, the server starts all the same, and the damaged one is deleted."""
    store = open_store(tmp_path)
    keep(store, answer("damaged"), answer("good"))
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "responses.sqlite3")) as database:
        database.execute("UPDATE answers SET failed = ?", (IN_PROGRESS,))
        database.execute("INSERT INTO runs SELECT id, 'ended', 0 FROM answers")
        database.execute("UPDATE answers SET head = ? WHERE id = 'damaged'", (b"{",))
        database.commit()
    store = open_store(tmp_path)
    assert store.response(ANN, "damaged").result(10) is None
    failed = store.response(ANN, "good").result(10)
    assert failed is not None
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    store.close()
