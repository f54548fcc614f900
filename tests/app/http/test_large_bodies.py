"""Bodies above 1 MiB: parsed in another process, within limits, while others get their tokens."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from handler.core.errors import NotJson, Overloaded, ServingError, TooLarge, Unavailable
from handler.core.framing import MAX_DEPTH
from handler.engines.base import EngineInfo
from handler.engines.process.sandbox import Sandbox, Work
from handler.protocols.kernel.body import decode, value_size
from handler.protocols.kernel.readers import show
from handler.serving import large_bodies
from handler.serving.large_bodies import LARGE, MAX_NUMBERS, MAX_TEXT, MAX_VALUES, MAX_WAITING, LargeBodies
from tests.doubles.steps import steps
from tests.servers import PATIENCE, LiveServer, http
from tests.stepped import Bench, ask, benches, item

__all__ = ["benches"]

MIB = 1 << 20


@pytest.fixture(scope="module")
def bodies() -> Iterator[LargeBodies]:
    found = LargeBodies()
    yield found
    found.close()


def read(bodies: LargeBodies, body: bytes, *, plain: bool = False, unique_keys: bool = True) -> Any:
    call = functools.partial(bodies.decode, body, plain=plain, unique_keys=unique_keys)
    value, size = bodies.submit(len(body), call).result(120)
    assert 0.5 < size / value_size(value) < 2
    return value


def refusal(bodies: LargeBodies, body: bytes) -> ServingError:
    with pytest.raises(ServingError) as caught:
        read(bodies, body)
    return caught.value


VALUES: dict[str, Callable[[], Any]] = {
    "a text": lambda: {"inputs": "a" * MIB},
    "wide characters": lambda: {"inputs": "a" * MIB + "😀é語", "é" * 100: "\n" * 100},
    "numbers": lambda: {"x": [0, -1, 1 << 80, 0.5, 1e300], "ids": list(range(200_000)), "floats": [0.1] * 100_000},
    "numbers and others": lambda: {
        "x": [[1] * 70, [True] * 70, [None] * 70, [*range(70), "a"], [], [[]]],
        "y": "b" * MIB,
    },
    "names": lambda: {f"{number:x}" * 20: {"a": number} for number in range(30_000)},
    "the same text twice": lambda: {"x": ["c" * 100] * 2, "y": "d" * MIB, "z": "d" * MIB},
    "no object": lambda: "e" * MIB,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was_sent(bodies: LargeBodies, name: str) -> None:
    value = VALUES[name]()
    body = json.dumps(value, ensure_ascii=False).encode()
    found = read(bodies, body)
    assert found == value
    assert repr(found) == repr(decode(body)), "types too"


def test_the_last_value_of_a_repeated_key_counts_where_that_is_asked(bodies: LargeBodies) -> None:
    assert read(bodies, WRONG["a key twice"], unique_keys=False) == {"a": 1}


def test_plain_text_is_a_prompt(bodies: LargeBodies) -> None:
    assert read(bodies, b"a, " * MIB, plain=True) == {"inputs": "a, " * MIB}


WRONG = {
    "no end": b'{"inputs":[' + b"1," * MIB,
    "a wrong end": b'{"inputs":"' + b"a" * MIB + b'"}]',
    "nesting": b"[" * MIB,
    "not UTF-8": b'{"inputs":"' + b"a" * MIB + b"\xff",
    "spaces": b" " * MIB,
    "half a pair": b'{"inputs":"' + b"a" * MIB + b'\\ud800"}',
    "a key twice": b'{"a":"' + b"a" * MIB + b'","a":1}',
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_json_is_refused_in_the_same_words(bodies: LargeBodies, name: str) -> None:
    with pytest.raises(NotJson) as expected:
        decode(WRONG[name])
    found = refusal(bodies, WRONG[name])
    assert type(found) is NotJson
    assert found.message == expected.value.message


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1, 950, 100_000])
def test_nesting_is_read_or_refused_at_every_depth(bodies: LargeBodies, levels: int) -> None:
    depth = levels - 1  # the body itself is a level
    for size in (1, MIB):
        body = b'{"inputs":"' + b"a" * size + b'","x":' + b"[" * depth + b"]" * depth + b"}"
        call = functools.partial(bodies.decode, body, plain=False, unique_keys=True)
        outcome = bodies.submit(len(body), call) if size == MIB else None
        if levels > MAX_DEPTH:
            with pytest.raises(NotJson, match="nested too deeply"):
                outcome.result(120) if outcome else decode(body)
        else:
            value = outcome.result(120)[0] if outcome else decode(body)
            assert json.dumps(value["x"]) == "[" * depth + "]" * depth


TOO_MUCH: dict[str, Callable[[], tuple[bytes, str]]] = {
    "numbers": lambda: (b"[1" + b",1" * MAX_NUMBERS + b"]", f"more than {MAX_NUMBERS} numbers"),
    "nulls": lambda: (b"[[null" + b",null" * MAX_NUMBERS + b"]]", f"more than {MAX_NUMBERS} numbers"),
    "objects": lambda: (b"[{}" + b",{}" * (3 * MAX_VALUES) + b"]", f"more than {MAX_VALUES} strings"),
    "names": lambda: (
        json.dumps(dict.fromkeys(map(str, range(MAX_VALUES)), 1)).encode(),
        f"more than {MAX_VALUES} strings",
    ),
    "texts": lambda: (b'["a"' + b',"a"' * (3 * MAX_VALUES) + b"]", f"more than {MAX_VALUES} strings"),
    "a text": lambda: (
        b'{"inputs":"' + b"a" * (MAX_TEXT + 1) + b'"}',
        f"{MAX_TEXT + 1} characters; at most {MAX_TEXT}",
    ),
    "a name": lambda: (b'{"' + b"a" * (MAX_TEXT + 1) + b'":1}', f"{MAX_TEXT + 1} characters; at most {MAX_TEXT}"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_holds_too_much_is_refused_and_names_the_limit(bodies: LargeBodies, name: str) -> None:
    body, message = TOO_MUCH[name]()
    found = refusal(bodies, body)
    assert type(found) is TooLarge
    assert found.status == 413
    assert message in found.message


def test_as_much_as_may_be_is_read(bodies: LargeBodies) -> None:
    value = {"ids": [1] * MAX_NUMBERS, "texts": ["a"] * (MAX_VALUES - 5)}
    assert read(bodies, json.dumps(value).encode()) == value


def test_a_body_that_needs_too_much_memory_or_time_is_refused_alone(
    bodies: LargeBodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"inputs":"' + b"a" * MIB + b'"}'
    read(bodies, body)
    pid = bodies.process.pid
    with monkeypatch.context() as patch:
        patch.setattr(large_bodies, "MEMORY", 0)
        patch.setattr(large_bodies, "MEMORY_FACTOR", 2)
        found = refusal(bodies, body)
        assert (found.status, found.message) == (413, "parsing the body needs more than 2 MiB")
    with monkeypatch.context() as patch:
        patch.setattr(large_bodies, "SECONDS", 0.05)
        found = refusal(bodies, b"[{}" + b",{}" * (2 * MIB) + b"]")
        assert (found.status, found.message) == (
            413,
            "parsing the body takes more than 0.05 s, or crashes the parser",
        )
    assert read(bodies, body) == json.loads(body)
    assert bodies.process.pid == pid, "one copy of the process was lost, not the process"


def deadly() -> Work:
    """What reads bodies, and ends with its process over one that says so."""

    def work(form: large_bodies.BodyForm, data: memoryview) -> Iterator[Any]:
        if bytes(data[:4]) == b"die ":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1)
        yield from large_bodies.read_parts(form, data)

    return work


def test_the_process_is_started_again_and_who_killed_it_is_told(bodies: LargeBodies) -> None:
    fragile = LargeBodies()
    fragile.process = Sandbox(deadly, large_bodies.PURPOSE)
    try:
        body = b'{"inputs":"' + b"a" * MIB + b'"}'
        read(fragile, body)
        first = fragile.process.pid
        found = refusal(fragile, b"die " * MIB)
        assert (type(found), found.status) == (Unavailable, 503)
        assert "the process where large request bodies are read has ended" in found.message
        assert read(fragile, body) == json.loads(body)
        assert fragile.process.pid != first
    finally:
        fragile.close()


def test_only_so_many_wait_and_small_ones_find_room_and_go_first(bodies: LargeBodies) -> None:
    free, done = threading.Event(), list[int]()

    def work(size: int) -> None:
        free.wait(PATIENCE)
        done.append(size)

    waiting = [bodies.submit(60 * MIB, work, 60 * MIB) for _ in range(MAX_WAITING)]
    with pytest.raises(Overloaded, match=f"{MAX_WAITING} large request bodies are being read"):
        bodies.submit(60 * MIB, work, 60 * MIB)
    small = bodies.submit(MIB, done.append, MIB)  # the slow ones leave it a thread
    small.result(PATIENCE)
    assert done == [MIB]
    block = [bodies.submit(MIB, free.wait, PATIENCE) for _ in range(MAX_WAITING)]
    with pytest.raises(Overloaded):
        bodies.submit(MIB, free.wait, PATIENCE)  # the spare is as large as the comment of MAX_WAITING says
    free.set()
    for future in waiting:
        future.result(PATIENCE)
    for blocked in block:
        blocked.result(PATIENCE)
    bodies.submit(60 * MIB, time.sleep, 0.0).result(PATIENCE)


def test_a_value_is_shown_without_being_written_whole() -> None:
    for value in ({"a": [1, None, "é"]}, "x" * 78, "x" * 79, "x" * 200, [], ["é" * 100], 1e300, list(range(100))):
        text = json.dumps(value, ensure_ascii=False)
        assert show(value) == (text if len(text) <= 80 else text[:77] + "...")
    large = [[1] * MAX_NUMBERS] * 10
    assert steps(lambda: show(large)) < 1_000
    assert len(show(large)) == 80


# -- under DJL ---------------------------------------------------------------------------------------------------


def stepped() -> Bench:
    return Bench(info=EngineInfo("scripted", "1", "none", "none", 1 << 20))


def test_djls_steps_do_not_wait_for_a_large_body() -> None:
    bench = stepped()
    refused = b'{"inputs":"a","x":[1' + b",1" * MAX_NUMBERS + b"]}"
    first = bench.step(ask("a b c d", 1_000_000, stream=True), refused)
    assert [piece.last for piece in first] == [False, False]
    tokens = 0
    deadline = time.monotonic() + 120
    while not (pieces := bench.step())[1].last:
        tokens += bool(pieces[0].data)
        assert time.monotonic() < deadline
    assert tokens >= 3, "the neighbour's went on"
    assert f"more than {MAX_NUMBERS} numbers" in pieces[1].data.decode()
    assert bench.batch.num_requests == 1


def test_a_large_body_is_answered_and_refused_in_its_dialect_under_djl() -> None:
    bench = stepped()
    bodies = bench.finish(bench.step(ask("e f g h", 2, x="x" * MIB), {"prompt": "a", "max_tokens": "x" * MIB}))
    assert json.loads(bodies[0])["generated_text"] == " g h"
    assert json.loads(bodies[1])["error"]["type"] == "invalid_request_error"


def test_a_large_body_that_java_forgets_is_forgotten() -> None:
    bench = stepped()
    (piece,) = bench.step(b'{"inputs":"' + b"a" * MIB + b'"}')
    bench.batch.reset()
    assert piece.task.finished
    assert bench.dynamic(60).run([item(ask("a b", 1))])[0].take()
    assert piece.task.take() == b""


# -- over HTTP ---------------------------------------------------------------------------------------------------


def send(server: LiveServer, body: bytes, path: str = "/invocations") -> httpx.Response:
    headers = {"content-type": "application/json"}
    return http.post(server.url + path, content=body, headers=headers, timeout=120)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v2/models/model/generate", "/tokenize"])
def test_each_dialect_says_no_in_its_own_form(echo_server: LiveServer, path: str) -> None:
    found = send(echo_server, b'{"inputs":["a"' + b',"a"' * (3 * MAX_VALUES) + b"]}", path)
    assert found.status_code in (400, 413)
    assert f"more than {MAX_VALUES} strings" in found.text


def test_a_long_prompt_is_served(echo_server: LiveServer) -> None:
    text = "wordwordword " * (LARGE // 12)
    found = echo_server.post({"inputs": text, "parameters": {"max_new_tokens": 2, "return_full_text": True}})
    assert found.json() == {"generated_text": f"{text} wordwordword wordwordword"}
