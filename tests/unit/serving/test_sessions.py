"""Sessions on disk by a clock of the test's own, what counts as a call about one, and calls in DJL's steps."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.core.errors import BadRequest, ConfigError, Overloaded, ServingError
from handler.core.owners import owner_by_key
from handler.djl.batches import Item, Piece
from handler.plugins.api import Session
from handler.plugins.custom_messages import CustomReader
from handler.plugins.functions import InputFormatter
from handler.serving import sessions
from handler.serving.sessions import Sessions, configured_sessions, session_call, sessions_root
from tests.doubles.steps import steps
from tests.limits import KIB, undocumented
from tests.one_test import in_one_test
from tests.stepped import Bench, Clock, ask, benches, item, text_of

__all__ = ["benches"]

ANN, BOB = owner_by_key("ann"), owner_by_key("bob")
BEGIN = 1_800_000_000.25
HEADER = "x-amzn-sagemaker-session-id"


@pytest.fixture
def clock() -> Clock:
    return Clock(BEGIN)


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Sessions:
    return Sessions(tmp_path / "deep" / "sessions", 60, 100, clock)


def is_open(store: Sessions, session: Session) -> bool:
    try:
        return store.find(session.id) == session
    except BadRequest:
        return False


# -- the store ---------------------------------------------------------------------------------------------------


def test_a_session_is_a_directory_until_the_second_that_was_said(store: Sessions, clock: Clock) -> None:
    session = store.open()
    assert session.expires == datetime.fromtimestamp(1_800_000_061, timezone.utc)  # never before its lifetime
    (session.directory / "kept").write_text("x")
    clock.now = 1_800_000_060.99
    store.remove_expired()
    assert is_open(store, session)
    assert (session.directory / "kept").read_text() == "x"
    clock.now = 1_800_000_061
    assert not is_open(store, session)
    with pytest.raises(BadRequest, match="session not found"):
        store.close(session.id)
    store.remove_expired()
    assert list(session.directory.parent.iterdir()) == []


def test_as_many_are_open_as_may_be(tmp_path: Path, clock: Clock) -> None:
    store = Sessions(tmp_path, 60, 3, clock)
    other = Sessions(tmp_path, 60, 3, clock)  # another worker, if the file system counts directories
    first, *_ = [store.open() for _ in range(3)]
    with pytest.raises(Overloaded, match=r"3 sessions are open \(option.sessions_max\)"):
        store.open()
    store.close(first.id)
    store.remove_expired()
    other.open()
    with pytest.raises(Overloaded):
        store.open() and store.open()
    clock.now += 61
    store.remove_expired()
    assert is_open(store, store.open())


def test_the_end_does_not_wait_for_very_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Sessions(tmp_path, 60, 100)
    (store.open().directory / "kept").write_text("x")
    for _ in range(9):
        store.open()
    monkeypatch.setattr(sessions, "_END_SECONDS", -1)
    store.end()
    assert caplog.messages == [f"10 session directories in {tmp_path} were not removed in time"]
    again = Sessions(tmp_path, 60, 100, lambda: BEGIN * 2)
    assert list(tmp_path.iterdir()) == []
    again.end()


def test_each_session_costs_the_end_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_END_SECONDS", 600)

    def work(count: int) -> int:
        store = Sessions(tmp_path, 60, count)
        for _ in range(count):
            store.open()
        return steps(store.end)

    assert work(400) < 5 * work(100), "16 times, if each looked at all others"


def test_a_closed_session_is_gone_and_its_files_too(store: Sessions) -> None:
    mine, others = store.open(), store.open()
    (mine.directory / "deep").mkdir()
    store.close(mine.id)
    assert not mine.directory.exists()
    assert (is_open(store, mine), is_open(store, others)) == (False, True)
    with pytest.raises(BadRequest, match="session not found"):
        store.close(mine.id)
    store.remove_expired()
    assert list(others.directory.parent.iterdir()) == [others.directory]


def test_of_two_calls_one_closes(store: Sessions) -> None:
    def close(id: str) -> bool:
        try:
            store.close(id)
        except BadRequest:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            session = store.open()
            assert sorted(pool.map(close, [session.id] * 8)) == [False] * 7 + [True]


@pytest.mark.parametrize(
    "id",
    ["..", "../x", "/etc", "x", "", ".", "a\0b", "ffffffff-0000-4000-8000-000000000000", "%2e%2e", "é", "x" * 5000],
)
def test_other_ids_are_unknown_and_no_paths(store: Sessions, id: str) -> None:
    store.open()
    with pytest.raises(BadRequest, match=r"session not found: ") as refused:
        store.find(id)
    assert refused.value.status == 400
    assert len(refused.value.message) < 150


def test_a_file_with_a_sessions_name_is_none(store: Sessions) -> None:
    session = store.open()
    session.directory.rmdir()
    session.directory.write_text("")
    assert not is_open(store, session)


def test_after_a_crash_the_next_start_keeps_valid_sessions_only(tmp_path: Path, clock: Clock) -> None:
    before = Sessions(tmp_path, 60, 100, clock)
    first, closed = before.open(), before.open()
    before.close(closed.id)  # and no time to remove it
    clock.now += 30
    second = before.open()
    foreign = tmp_path / "mine.txt"
    foreign.write_text("not a session")
    clock.now += 31
    after = Sessions(tmp_path, 5, 100, clock)
    assert sorted(tmp_path.iterdir()) == sorted([foreign, second.directory])
    assert (is_open(after, first), is_open(after, second)) == (False, True)
    after.close(second.id)
    assert not is_open(before, second)  # as another worker sees it


def test_the_end_removes_what_was_opened_here(tmp_path: Path, clock: Clock) -> None:
    mine, others = Sessions(tmp_path, 60, 100, clock), Sessions(tmp_path, 60, 100, clock)
    mine.open()
    mine.close(mine.open().id)
    kept = others.open()
    mine.end()
    mine.end()
    assert list(tmp_path.iterdir()) == [kept.directory]


def test_its_thread_removes_what_is_closed_at_once_and_ends_with_it(store: Sessions) -> None:
    before = threading.enumerate()
    store.look_after()
    session = store.open()
    root = session.directory.parent
    store.close(session.id)
    (watch,) = (each for each in threading.enumerate() if each.name == "sessions" and each not in before)
    _until(lambda: list(root.iterdir()) == [])
    store.end()
    watch.join(5)
    assert not watch.is_alive()


def _until(done: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(500):
        if done():
            return
        tick.wait(0.01)
    raise AssertionError("not within 5 s")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file", "{}/file is not a writable directory"),
        ("file/x/y", "{}/file is not a writable directory"),
        ("", ""),
    ],
)
def test_a_path_is_checked_before_it_is_made(tmp_path: Path, path: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    root = tmp_path / path if path else tmp_path / "deep" / "sessions"
    on = ["option.enable_stateful_sessions=true", f"option.sessions_path={root}"]
    config = read_config(environ={}, overrides=on).checked()
    if why:
        told = f"^-o {on[1]}: sessions cannot be stored in this directory: {why.format(tmp_path)}"
        with pytest.raises(ConfigError, match=told):
            sessions_root(config)
    else:
        assert sessions_root(config) == root
    assert not (tmp_path / "deep").exists()


def test_a_default_path_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MEMORY", tmp_path)
    config = read_config(environ={}, overrides=["option.enable_stateful_sessions=true"]).checked()
    assert sessions_root(config) == tmp_path / "sagemaker_sessions"
    (tmp_path / "sagemaker_sessions").mkdir()
    assert sessions_root(config) is not None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"it was created by another user of this machine; set option.sessions_path"):
        sessions_root(config)


def test_lmis_async_mode_has_them_unless_an_option_says_otherwise(tmp_path: Path) -> None:
    path = f"option.sessions_path={tmp_path / 'sessions'}"
    for said, on in (([], True), (["option.enable_stateful_sessions=false"], False)):
        config = read_config(environ={}, overrides=["option.async_mode=true", path, *said]).checked()
        assert (sessions_root(config) is not None) is on
    aws = read_config(environ={"SM_VLLM_MODEL": "a/b"}, overrides=[path]).checked()
    assert sessions_root(aws) is None


def test_an_unusable_directory_disables_sessions_that_nobody_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sagemaker_sessions").write_text("")
    monkeypatch.setattr(sessions, "_MEMORY", tmp_path)
    config = read_config(environ={}, overrides=["option.async_mode=true"]).checked()
    assert configured_sessions(config) is None
    (told,) = caplog.messages
    assert told.startswith(f"stateful sessions are off: option.sessions_path={tmp_path / 'sagemaker_sessions'}: ")
    with pytest.raises(ConfigError, match=r"sessions cannot be stored in this directory"):
        configured_sessions(replace(config, enable_stateful_sessions=True))
    long = replace(config, sessions_path=str(tmp_path / ("a" * 300)))
    with pytest.raises(ConfigError, match=r"sessions cannot be stored in this directory: File name too long"):
        configured_sessions(long)


def test_a_directory_that_goes_away(tmp_path: Path, clock: Clock) -> None:
    root = tmp_path / "gone"
    store = Sessions(root, 60, 100, clock)
    root.rmdir()
    store.remove_expired()
    assert is_open(store, store.open())
    store.end()
    root.rmdir()
    root.write_text("")
    with pytest.raises(ServingError, match="Failed to create session: ") as refused:
        store.open()
    assert refused.value.status == 424


def test_what_is_made_anew_is_closed_to_others(tmp_path: Path, clock: Clock) -> None:
    root = tmp_path / "gone"
    store = Sessions(root, 60, 100, clock)
    root.rmdir()
    session = store.open()
    assert [path.stat().st_mode & 0o777 for path in (root, session.directory)] == [0o700, 0o700]


def test_a_session_that_cannot_be_closed(store: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    session = store.open()

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ServingError, match="Failed to close session: Read-only file system") as refused:
        store.close(session.id)
    assert refused.value.status == 424
    assert is_open(store, session)


def test_a_close_does_not_look_at_the_other_sessions(store: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 40,000 open ones, a look at all of them for each close held up every answer."""
    monkeypatch.setattr(sessions, "REMOVAL_PERIOD", 60.0)
    store.look_after()
    monkeypatch.setattr(store, "remove_expired", lambda: pytest.fail("all sessions were looked at"))
    closed = [store.open() for _ in range(3)]
    root = store.open().directory.parent
    for session in closed:
        store.close(session.id)
    _until(lambda: len(list(root.iterdir())) == 1)
    store.end()


