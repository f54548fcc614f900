"""Other engines under DJL: TensorRT-LLM's double, and servers of the engine openai that are busy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.djl.launch import StartFailed
from tests.djl.servers import DjlServer, djl, newer, versions
from tests.doubles import tiny
from tests.doubles.requests import CASES, OPTIONS, REFUSED, body, environment
from tests.process.engines.openai.server import HEAD, Server, event, listening, status
from tests.servers import LiveServer, serve

pytestmark = pytest.mark.djl

# -- TensorRT-LLM under DJL, on its double: in rolling batch and in async mode -----------------------------------------


NAMED = {"option.rolling_batch": "trtllm"}  # since 0.28 Java starts MPI for it, which needs GPUs
ROLLING = {"option.llm_engine": "trtllm", "option.rolling_batch": "scheduler"}
ASYNC = {"option.llm_engine": "trtllm", "option.async_mode": "true", "option.rolling_batch": "disable"}
PLACES = [
    *((version, ROLLING if newer(version, "0.28") else NAMED) for version in versions()),
    *((version, ASYNC) for version in versions("0.31")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


def started(version: str, mode: dict[str, str], model: Path, manners: str) -> Any:
    shared = {key: value for key, value in OPTIONS.items() if key != "option.llm_engine"}
    own = {"option.entryPoint": "handler.entry", "option.model_id": str(model), "option.lmi_version": "0.28"}
    options = {**own, **shared, **mode}
    return djl(version, options, env=environment(manners))


@pytest.fixture(
    scope="module", params=PLACES, ids=lambda case: f"{case[0]}-{'async' if case[1] is ASYNC else 'rolling'}"
)
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[DjlServer]:
    version, mode = request.param
    with started(version, mode, model, "version=1.3.0") as found:
        yield found


@pytest.fixture(scope="module")
def embedded(model: Path) -> Iterator[LiveServer]:
    flags = [flag for key, value in OPTIONS.items() for flag in ("-o", f"{key}={value}")]
    with serve(str(model), *flags, env=environment("version=1.3.0")) as found:
        found.wait_ready()
        yield found


@pytest.mark.parametrize("name", CASES)
def test_a_request_is_answered_as_by_the_embedded_server(server: DjlServer, embedded: LiveServer, name: str) -> None:
    case = CASES[name]
    answer = server.post(body(case.parameters))
    assert answer.status_code == 200, answer.text
    assert case.check(answer.json()), answer.text
    if case.settled:
        assert answer.json() == embedded.post(body(case.parameters)).json()


@pytest.mark.parametrize("name", ["greedy", "to the end", "stop sequence"])
def test_a_stream_is_the_embedded_servers(server: DjlServer, embedded: LiveServer, name: str) -> None:
    asked = body(CASES[name].parameters, stream=True)
    found, wanted = (
        [json.loads(line) for line in each.post(asked).text.splitlines() if line] for each in (server, embedded)
    )
    assert found == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_is_refused_by_name_under_djl(server: DjlServer, name: str) -> None:
    parameters, message = REFUSED[name]
    assert message in str(server.post(body(parameters)).json())


@pytest.mark.parametrize("version", versions("0.33"))
def test_without_a_gpu_java_cannot_start_what_names_trtllm_itself(version: str, model: Path) -> None:
    """0.34 converts the model before it counts GPUs, and has no script for it here."""
    reason = "/ by zero" if newer(version, "0.35") else r"trt_llm_partition\.py"
    with pytest.raises(StartFailed, match=reason), started(version, NAMED, model, "version=1.3.0"):
        pass


@pytest.mark.parametrize("version", versions("0.33"))
def test_java_makes_dynamic_batching_of_auto(version: str, model: Path) -> None:
    mode = {"option.llm_engine": "trtllm", "option.rolling_batch": "auto"}
    with started(version, mode, model, "version=1.3.0") as server:
        answer = server.post({"inputs": "Once upon a time", "parameters": {"max_new_tokens": 3}}).json()
        assert [list(each) for each in answer] == [["generated_text"]]


@pytest.mark.parametrize(("version", "mode"), PLACES[-1:])
def test_a_dead_engine_is_replaced(version: str, mode: dict[str, str], model: Path) -> None:
    with started(version, mode, model, "version=1.3.0;die_after=200") as server:
        long = server.post(body({"max_new_tokens": 300, "ignore_eos_token": True}))
        assert "Engine has died: the executor died" in long.text
        assert server.post(body({"max_new_tokens": 3})).json()["details"]["generated_tokens"] == 3


# -- all servers of the engine openai are busy: DJL's clients get that status, in each mode ----------------------------


MODES = {
    "rolling": {"option.rolling_batch": "scheduler"},
    "dynamic": {"option.rolling_batch": "disable"},
    "dynamic streaming": {"option.rolling_batch": "disable", "option.enable_streaming": "true"},
    "async": {"option.async_mode": "true", "option.rolling_batch": "disable"},
}
BUSY_PLACES = [(version, mode) for mode in MODES for version in versions(since="0.31" if mode == "async" else "0")]
TRIES = 10
BUSY = (status(503, "no room", "Retry-After: 7\r\nConnection: close\r\n"),)


def commits_early(version: str) -> bool:
    """Whether Java settles the status 0.1 s after a request has come, answered or not: on a busy machine it is 200."""
    return version < "0.29"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    with listening(owner="lmi-handler") as server:
        server.models["data"][0]["max_model_len"] = tiny.CONTEXT
        yield server


@pytest.mark.parametrize(("version", "mode"), BUSY_PLACES)
def test_busy_servers_are_told_by_the_status(upstream: Server, tmp_path: Path, version: str, mode: str) -> None:
    properties = {
        "option.entryPoint": "handler.entry",
        "option.llm_engine": "openai",
        "option.model_id": str(tiny.make(tmp_path / "tiny")),
        "option.base_url": upstream.url,
        **MODES[mode],
    }
    streams = (False,) if mode.startswith("dynamic") else (False, True)
    with djl(version, properties) as server:
        for stream in streams:
            body = {"inputs": "a", "stream": stream} if stream else {"inputs": "a"}
            upstream.always = BUSY
            for _ in range(TRIES):
                answer = server.post(body)
                assert "the lmi server is busy: it answered 503" in answer.text
                if answer.status_code == 503:
                    break
                assert commits_early(version), answer.text
            assert answer.status_code == 503, answer.text
            upstream.always = (HEAD + event(300, finish="length"),)
            assert server.post(body).status_code == 200, "the next one finds room"
