"""Isolation under DJL: one client, or a dead engine, does to the others nothing but what it must."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.djl.servers import DjlServer, djl, newer, versions
from tests.servers import http, wait_for
from tests.user_files import write_adapter

pytestmark = [pytest.mark.djl, pytest.mark.long]

OPTIONS = {
    "option.entryPoint": "handler.entry",
    "option.llm_engine": "echo",
    "option.engine_isolation": "process",
    "option.lmi_version": "0.28",  # whose schema these tests know, in each mode
    "option.echo_cues": "true",
    "option.echo_tokens_per_second": "60",
    "option.max_rolling_batch_size": "64",
}
ROLLING = {"option.rolling_batch": "auto"}
ASYNC = {"option.async_mode": "true", "option.rolling_batch": "disable"}
CASES = [*((version, ROLLING) for version in versions()), *((version, ASYNC) for version in versions("0.31"))]


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'rolling' if case[1] is ROLLING else 'async'}"
)
def server(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    version, mode = request.param
    with djl(version, {**OPTIONS, **mode}) as server:
        yield server


class Got(NamedTuple):
    status: int
    text: str

    @property
    def last(self) -> Any:
        return json.loads(self.text.splitlines()[-1])


def stream(
    server: DjlServer, text: Any, tokens: int = 60, *, begun: Callable[[], object] = lambda: None, **headers: str
) -> Got:
    """Read a stream to its end; `begun` is called when five pieces are there."""
    body = {"inputs": text, "parameters": {"max_new_tokens": tokens}, "stream": True}
    with http.stream("POST", server.url + "/invocations", json=body, headers=headers, timeout=30) as response:
        pieces = []
        for piece in response.iter_bytes():
            pieces.append(piece)
            if len(pieces) == 5:
                begun()
        return Got(response.status_code, b"".join(pieces).decode())


def together(server: DjlServer, texts: list[Any], tokens: int = 60) -> list[Got]:
    with ThreadPoolExecutor(len(texts)) as threads:
        return list(threads.map(lambda text: stream(server, text, tokens), texts))


def test_no_token_is_crossed_among_32_streams_with_bad_neighbours(server: DjlServer) -> None:
    bad: list[Any] = ["", ["two", "prompts"], "<refuse>", None, 7]
    texts = [bad[i // 3 % len(bad)] if i % 3 == 0 else f"{i}a {i}b {i}c" for i in range(32)]
    for i, (text, got) in enumerate(zip(texts, together(server, texts), strict=True)):
        if i % 3 == 0:
            assert got.status == 424, (text, got)
            assert got.last["code"] == 424
        else:
            assert got.status == 200, (text, got)
            assert got.last["generated_text"] == "".join(f" {i}{'abc'[k % 3]}" for k in range(60))
            assert len(got.text.splitlines()) == 60


def test_a_killed_engine_ends_streams_and_later_requests_are_served(server: DjlServer) -> None:
    begun = threading.Barrier(9, timeout=30)
    with ThreadPoolExecutor(8) as threads:
        # More tokens than any stream has got when the last one begins, however slow the machine is.
        running = [threads.submit(stream, server, f"{i}x {i}y", 100_000, begun=begun.wait) for i in range(8)]
        begun.wait()
        os.kill(server.engine_pid(), signal.SIGKILL)
        for i, got in enumerate(future.result() for future in running):
            lines = [json.loads(line) for line in got.text.splitlines()]
            assert len(lines) > 5
            assert [line["token"]["text"] for line in lines[:4]] == [f" {i}x", f" {i}y", f" {i}x", f" {i}y"]
            assert "signal 9" in lines[-1]["error"]
            assert lines[-1]["details"]["finish_reason"] == "error"
    assert stream(server, "a b", 2).last["generated_text"] == " a b"


def test_an_engine_that_dies_at_rest_is_back_before_anybody_asks(server: DjlServer) -> None:
    dead = server.engine_pid()
    os.kill(dead, signal.SIGKILL)

    def replaced() -> bool:
        try:
            return server.engine_pid() != dead
        except (AssertionError, ValueError, IndexError):
            return False

    wait_for(replaced, 10, "no new engine")
    assert stream(server, "a b", 2).last["generated_text"] == " a b"


@pytest.mark.parametrize("cue", ["<raise>", "<die>"])
def test_an_engine_that_breaks_before_the_first_token_is_a_real_error(server: DjlServer, cue: str) -> None:
    assert stream(server, cue, 3).status == 424
    assert stream(server, "a b", 2).last["generated_text"] == " a b"


def leave(server: DjlServer, times: int) -> None:
    body = {"inputs": "g o", "parameters": {"max_new_tokens": 100_000}, "stream": True}
    for _ in range(times):
        with http.stream("POST", server.url + "/invocations", json=body, timeout=30) as response:
            next(response.iter_bytes())


def test_clients_that_leave_do_not_stop_the_others(server: DjlServer) -> None:
    leave(server, 8)
    assert stream(server, "a b", 30).last["generated_text"] == " a b" * 15


@pytest.mark.parametrize(("version", "mode"), CASES)
def test_who_leaves_makes_room_in_the_end(version: str, mode: dict[str, str]) -> None:
    """DJL never says so; the time limit does, which ends a stream with its name."""
    narrow = {**OPTIONS, **mode, "option.max_rolling_batch_size": "2", "option.request_time_limit": "3"}
    with djl(version, narrow) as server:
        leave(server, 2)
        began = time.monotonic()
        assert stream(server, "a b", 2).last["generated_text"] == " a b"
        assert time.monotonic() - began > 0.5
        lines = stream(server, "a b", 5000).text.splitlines()
        assert len(lines) > 10
        assert "not finished within 3 s (option.request_time_limit)" in lines[-1]


@pytest.mark.parametrize(("version", "mode"), [*CASES, *((version, {}) for version in versions())])
def test_answers_that_are_larger_than_javas_limit_come_in_pieces(version: str, mode: dict[str, str]) -> None:
    """With one field more than it takes, Java gives the worker up."""
    quick = {**OPTIONS, **mode, "option.echo_tokens_per_second": "0"}
    with djl(version, quick, env={"MAX_NETTY_BUFFER_SIZE": "60000"}) as server:
        worker = server.worker_pid()
        body = {"inputs": "中文字 é", "parameters": {"max_new_tokens": 20_000}}
        answer = server.post(body).json()
        assert (answer if mode else answer[0])["generated_text"] == " 中文字 é" * 10_000
        if mode:
            assert stream(server, "中文字 é", 20_000).last["generated_text"] == " 中文字 é" * 10_000
        assert server.worker_pid() == worker


@pytest.mark.parametrize("version", versions())
def test_in_a_dynamic_batch_an_answer_that_is_too_large_is_refused_alone(version: str) -> None:
    batching = {**OPTIONS, "option.echo_tokens_per_second": "0", "batch_size": "2", "max_batch_delay": "5000"}
    with djl(version, batching, env={"MAX_NETTY_BUFFER_SIZE": "60000"}) as server, ThreadPoolExecutor(2) as threads:
        asked = [{"inputs": "a b", "parameters": {"max_new_tokens": tokens}} for tokens in (20_000, 2)]
        large, small = threads.map(lambda body: server.post(body).json(), asked)
        assert "the maximum in a batch is 30000" in large["error"]
        assert small == [{"generated_text": " a b"}]


@pytest.mark.parametrize("version", versions()[-1:])
def test_a_killed_engine_ends_a_dynamic_batch_and_the_next_are_served(version: str) -> None:
    whole = {"batch_size": "4", "max_batch_delay": "2000"}  # all four in one batch, on a slow machine too
    with djl(version, {**OPTIONS, **whole}) as server, ThreadPoolExecutor(4) as threads:
        body = {"inputs": ["a b", "c"], "parameters": {"max_new_tokens": 100_000}}
        running = [threads.submit(server.post, body) for _ in range(4)]
        while not all(future.done() for future in running):
            time.sleep(1.0)  # on a slow machine, the batch may begin only after the first kill
            with contextlib.suppress(AssertionError, ProcessLookupError):  # the engine is being replaced
                os.kill(server.engine_pid(), signal.SIGKILL)
        for future in running:
            assert "signal 9" in future.result().json()["error"]
        body["parameters"] = {"max_new_tokens": 2}
        assert server.post(body).json() == [{"generated_text": " a b"}, {"generated_text": " c c"}]


HEEDED = [case for case in CASES if newer(case[0], "0.28")]  # 0.25's rolling batch takes no notice of the property


@pytest.mark.parametrize(("version", "mode"), [*HEEDED, *((version, {}) for version in versions())])
def test_a_client_cannot_register_an_adapter(version: str, mode: dict[str, str], tmp_path: Path) -> None:
    """As DJL would, where its front end lets the property through."""
    lora, env = {"option.enable_lora": "true"}, {"ALLOW_REQUEST_HANDLER_OVERRIDE": "true"}
    with djl(version, {**OPTIONS, **mode, **lora}, env=env) as server:
        src = str(write_adapter(tmp_path / "mine"))
        got = server.post({"inputs": "a"}, headers={"handler": "register_adapter", "name": "mine", "src": src})
        assert got.status_code == 424
        # Beside a rolling batch, a response to a call about adapters has no contents: they would end Java's thread.
        told = got.reason_phrase if mode else got.text
        assert "a request cannot choose the function that answers it" in told
        assert server.post({"inputs": "a"}, headers={"X-Amzn-SageMaker-Adapter-Identifier": "mine"}).status_code == 424


@pytest.mark.parametrize("version", versions())
def test_a_new_request_does_not_wait_for_a_slow_neighbours_step(version: str) -> None:
    """The neighbour's tokens come every four seconds; the new one is refused at once all the same."""
    slow = {**OPTIONS, **ROLLING, "option.echo_tokens_per_second": "0.25"}
    with djl(version, slow) as server, ThreadPoolExecutor(1) as threads:
        neighbour = threads.submit(stream, server, "a b", 2)
        time.sleep(0.5)
        began = time.monotonic()
        assert stream(server, ["two", "prompts"]).status == 424
        assert time.monotonic() - began < 2.5
        assert neighbour.result().last["generated_text"] == " a b"