def test_a_session_that_another_worker_removes_is_forgotten(tmp_path: Path, clock: Clock) -> None:
    mine, others = Sessions(tmp_path, 60, 100, clock), Sessions(tmp_path, 60, 100, clock)
    for _ in range(3):
        mine.open()
    clock.now += 61
    others.remove_expired()
    mine.remove_expired()
    assert not mine._opened


# -- owners ------------------------------------------------------------------------------------------------------------


def test_a_session_is_its_owners(store: Sessions) -> None:
    mine, nobodys = store.open(ANN), store.open()
    assert store.find(mine.id, ANN) == mine
    assert store.find(nobodys.id) == nobodys
    for id, owner in ((mine.id, BOB), (mine.id, ""), (nobodys.id, ANN)):
        for call in (store.find, store.close):
            with pytest.raises(BadRequest, match="session not found"):
                call(id, owner)
    store.close(mine.id, ANN)
    assert not mine.directory.exists()
    assert is_open(store, nobodys)


def test_another_worker_knows_the_owner_and_no_directory_remains(tmp_path: Path, clock: Clock) -> None:
    mine, others = Sessions(tmp_path, 60, 100, clock), Sessions(tmp_path, 60, 100, clock)
    session = mine.open(ANN)
    assert others.find(session.id, ANN) == session
    with pytest.raises(BadRequest):
        others.find(session.id, BOB)
    clock.now += 61
    others.remove_expired()
    assert list(tmp_path.iterdir()) == []
    assert mine.find((mine.open(ANN)).id, ANN).directory.is_dir()
    mine.end()
    assert list(tmp_path.iterdir()) == []


