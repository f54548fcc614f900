"""LoRA adapters under DJL: what Java's calls do in each mode, beside requests and without."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.djl.launch import StartFailed
from tests.djl.processes import group_members
from tests.djl.servers import DjlServer, djl, newer, versions
from tests.servers import http, wait_for
from tests.user_files import write_adapter

pytestmark = [pytest.mark.djl, pytest.mark.long]

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
WORDS = 200
PROMPT = " ".join(f"w{i}" for i in range(WORDS))
OPTIONS = {
    "option.entryPoint": "handler.entry",
    "option.llm_engine": "echo",
    "option.enable_lora": "true",
    "option.adapters_root": "/",
    "option.engine_isolation": "process",
    "option.lmi_version": "0.28",  # whose schema these tests know, in each mode
    "option.echo_tokens_per_second": "60",
    "retry_threshold": "10",
}
MODES = {
    "rolling": {"option.rolling_batch": "auto"},
    "dynamic": {},  # 0.25 steps a rolling batch whenever option.rolling_batch is there
    "async": {"option.async_mode": "true", "option.rolling_batch": "disable"},
}
CONFIG = json.dumps({"peft_type": "LORA", "r": 8})
FILES = {f"adapters/{name}/{file}": text for name in ("first", "second")
         for file, text in (("adapter_config.json", CONFIG), ("adapter_model.safetensors", ""))}  # fmt: skip


class Case(NamedTuple):
    version: str
    mode: str

    @property
    def is_old(self) -> bool:
        """0.28's Java answers a call by itself, and hands it to the worker with the next request."""
        return not newer(self.version, "0.29")

    @property
    def answers_first(self) -> bool:
        """Java answers without waiting for the worker: in async mode too."""
        return self.is_old or self.mode == "async"


CASES = [
    *(Case(version, "rolling") for version in versions("0.28")),
    *(Case(version, "dynamic") for version in versions()),
    *(Case(version, "async") for version in versions("0.31")),
]
ASYNC = [case for case in CASES if case.mode == "async"]
ROLLING = [Case(version, "rolling") for version in versions()]
# 0.25's Java puts every call through the rolling batch, where it is a request like any other (docs/adapters.md).
CALLS_ARE_REQUESTS = [case for case in ROLLING if not newer(case.version, "0.28")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def shared(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    with djl(request.param.version, {**OPTIONS, **MODES[request.param.mode]}, FILES) as server:
        yield server


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.node.callspec.params["shared"]
    return found


def on(cases: list[Case]) -> pytest.MarkDecorator:
    """Run on the shared servers of these cases alone."""
    return pytest.mark.parametrize("shared", cases, indirect=True, scope="module", ids="-".join)


@pytest.fixture
def server(shared: DjlServer) -> Iterator[DjlServer]:
    """With no adapter in it but those beside the model."""
    yield shared
    for name in ("a", "b"):
        call(shared, "DELETE", f"/{name}")
    assert generate(shared, "a").status_code == 424  # 0.28 hands the calls over now


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    for name in ("a", "b"):
        write_adapter(directory / name)
    return directory


def call(server: DjlServer, method: str, path: str = "", **more: Any) -> httpx.Response:
    return http.request(method, f"{server.url}/adapters{path}", timeout=60, **more)


def register(server: DjlServer, name: str, src: Path | str, **more: str) -> httpx.Response:
    return call(server, "POST", params={"name": name, "src": str(src), **more})


def listed(server: DjlServer) -> list[str]:
    return [adapter["name"] for adapter in call(server, "GET").json()["adapters"]]


def generate(server: DjlServer, adapter: str = "", tokens: int = 3, *, stream: bool = False) -> httpx.Response:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens}, **({"stream": True} if stream else {})}
    return server.post(body, headers={HEADER: adapter} if adapter else {})


def id_of(response: httpx.Response, tokens: int = 3) -> int:
    """The id of the adapter that made an answer, 0 for none, which must be whole and of that one alone."""
    assert response.status_code == 200, response.text
    value = json.loads(response.text.splitlines()[-1])
    words = (value[0] if isinstance(value, list) else value)["generated_text"].split()
    first = int(words[0][1:])
    assert words == [f"w{(first + i) % WORDS}" for i in range(tokens)]
    return first


def check_done(response: httpx.Response, case: Case, done: str) -> None:
    """A call that Java lets through: it says 200, in the worker's words only where it waits for them."""
    assert response.status_code == 200, response.text
    said = response.json()["status"]
    assert said == ("OK" if case.mode == "async" else f"Adapter a {'registered' if case.is_old else done}")


