"""Batches' files: lines of the input, the output after a kill, and what the directory keeps."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import NotFound, TooLarge, Unavailable
from handler.protocols.kernel.body import decode
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai.api import Page
from handler.protocols.openai.batches import LIFETIME, Line, NewBatch, NewFile, answered, read_line
from handler.serving.batches import store as stores
from handler.serving.batches.runner import BatchInput, BatchOutput, Held
from handler.serving.batches.store import BatchStore, output_ids
from tests.stepped import Clock

BATCH, CHAT = "batch_0", "/v1/chat/completions"
PAGE = Page(100, "", newest_first=True)


# -- lines -------------------------------------------------------------------------------------------------------


def input(directory: Path, text: bytes, most: int = 200, most_requests: int = 100) -> BatchInput:
    (directory / "input").write_bytes(text)
    config = Config(max_request_size=most, batches_max_lines=most_requests)
    return BatchInput(directory / "input", CHAT, config, decode)


def lines(directory: Path, text: bytes, most: int = 200) -> list[Line]:
    return [*input(directory, text, most)]


def line(id: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": id, "method": "POST", "url": CHAT, "body": body}).encode()


def test_lines_are_read_one_by_one_and_a_long_one_is_skipped(tmp_path: Path) -> None:
    long = line("long", text="x" * 3_000_000)
    found = lines(tmp_path, b"\n".join([line("a"), b"", long, b"\xff", line("b")]))
    assert [(one.number, one.custom_id) for one in found] == [(1, "a"), (3, None), (4, None), (5, "b")]
    assert [one.error and one.error.code for one in found] == [None, "line_too_large", "invalid_json_line", None]
    assert lines(tmp_path, long)[0].error is not None, "a long one at the end"
    exact = line("a")
    assert [one.custom_id for one in lines(tmp_path, exact + b"\n" + exact, len(exact) + 1)] == ["a", "a"]


def test_a_batch_that_goes_on_skips_what_is_done_whatever_its_length(tmp_path: Path) -> None:
    text = b"\n".join([line("a"), line("long", text="x" * 300), line("b"), line("long", text="x" * 3_000_000)])
    (tmp_path / "input").write_bytes(text)
    left = BatchInput(tmp_path / "input", CHAT, Config(max_request_size=200), decode, done={1, 2})
    assert [(one.number, one.custom_id) for one in left] == [(3, "b"), (4, None)]


def test_blank_lines_are_bounded_as_requests_are(tmp_path: Path) -> None:
    whole = b"\n\n".join([line("a"), line("b"), line("c")])
    assert input(tmp_path, whole + b"\n", most_requests=3).check() == (3, [])
    for text in (b"\n" * 7, b"\n" * 1_000_000, b"\n" * 5 + whole, whole + b"\n" * 3, whole + b"\n" + line("d")):
        made = input(tmp_path, text, most_requests=3)
        assert [error["code"] for error in made.check()[1]] == ["too_many_tasks"]
        assert len([*made]) <= 4


def test_a_request_keeps_all_digits() -> None:
    value = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"seed": 1 << 70}}
    assert json.loads(read_line(1, value, CHAT).body) == {"seed": 1 << 70}


def test_no_line_is_read_while_those_in_memory_are_too_large() -> None:
    async def reads() -> None:
        held, numbers = Held(10), list[int]()
        with held.line(Line(1, "a", b"x" * 10)):
            reading = [asyncio.ensure_future(held.read(functools.partial(numbers.append, number))) for number in (2, 3)]
            await asyncio.wait(reading, timeout=0.05)
            assert numbers == []
        await asyncio.gather(*reading)
        assert numbers == [2, 3]

    asyncio.run(reads())


# -- the output --------------------------------------------------------------------------------------------------


def answer(number: int) -> bytes:
    return answered(BATCH, Line(number, f"id {number}"), HttpResponse(200, "application/json", b'{"a": "\xc3\xa9"}'))


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("answers", "errors"):
        (tmp_path / name).touch()
    return tmp_path / "answers", tmp_path / "errors"


def test_a_line_is_written_once_wherever_the_last_write_was_cut(paths: tuple[Path, Path]) -> None:
    whole = answer(1) + answer(2)
    for cut in range(len(whole) + 1):
        paths[0].write_bytes(whole[:cut])
        paths[1].write_bytes(answer(3))
        with contextlib.closing(BatchOutput(*paths)) as output:
            assert [number in output.done for number in (1, 2, 3)] == [cut >= len(answer(1)), cut == len(whole), True]
            for number in (1, 2, 3):
                output.write(number, answer(number), failed=False)
            assert (output.counts, output.sizes) == ([2, 1], [len(whole), len(answer(3))])
        assert paths[0].read_bytes() == whole
        assert paths[1].read_bytes() == answer(3)


def test_what_the_machine_s_stop_left_is_answered_again(paths: tuple[Path, Path]) -> None:
    paths[0].write_bytes(answer(1) + b"\0" * 50 + b"\n" + answer(2))
    with contextlib.closing(BatchOutput(*paths)) as output:
        assert output.done == {1}
    assert paths[0].read_bytes() == answer(1)


def test_one_process_writes_a_batch(paths: tuple[Path, Path]) -> None:
    with contextlib.closing(BatchOutput(*paths)) as output:
        with pytest.raises(BlockingIOError):
            BatchOutput(*paths)
        output.write(1, answer(1), failed=False)
    output.write(2, answer(2), failed=False)  # by a thread that comes late
    with contextlib.closing(BatchOutput(*paths)):
        assert paths[0].read_bytes() == answer(1)


def test_nothing_is_left_of_what_a_full_disk_does_not_take(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 10:
            return write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    with contextlib.closing(BatchOutput(*paths)) as output:
        output.write(1, answer(1), failed=False)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space"):
                output.write(2, answer(2)[:-4], failed=False)
        assert (output.counts, output.done) == ([1, 0], {1})
    assert paths[0].read_bytes() == answer(1)


# -- the directory -----------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def store_in(directory: Path, clock: Clock, **limits: Any) -> BatchStore:
    return BatchStore(directory, Config(**limits), clock)


def uploaded(store: BatchStore, owner: str = "ann", size: int = 100, lifetime: int = LIFETIME) -> str:
    id = store.reserve(owner, size)
    store.path(id).write_bytes(b"x" * size)
    return store.keep(id, NewFile("a", lifetime, ()))["id"]


def created(store: BatchStore, owner: str = "ann", lifetime: int = LIFETIME) -> str:
    asked = NewBatch(uploaded(store, owner, lifetime=lifetime), CHAT, "24h", 86400, 3600, None, ())
    return store.create(owner, asked)["id"]


def test_what_has_expired_is_removed_but_for_what_is_needed(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock)
    needed, forgotten, kept = created(store, lifetime=3600), store.reserve("ann", 5), uploaded(store, lifetime=9000)
    store.path(forgotten).touch()
    input = store.batch("ann", needed)["input_file_id"]
    store.path(output_ids(needed)[0]).write_bytes(b"{}\n")
    clock.now += 4000
    store.remove_expired()
    assert not store.path(forgotten).exists()
    assert store.path(input).exists()
    store.end(needed, "completed")
    output, error = output_ids(needed)
    assert (store.path(output).exists(), store.path(error).exists()) == (True, False)
    store.remove_expired()
    assert not store.path(input).exists()
    assert {one["id"] for one in store.files("ann", PAGE)[0]} == {output, kept}
    clock.now += 3601  # output_expires_after
    store.remove_expired()
    assert not store.path(output).exists()
    with pytest.raises(NotFound):
        store.file("ann", output)
    assert store.batch("ann", needed)["status"] == "completed"
    store.close()


def test_a_file_that_is_deleted_before_it_is_opened_is_none(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock)
    id = uploaded(store)
    file, contents = store.open("ann", id)
    with contents:
        assert (file["id"], len(contents.read())) == (id, file["bytes"])
    store.path(id).unlink()
    with pytest.raises(NotFound):
        store.open("ann", id)
    store.close()


@pytest.mark.parametrize("expires", [False, True])
def test_a_deleted_file_counts_while_it_is_read(tmp_path: Path, clock: Clock, expires: bool) -> None:
    store, other = (store_in(tmp_path, clock, batches_max_bytes=150_000) for _ in range(2))
    id = uploaded(store, size=100_000, lifetime=3600)
    _, first = store.open("ann", id)
    _, second = other.open("ann", id)
    if expires:
        clock.now += 3600
        store.remove_expired()
    else:
        other.delete("ann", id)
    for read in (first, second):
        store.remove_expired()
        assert store.path(id).stat().st_size == 100_000
        for call in (store.open, other.delete):
            with pytest.raises(NotFound):
                call("ann", id)
        with pytest.raises(TooLarge):
            store.reserve("ann", 100_000)
        read.close()
    store.remove_expired()
    assert not store.path(id).exists()
    store.reserve("ann", 100_000)
    store.close()
    other.close()


def test_a_batch_that_has_ended_stays_so(tmp_path: Path, clock: Clock) -> None:
    """A server that takes it over too late changes nothing."""
    store = store_in(tmp_path, clock)
    id = created(store)
    assert store.cancel("ann", id)["status"] == "cancelling"
    assert store.advance(id, (0, 0), {"status": "in_progress"})["status"] == "cancelling"
    store.end(id, "cancelled")
    store.end(id, "completed")
    assert store.advance(id, (0, 0), {"status": "in_progress"})["status"] == "cancelled"
    assert store.open_batches(9) == []
    store.close()


def test_an_end_that_was_not_written_leaves_the_output_as_it_was(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on with the batch finds both files, the empty one too."""
    monkeypatch.setattr(stores, "_BUSY_SECONDS", 0.0)
    store = store_in(tmp_path, clock)
    id = created(store)
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as other:
        other.execute("BEGIN")
        other.execute("SELECT id FROM objects").fetchall()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            store.end(id, "completed")
    assert [one.batch["id"] for one in store.open_batches(9)] == [id]
    BatchOutput(*(store.path(file) for file in output_ids(id))).close()
    store.end(id, "completed")
    assert not any(store.path(file).exists() for file in output_ids(id))
    store.close()