@pytest.mark.parametrize(
    "headers",
    [
        {"batch_size": "7"},
        {"reset_rollingbatch": "true"},
        {"batch_000.data": "x", "request_tracking_id": "nobody"},
        {"X-Amzn-SageMaker-Custom-Attributes": "reset_rollingbatch=true;batch_size=9;model_dir=/"},
        {"input_formatter": "os.system", "output_formatter": "print", "device_id": "7", "model_dir": "/"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_headers_are_only_headers(server: DjlServer, headers: dict[str, Any]) -> None:
    """They become properties of the request, among DJL's own."""
    with ThreadPoolExecutor(1) as threads:
        neighbour = threads.submit(stream, server, "n m", 60)
        time.sleep(0.2)
        assert stream(server, "a b", 4, **headers).last["generated_text"] == " a b a b"
        assert neighbour.result().last["generated_text"] == " n m" * 30


@pytest.fixture(scope="module", params=versions())
def alone(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    """Each request comes to the worker by itself."""
    with djl(request.param, {key: value for key, value in OPTIONS.items() if "rolling" not in key}) as server:
        yield server


@pytest.mark.parametrize("size", ["3", "300000", "abc", "-1", "0"])
def test_one_request_cannot_pass_for_a_batch(alone: DjlServer, size: str) -> None:
    """Its query's names become content keys, and `batch_size` is a property like any header."""
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}
    for path in ("/invocations?batch_000.data=x", "/invocations?batch_000.data=x&batch_001.data=y&more=z"):
        assert alone.post(body, path, headers={"batch_size": size}).status_code in (200, 424)
    two = {**body, "inputs": ["a b", "c"]}  # Java and the handler agree on dynamic batching, which nothing names
    assert alone.post(two).json() == [{"generated_text": " a b"}, {"generated_text": " c c"}]


def test_a_client_cannot_choose_the_handler(server: DjlServer) -> None:
    got = stream(server, "a b", 2, handler="register_adapter")
    assert got.status == 400
    assert "handler can't be overridden" in json.loads(got.text)["message"]


@pytest.mark.parametrize("version", versions())
def test_nothing_but_the_handlers_can_be_called(version: str) -> None:
    """Even where the front end lets the property through; 0.25's rolling batch takes no notice of it."""
    names = ["handle", "register_adapter", "unregister_adapter", "update_adapter"]
    names += ["os", "djl_python", "worker", "__class__", "__dict__", "__builtins__", "__init__", "__import__"]
    with djl(version, {**OPTIONS, **ROLLING}, env={"ALLOW_REQUEST_HANDLER_OVERRIDE": "true"}) as server:
        for name in names:
            got = stream(server, "a b", 2, handler=name)
            assert got.status == (424 if newer(version, "0.28") else 200), name
        assert stream(server, "a b", 2).last["generated_text"] == " a b"


def test_the_entry_points_namespace_is_bare() -> None:
    import handler.entry

    public = {name for name in vars(handler.entry) if not name.startswith("__")}
    assert public == {"handle", "register_adapter", "unregister_adapter", "update_adapter"}


# -- more requests at once than three digits count: each gets its own answer, in each mode -----------------------------


ECHO = {
    "option.entryPoint": "handler.entry", "option.llm_engine": "echo", "job_queue_size": "2000",
    "option.lmi_version": "0.28",  # whose schema these tests know, in each mode
}  # fmt: skip
SLOW = {"option.max_rolling_batch_size": "1200", "option.echo_tokens_per_second": "1"}  # all are there at once
MODES = {
    "rolling": {"option.rolling_batch": "scheduler", **SLOW},
    "dynamic": {"batch_size": "1200", "max_batch_delay": "4000"},
    "async": {"option.async_mode": "true", "option.rolling_batch": "disable", **SLOW},
}
MANY_CASES = [  # just above 999, and in its hundreds; test_wire.py has the modes of the other version
    *((version, "rolling", 1001) for version in versions()[-1:]),
    *((version, "dynamic", 1100) for version in versions()[:1]),
    *((version, "async", 200) for version in versions("0.31")),  # in which requests have no places to count
]


async def answer(port: int, index: int) -> tuple[int, str]:
    """Status and body, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"inputs": f"w{index}", "parameters": {"max_new_tokens": 6}}).encode()
    head = f"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next((int(line.partition(":")[2]) for line in headers if line.startswith("content-length")), None)
    data = b""
    if length is not None:
        data = await reader.readexactly(length)
    else:
        while size := int(await reader.readline(), 16):
            data += (await reader.readexactly(size + 2))[:-2]
    writer.close()
    return int(status.split()[1]), data.decode()


async def answers(port: int, number: int) -> list[tuple[int, str]]:
    return list(await asyncio.gather(*(answer(port, index) for index in range(number))))


@pytest.mark.parametrize(("version", "mode", "number"), MANY_CASES)
def test_each_of_many_requests_at_once_gets_its_answer(version: str, mode: str, number: int) -> None:
    with djl(version, {**ECHO, **MODES[mode]}, env={"SERVING_ROLLING_BATCH_BUFFER": "1"}) as server:
        port = int(server.url.rpartition(":")[2])
        found = asyncio.run(answers(port, number))
        assert {status for status, _ in found} == {200}
        said = [json.loads(body) for _, body in found]
        wanted = [{"generated_text": f" w{index}" * 6} for index in range(number)]
        assert said == ([[one] for one in wanted] if mode == "dynamic" else wanted)
