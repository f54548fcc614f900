"""LoRA adapters under DJL: what Java's calls do in each mode, beside requests and without."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapter_files import write_adapter
from tests.djl.launch import StartFailed
from tests.djl.servers import DjlServer, djl, newer, versions
from tests.servers import wait_for

pytestmark = pytest.mark.djl

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
WORDS = 200
PROMPT = " ".join(f"w{i}" for i in range(WORDS))
OPTIONS = {
    "option.entryPoint": "handler.entry",
    "option.llm_engine": "echo",
    "option.enable_lora": "true",
    "option.engine_isolation": "process",
    "option.echo_tokens_per_second": "60",
}
MODES = {
    "rolling": {"option.rolling_batch": "auto"},
    "dynamic": {},  # 0.25 steps a rolling batch whenever option.rolling_batch is there
    "async": {"option.async_mode": "true", "option.rolling_batch": "disable"},
}
CONFIG = json.dumps({"peft_type": "LORA", "r": 8})
FILES = {f"adapters/{name}/{file}": text for name in ("first", "second")
         for file, text in (("adapter_config.json", CONFIG), ("adapter_model.safetensors", ""))}  # fmt: skip

# 0.25's Java puts every call through the rolling batch, where it is a request like any other (docs/adapters.md).
CASES = [
    *((version, "rolling") for version in versions("0.28")),
    *((version, "dynamic") for version in versions()),
    *((version, "async") for version in versions("0.31")),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def shared(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    version, mode = request.param
    with djl(version, {**OPTIONS, **MODES[mode]}, FILES) as server:
        yield server


@pytest.fixture
def server(shared: DjlServer) -> Iterator[DjlServer]:
    """With no adapter in it but those beside the model."""
    yield shared
    for name in ("a", "b"):
        call(shared, "DELETE", f"/{name}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    for name in ("a", "b"):
        write_adapter(directory / name)
    return directory


def call(server: DjlServer, method: str, path: str = "", **more: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}/adapters{path}", timeout=60, **more)


def register(server: DjlServer, name: str, src: Path | str, **more: str) -> httpx.Response:
    return call(server, "POST", params={"name": name, "src": str(src), **more})


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


def test_those_beside_the_model_are_there_and_may_be_registered_again(server: DjlServer) -> None:
    assert [id_of(generate(server, name)) for name in ("", "first", "second")] == [0, 1, 2]
    response = register(server, "first", "first")  # as DJL Serving does by itself when it has loaded the model
    assert (response.status_code, "Adapter first registered" in response.text) == (200, True), response.text
    assert id_of(generate(server, "first")) == 1


def test_registered_used_updated_unregistered(server: DjlServer, files: Path) -> None:
    response = register(server, "a", files / "a")
    assert (response.status_code, "Adapter a registered" in response.text) == (200, True), response.text
    id = id_of(generate(server, "a"))
    assert id > 2
    response = call(server, "POST", "/a/update", params={"src": str(files / "b")})
    assert (response.status_code, "Adapter a updated" in response.text) == (200, True), response.text
    assert id_of(generate(server, "a")) > id
    response = call(server, "DELETE", "/a", headers={"X-Amzn-SageMaker-Adapter-Alias": "mine"})
    assert (response.status_code, "Adapter mine unregistered" in response.text) == (200, True), response.text
    refused = generate(server, "a")
    assert (refused.status_code, "no adapter of that name" in refused.text) == (424, True), refused.text
    assert id_of(generate(server)) == 0


@pytest.mark.parametrize(
    ("name", "src", "more", "status", "words"),
    [
        ("a", "s3://bucket/a", {}, 400, "adapters are read from directories of this machine"),
        ("a", "{files}/none", {}, 424, "there is no such directory"),
        ("a/b", "{files}/a", {}, 400, "must be 1 to 256 letters"),
        ("a\r\nX-Evil: 1", "{files}/a", {}, 400, "must be 1 to 256 letters"),
        ("a", "{files}/a", {"pin": "true"}, 400, "pin=true"),
        ("a", "{files}/a", {"preload": "maybe"}, 400, "must be true or false"),
        ("first", "{files}/a", {}, 409, "The adapter first already exists"),
    ],
)
def test_what_cannot_be_registered_has_its_status_and_reason(
    server: DjlServer, files: Path, name: str, src: str, more: dict[str, str], status: int, words: str
) -> None:
    response = register(server, name, src.format(files=files), **more)
    assert response.status_code == status, response.text
    assert words in response.json()["message"]
    assert "x-evil" not in response.headers
    assert id_of(generate(server, "first")) == 1


def test_a_request_cannot_register(server: DjlServer, files: Path) -> None:
    for header in ("handler", "Handler"):
        more = {header: "register_adapter", "name": "a", "src": str(files / "a")}
        assert server.post({"inputs": "a"}, headers=more).status_code in (400, 424)
        assert generate(server, "a").status_code == 424


def test_a_killed_engines_successor_knows_them_all(server: DjlServer, files: Path) -> None:
    assert register(server, "a", files / "a").status_code == 200
    id = id_of(generate(server, "a"))
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_for(lambda: generate(server, "a").status_code == 200, 20, "no engine")
    assert [id_of(generate(server, name)) for name in ("", "first", "a")] == [0, 1, id]


@pytest.mark.parametrize("version", versions("0.31"))
def test_adapters_come_and_go_while_streams_run_in_async_mode(version: str, files: Path) -> None:
    with djl(version, {**OPTIONS, **MODES["async"]}, FILES) as server, ThreadPoolExecutor(8) as threads:
        assert register(server, "a", files / "a").status_code == 200
        id = id_of(generate(server, "a"))
        running = [threads.submit(generate, server, "a" if i % 2 else "", 600, stream=True) for i in range(8)]
        for i in range(10):
            assert register(server, "b", files / ("none" if i % 3 == 0 else "b")).status_code == (200 if i % 3 else 424)
            assert call(server, "DELETE", "/b").status_code == (200 if i % 3 else 404)
        assert call(server, "DELETE", "/a").status_code == 200
        assert generate(server, "a").status_code == 424
        assert not all(stream.done() for stream in running)
        assert [id_of(stream.result(), 600) for stream in running] == [0, id] * 4


@pytest.mark.parametrize("version", versions("0.28"))
def test_a_call_during_a_rolling_batch_loses_the_step_in_java_and_crosses_nothing(version: str, files: Path) -> None:
    """DJL's own loss, which nothing here can mend (docs/adapters.md): it gives the worker up and starts it again."""
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
        wait_for(lambda: generate(server).status_code == 200, 20, "no worker")
        assert server.worker_pid() != worker
        assert "came while requests were under way" in server.log
        assert [id_of(generate(server, name)) for name in ("", "first", "second")] == [0, 1, 2]