def test_batches_that_have_ended_do_not_pile_up(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_MOST_ENDED", 2)
    store = store_in(tmp_path, clock)
    ids = [created(store) for _ in range(4)]
    for id in ids[:3]:
        store.end(id, "cancelled")
    assert [one["id"] for one in store.batches("ann", PAGE)[0]] == ids[:0:-1]
    store.close()


def test_bytes_are_bounded_for_a_key_and_for_all(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock, batches_max_bytes=100_000, batches_total_bytes=150_000)
    id = created(store)
    store.check_room("ann")
    with pytest.raises(TooLarge, match="batches_max_bytes"):
        store.reserve("ann", 90_000)
    store.reserve("bob", 90_000)
    with pytest.raises(Unavailable, match="batches_total_bytes"):
        store.reserve("cid", 90_000)
    store.advance(id, (50_000, 40_000), {})
    with pytest.raises(TooLarge, match="batches_max_bytes"):
        store.check_room("ann")
    store.close()


def test_a_batch_that_another_hand_has_damaged_is_told_and_holds_no_other_up(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, clock)
    broken, other = created(store), created(store, "bob")
    for data in (b"no json", b"[1]", b"{}", b'{"id": 1}', "\u00e4", 5):
        with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as database:
            database.execute("UPDATE objects SET document = ? WHERE id = ?", (data, broken))
            database.commit()
        assert [one.batch["id"] for one in store.open_batches(10)] == [other]
        for call in (
            functools.partial(store.call, store.batch, "ann", broken),
            functools.partial(store.call, store.cancel, "ann", broken),
            functools.partial(store.call, store.batches, "ann", Page(10, "", newest_first=True)),
        ):
            with pytest.raises(Unavailable, match="the files and batches cannot be read or written"):
                asyncio.run(call())