def test_java_registers_those_beside_the_model_itself(server: DjlServer, case: Case) -> None:
    assert [id_of(generate(server, name)) for name in ("", "first", "second")] == [0, 1, 2]
    assert set(listed(server)) >= {"first", "second"}
    again = register(server, "first", "first")
    assert again.status_code == (500 if case.is_old else 409)
    assert "The adapter first already exists" in again.json()["message"]
    assert id_of(generate(server, "first")) == 1


def test_registered_used_updated_unregistered(server: DjlServer, files: Path, case: Case) -> None:
    check_done(register(server, "a", files / "a"), case, "registered")
    id = id_of(generate(server, "a"))
    assert id > 2
    updated = call(server, "POST", "/a/update", params={"src": str(files / "b")})
    if case.is_old:  # it has no such route, and takes the path for another
        assert (updated.status_code, updated.json()["message"]) == (400, "The parameter name is required")
        assert id_of(generate(server, "a")) == id
    else:
        check_done(updated, case, "updated")
        assert id_of(generate(server, "a")) > id
    check_done(call(server, "DELETE", "/a"), case, "unregistered")
    refused = generate(server, "a")
    assert (refused.status_code, "no adapter with that name" in refused.text) == (424, True), refused.text
    assert id_of(generate(server)) == 0


@on([case for case in CASES if not case.answers_first])
def test_an_adapter_is_called_by_its_alias(server: DjlServer, files: Path) -> None:
    assert register(server, "a", files / "a").status_code == 200
    gone = call(server, "DELETE", "/a", headers={"X-Amzn-SageMaker-Adapter-Alias": "mine"})
    assert (gone.status_code, gone.json()) == (200, {"status": "Adapter mine unregistered"})


@pytest.mark.parametrize(
    ("name", "src", "more", "status", "words"),
    [
        ("a", "{files}/none", {}, 424, "there is no such directory"),
        ("a/b", "{files}/a", {}, 400, "must be 1 to 256 letters"),
        ("a\r\nX-Evil: 1", "{files}/a", {}, 400, "must be 1 to 256 letters"),
        ("a", "{files}/a", {"pin": "true"}, 400, "pin=true"),
        ("a", "{files}/a", {"preload": "maybe"}, 400, "must be true or false"),
    ],
)
def test_what_cannot_be_registered_is_refused_with_its_reason(
    server: DjlServer, files: Path, case: Case, name: str, src: str, more: dict[str, str], status: int, words: str
) -> None:
    """Where Java answers first, the worker's log has the reason; Java lists an adapter that is not there.

    In async mode an error of the worker may come before Java looks.
    """
    said_before = len(server.log)
    response = register(server, name, src.format(files=files), **more)
    assert "x-evil" not in response.headers
    assert generate(server, "a").status_code == 424
    if case.answers_first:
        reason = re.compile(f"the call to register {re.escape(repr(name))} failed: .*{re.escape(words)}")
        wait_for(lambda: reason.search(server.log, said_before) is not None, 30, "the reason is not in the log")
    if case.is_old or (case.answers_first and response.status_code == 200):
        assert response.status_code == 200
        assert name in listed(server)
    else:
        assert (response.status_code, words in response.json()["message"]) == (status, True), response.text
        assert name not in listed(server)
    assert id_of(generate(server, "first")) == 1


def test_a_url_is_refused_before_the_worker_sees_it(server: DjlServer, case: Case) -> None:
    response = register(server, "a", "s3://bucket/a")
    assert response.status_code == (500 if case.is_old else 409)
    assert response.json()["message"] == "URL adapters are not currently supported"


@on(ASYNC)
def test_calls_and_the_requests_after_them_keep_their_order(server: DjlServer, files: Path) -> None:
    """Java answers a call at once; what comes next finds it done all the same, however long it takes."""
    with ThreadPoolExecutor(1) as threads:
        with paused(server.engine_pid()):
            assert register(server, "a", files / "a").status_code == 200
            asked = threads.submit(generate, server, "a")
            time.sleep(0.3)
            assert not asked.done()
        assert id_of(asked.result()) > 2
        with paused(server.engine_pid()):
            assert call(server, "POST", "/a/update").status_code == 200
            assert call(server, "DELETE", "/a").status_code == 200
            asked = threads.submit(generate, server, "a")
            time.sleep(0.3)
        assert asked.result().status_code == 424