def test_directories_that_are_no_sessions_are_not_closed_for_others(tmp_path: Path, clock: Clock) -> None:
    for name in ("lost+found", "cache", "data"):
        (tmp_path / name).mkdir()
    with pytest.raises(Overloaded, match="2 sessions are open"):
        Sessions(tmp_path, 60, 2, clock).open(ANN)
    assert sorted(os.listdir(tmp_path)) == ["cache", "data", "lost+found"]


def test_a_session_opens_although_its_owners_empty_directory_is_just_removed(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, mkdir, homes = Sessions(tmp_path, 60, 2, clock), Path.mkdir, list[Path]()

    def swept(path: Path, *arguments: Any, **more: Any) -> None:
        if path.parent.name == ANN and not homes:
            homes.append(path.parent)
            Sessions(tmp_path, 60, 2, clock)  # the start of another process removes empty directories
        mkdir(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", swept)
    assert store.open(ANN).directory.is_dir()
    assert homes


def test_a_full_store_loses_the_newest_session_of_the_owner_with_most(tmp_path: Path, clock: Clock) -> None:
    store, other = Sessions(tmp_path, 60, 4, clock), Sessions(tmp_path, 60, 4, clock)
    anns = []
    for _ in range(4):
        anns.append(store.open(ANN))
        clock.now += 1
    with pytest.raises(Overloaded):
        store.open(ANN)
    for owner, worker in ((BOB, store), ("", other)):
        session = worker.open(owner)
        assert worker.find(session.id, owner) == session
        worker.remove_expired()
    assert [session.directory.exists() for session in anns] == [True, True, False, False]
    with pytest.raises(Overloaded, match=r"4 sessions are open"):
        store.open(BOB)


# -- calls and options -------------------------------------------------------------------------------------------


@in_one_test(
    ("body", "call"),
    [
        (b'{"requestType": "NEW_SESSION"}', "NEW_SESSION"),
        (b' {"requestType":"CLOSE"}\n', "CLOSE"),
        (b'{"inputs": "what is a \\"requestType\\"?"}', ""),
        (b'{"inputs": {"requestType": "CLOSE"}}', ""),
        (b'["requestType"]', ""),
        (b'{"requestType": "CLOSE"', ""),
        (b'\xff"requestType"', ""),
        (b"[" * 60_000 + b'"requestType"', ""),
        (b'{"requestType": "CLOSE", "inputs": "' + b"a" * 70_000 + b'"}', ""),
    ],
)
def test_which_bodies_are_calls_about_a_session(body: bytes, call: str) -> None:
    assert session_call(body) == call


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"requestType": "OPEN"}, "requestType='OPEN': must be NEW_SESSION or CLOSE"),
        ({"requestType": ["CLOSE"]}, "must be NEW_SESSION or CLOSE"),
        ({"requestType": None}, "requestType='None'"),
        ({"requestType": "CLOSE", "inputs": "a"}, "requestType=CLOSE: a body .* must have no other fields"),
    ],
)
def test_calls_that_are_refused_by_name(body: Any, told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        session_call(json.dumps(body).encode())


def test_options_and_aws_variables(tmp_path: Path) -> None:
    assert configured_sessions(read_config(environ={}).checked()) is None
    variables = {"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "1", "SAGEMAKER_SESSIONS_EXPIRATION": "7"}
    config = read_config(environ={**variables, "SAGEMAKER_SESSIONS_PATH": str(tmp_path)}).checked()
    assert (config.enable_stateful_sessions, config.sessions_expiration) == (True, 7)
    store = configured_sessions(config)
    assert store is not None
    assert store.open().directory.parent == tmp_path
    store.end()
    with pytest.raises(ConfigError, match=r"SESSIONS_EXPIRATION: .*=4294967296: must be a whole number of at least 1 "):
        read_config(
            environ={**variables, "SAGEMAKER_SESSIONS_EXPIRATION": "4294967296"}
        ).checked()  # an id has eight hex digits
    config = read_config(environ=variables, overrides=["option.enable_stateful_sessions=false"]).checked()
    assert (config.enable_stateful_sessions, config.sessions_path) == (False, None)
    with pytest.raises(ConfigError, match=r"SAGEMAKER_ENABLE_STATEFUL_SESSIONS: .*=maybe: must be true or false"):
        read_config(environ={"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "maybe"}).checked()


@pytest.mark.parametrize(
    ("accepts", "gets"), [(None, True), (frozenset({"session"}), True), (frozenset({"configs"}), False)]
)
def test_a_formatter_of_decoded_json_gets_it_as_a_keyword(
    store: Sessions, accepts: frozenset[str] | None, gets: bool
) -> None:
    def look(payload: dict[str, Any], **keywords: Any) -> dict[str, Any]:
        return {"inputs": [session.id for session in keywords.values()]}

    reader = CustomReader(InputFormatter("look", look, True, accepts), lambda body: {}, {})
    session = store.open()
    assert reader.read(b"{}", {}, session)[0] == {"inputs": [session.id] if gets else []}
    assert reader.read(b"{}", {})[0] == {"inputs": []}


# -- in DJL's steps ----------------------------------------------------------------------------------------------


def call(what: str, session: str = "") -> Item:
    return item({"requestType": what}, **({HEADER: session} if session else {}))


def step(bench: Bench, *items: Item) -> list[Piece]:
    return bench.batch.step(len(items), dict(enumerate(items)))


def headers(piece: Piece) -> dict[str, str]:
    assert (piece.first, piece.last) == (True, True)
    return dict(piece.task.dialect_headers())


def test_two_clients_in_one_step_have_a_session_each(store: Sessions) -> None:
    bench = Bench(sessions=store)
    opened = [headers(piece) for piece in step(bench, call("NEW_SESSION"), call("NEW_SESSION", "NEW_SESSION"))]
    one, two = (found["x-amzn-sagemaker-new-session-id"].partition("; Expires=")[0] for found in opened)
    assert one != two
    assert opened[0][HEADER] == f"{one}; Expires=2027-01-15T08:01:01Z"
    asks = [item(ask("a b", 2), **{HEADER: id}) for id in (one, "nobody", two)]
    mine, nobodys, others = bench.finish(step(bench, *asks))
    assert text_of(mine) == text_of(others) == " a b"
    assert b"session not found: nobody" in nobodys
    closed, again, unnamed = step(bench, call("CLOSE", one), call("CLOSE", one), call("CLOSE"))
    assert headers(closed) == {"x-amzn-sagemaker-closed-session-id": one}
    assert json.loads(closed.data) == {"result": f"Session {one} closed"}
    assert [piece.task.status for piece in (again, unnamed)] == [400, 400]
    assert store.find(two).directory.is_dir()


def test_a_dynamic_batch_answers_calls_too(store: Sessions) -> None:
    bench = Bench("disable", sessions=store)
    (task,) = bench.dynamic(5).run([call("NEW_SESSION")])
    assert (task.status, json.loads(task.take())["result"][-7:]) == (200, "created")


def test_they_are_off_by_default() -> None:
    bench = Bench()
    for piece in step(bench, call("NEW_SESSION"), call("CLOSE", "x"), item(ask("a", 1), **{HEADER: "NEW_SESSION"})):
        assert piece.task.status == 400
        assert b"Invalid payload. stateful sessions not enabled" in piece.data


def test_the_limits_of_sessions_are_documented() -> None:
    assert not undocumented(
        "sessions.md",
        f"accept no other fields and at most {sessions.MAX_CALL_SIZE / KIB:g} KiB",
        f"within {sessions.REMOVAL_PERIOD:g} s of a session's end",
    )