@pytest.mark.parametrize("version", versions())
def test_those_beside_the_model_are_there_in_every_rolling_batch(version: str) -> None:
    with djl(version, {**OPTIONS, **MODES["rolling"]}, FILES) as server, ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(generate, server, ["", "first", "second"][i % 3], 30, stream=True) for i in range(24)]
        assert [id_of(one.result(), 30) for one in asked] == [0, 1, 2] * 8


@pytest.mark.parametrize("version", [version for version in versions() if not newer(version, "0.28")])
def test_before_028_a_call_is_a_request_in_the_rolling_batch_and_changes_nothing(version: str, files: Path) -> None:
    with djl(version, {**OPTIONS, **MODES["rolling"]}, FILES) as server, ThreadPoolExecutor(4) as threads:
        running = [threads.submit(generate, server, "first", 100, stream=True) for _ in range(4)]
        register(server, "a", files / "a")
        assert generate(server, "a").status_code == 424
        assert [id_of(one.result(), 100) for one in running] == [1] * 4


@pytest.mark.parametrize("version", versions())
def test_a_broken_one_beside_the_model_fails_the_start_by_name(version: str) -> None:
    with (
        pytest.raises(StartFailed, match=r"the adapter broken cannot be used: src=.* holds no adapter_config.json"),
        djl(version, {**OPTIONS, **MODES["rolling"]}, {**FILES, "adapters/broken/adapter_model.bin": ""}),
    ):
        pass


@pytest.mark.parametrize("version", versions("0.28"))
def test_without_enable_lora_a_call_says_so(version: str, files: Path) -> None:
    with djl(version, {**OPTIONS, **MODES["rolling"], "option.enable_lora": "false"}) as server:
        response = register(server, "a", files / "a")
        assert response.status_code == 400
        assert "LoRA is not enabled" in response.text