@contextlib.contextmanager
def paused(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_a_request_cannot_register(server: DjlServer, files: Path) -> None:
    for header in ("handler", "Handler"):
        more = {header: "register_adapter", "name": "a", "src": str(files / "a")}
        assert server.post({"inputs": "a"}, headers=more).status_code in (400, 424)
        assert generate(server, "a").status_code == 424


def test_a_killed_engines_successor_knows_them_all_under_djl(server: DjlServer, files: Path) -> None:
    assert register(server, "a", files / "a").status_code == 200
    id = id_of(generate(server, "a"))
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_for(lambda: generate(server, "a").status_code == 200, 60, "no engine")
    assert [id_of(generate(server, name)) for name in ("", "first", "a")] == [0, 1, id]


@on(ASYNC)
def test_adapters_come_and_go_while_streams_run_in_async_mode(server: DjlServer, files: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert register(server, "a", files / "a").status_code == 200
        id = id_of(generate(server, "a"))
        running = [threads.submit(generate, server, "a" if i % 2 else "", 600, stream=True) for i in range(8)]
        for i in range(10):
            registered = register(server, "b", files / ("none" if i % 3 == 0 else "b")).status_code
            assert registered in ((200,) if i % 3 else (200, 424))  # its error may come before Java looks
            assert generate(server, "b").status_code == (200 if i % 3 else 424)
            assert call(server, "DELETE", "/b").status_code == (200 if registered == 200 else 404)
            assert "b" not in listed(server)
        assert call(server, "DELETE", "/a").status_code == 200
        assert generate(server, "a").status_code == 424
        assert not all(stream.done() for stream in running)
        assert [id_of(stream.result(), 600) for stream in running] == [0, id] * 4


@on(ROLLING)
def test_those_beside_the_model_are_there_in_every_rolling_batch(shared: DjlServer) -> None:
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(generate, shared, ["", "first", "second"][i % 3], 30, stream=True) for i in range(24)]
        assert [id_of(one.result(), 30) for one in asked] == [0, 1, 2] * 8


@on(CALLS_ARE_REQUESTS)
def test_before_028_a_call_is_a_request_and_changes_nothing(shared: DjlServer, files: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(generate, shared, "first", 100, stream=True) for _ in range(4)]
        assert register(shared, "a", files / "a").status_code == 200
        assert generate(shared, "a").status_code == 424
        assert [id_of(one.result(), 100) for one in running] == [1] * 4


@pytest.mark.parametrize("version", versions("0.29"))
def test_a_call_during_a_rolling_batch_loses_only_the_step_in_java(version: str, files: Path) -> None:
    """DJL's own loss, which nothing here can mend (docs/adapters.md): it gives the worker up.

    It starts another one, or two at once of which none remains: the call and the step may both miss their answer.
    """
    short = {"option.predict_timeout": "4"}
    with djl(version, {**OPTIONS, **MODES["rolling"], **short}, FILES) as server, ThreadPoolExecutor(6) as threads:
        worker = server.worker_pid()
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 600}, "stream": True}
        running = [threads.submit(server.post, body, timeout=6) for _ in range(6)]
        time.sleep(0.5)
        register(server, "a", files / "a")
        for stream in running:
            with contextlib.suppress(httpx.HTTPError):  # their clients wait in vain
                assert stream.result().status_code != 200
        wait_for(lambda: worker not in group_members(server.process.pid), 10, "Java keeps the worker")
        assert "arrived while requests were running" in server.log
        wait_for(lambda: "Restart python process" in server.log, 10, "Java starts no other worker")


@pytest.mark.parametrize("version", versions())
def test_a_broken_one_beside_the_model_fails_the_start_by_name_under_djl(version: str) -> None:
    with (
        pytest.raises(StartFailed, match=r"the adapter broken cannot be used: src=.* contains no adapter_config.json"),
        djl(version, {**OPTIONS, **MODES["rolling"]}, {**FILES, "adapters/broken/adapter_model.bin": ""}),
    ):
        pass


@pytest.mark.parametrize("version", [version for version in versions() if not newer(version, "0.29")])
def test_028_does_not_ask_for_enable_lora_and_the_handler_refuses(version: str, files: Path) -> None:
    with djl(version, {**OPTIONS, "option.enable_lora": "false"}) as server:
        assert register(server, "a", files / "a").status_code == 200
        refused = generate(server, "a")
        assert (refused.status_code, "serves no LoRA adapters" in refused.text) == (424, True), refused.text
        line = "the call to register 'a' failed: LoRA is not enabled"
        wait_for(lambda: line in server.log, 30, "the log does not say why")  # 0.28 does not wait for the call


def test_lmis_other_ways_name_an_adapter(case: Case, shared: DjlServer) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}
    attributes = {"X-Amzn-SageMaker-Custom-Attributes": "adapter=second"}
    assert id_of(shared.post(body, headers=attributes)) == 2
    by_query = id_of(shared.post(body, "/invocations?adapter=second"))
    assert by_query == (0 if case.mode == "rolling" else 2)  # Java hands a rolling batch the body alone
