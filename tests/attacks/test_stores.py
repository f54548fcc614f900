"""Owners who store much: what is deleted or expires of theirs, or comes back, keeps no other owner waiting."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from handler.core.owners import owner_by_key
from tests.app.server import BY_KEY
from tests.attacks.watch import answering
from tests.servers import ServerProcess, http, options, serve, wait_for

ANN, BOB = {"authorization": "Bearer ann"}, {"x-api-key": "bob"}
RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
NUMBER = 100_000
ITEMS = 300_000
FILE = "responses.sqlite3"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    limits = ("option.responses_max=100000", "option.responses_max_bytes=1000000000")
    with serve("--engine", "echo", *BY_KEY, *options(f"option.responses_store={tmp_path}", *limits)) as server:
        server.wait_ready()
        yield server


def stored(server: ServerProcess, headers: dict[str, str]) -> str:
    found = server.post({"input": "a", "max_output_tokens": 2}, RESPONSES, headers=headers)
    assert found.status_code == 200, found.text
    id: str = found.json()["id"]
    return id


def copy(path: Path, id: str, number: int, expires: float) -> None:
    """Write copies of a response that expire together."""
    with closing(sqlite3.connect(path)) as database:
        columns = "owner, kind, previous, failed, head, size, used"
        numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
        database.execute(
            f"INSERT INTO answers (id, {columns}, expires) {numbers} "
            f"SELECT 'resp_' || i, {columns}, ? FROM answers, n WHERE id = ?",
            (number, expires, id),
        )
        database.execute(
            f"INSERT INTO items {numbers} SELECT 'resp_' || i, place, is_output, id || i, item FROM items, n "
            "WHERE answer = ?",
            (number, id),
        )
        database.commit()


def count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as database:
        (number,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert isinstance(number, int)
    return number


def test_responses_that_expire_together_keep_no_neighbour_waiting(server: ServerProcess, tmp_path: Path) -> None:
    hers, his = stored(server, ANN), stored(server, BOB)
    copy(tmp_path / FILE, hers, NUMBER, time.time())

    def ask() -> None:
        assert http.get(f"{server.url}{RESPONSES}/{his}", headers=BOB).status_code == 200
        stored(server, BOB)

    with answering(server, ask):
        wait_for(lambda: count(tmp_path / FILE, "answers") < NUMBER, 60, "nothing goes")
        wait_for(lambda: count(tmp_path / FILE, "answers") < NUMBER // 2, 120, "not everything goes")


def test_a_long_conversation_that_is_deleted_keeps_no_neighbour_waiting(server: ServerProcess, tmp_path: Path) -> None:
    his = stored(server, BOB)
    made = http.post(server.url + CONVERSATIONS, json={}, headers=ANN).json()["id"]
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        query = "SELECT number FROM conversations WHERE id = ? AND owner = ?"
        (number,) = database.execute(query, (made, owner_by_key("ann"))).fetchone()
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
        rows = ((number, n, f"msg_{n}", json.dumps({"id": f"msg_{n}", **message}).encode()) for n in range(ITEMS))
        database.executemany("INSERT INTO conversation_items VALUES (?, ?, ?, ?)", rows)
        database.commit()

    def ask() -> None:
        assert http.get(f"{server.url}{RESPONSES}/{his}", headers=BOB).status_code == 200

    with answering(server, ask):
        assert http.delete(f"{server.url}{CONVERSATIONS}/{made}", headers=ANN).status_code == 200
        assert http.get(f"{server.url}{CONVERSATIONS}/{made}/items", headers=ANN).status_code == 404
        wait_for(lambda: count(tmp_path / FILE, "conversation_items") == 0, 60, "items are left")
