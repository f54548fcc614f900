"""A user's model.py beside serving.properties, read by the handler under DJL as by the embedded server."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.djl.servers import djl, newer, versions
from tests.formatters_model import ANSWER, DJL, LEGACY, LEGACY_ANSWER, LINES, OWN, PAYLOADS
from tests.servers import http

pytestmark = [pytest.mark.djl, pytest.mark.long]

ECHO = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo"}
ROLLING = {**ECHO, "option.rolling_batch": "auto"}
ASYNC = {**ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}
SCHEMA = {**ASYNC, "option.lmi_version": "0.36"}  # LMI's own of the async mode
CASES = [
    *(pytest.param(version, ROLLING, id=f"{version}-rolling") for version in versions()),
    *(pytest.param(version, ASYNC, id=f"{version}-async") for version in versions("0.31")),
    *(pytest.param(version, SCHEMA, id=f"{version}-async schema") for version in versions("0.33")),
]


IMPORTS = [  # djl_python has had the decorators since 0.29
    pytest.param(*case.values, imports, id=f"{case.id}-{name}")
    for case in CASES
    for name, imports in (("ours", OWN), ("djl_python's", DJL))
    if name == "ours" or newer(str(case.values[0]), "0.29")
]


@pytest.mark.parametrize(("version", "properties", "imports"), IMPORTS)
def test_decorated_functions_read_and_write(version: str, properties: dict[str, str], imports: str) -> None:
    with djl(version, properties, {"model.py": imports + LINES}) as server:
        for stream in (True, False):
            got = server.post({"question": "a b", "stream": stream})
            assert (got.status_code, got.text) == (200, ANSWER)
        assert server.post({"question": "a b", "shout": True, "tokens": 1}).json()["text"] == " A"
        refused = server.post({"nothing": "a b"})
        assert refused.status_code == 424
        assert "read_question" in refused.json()["error"]
        assert server.post({"question": "a b", "stream": True}).text == ANSWER


@pytest.mark.parametrize("version", versions())
def test_the_six_arguments_of_old(version: str) -> None:
    with djl(version, ROLLING, {"model.py": LEGACY}) as server:
        got = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 3}, "stream": True})
        assert (got.status_code, got.text) == (200, LEGACY_ANSWER)


@pytest.mark.parametrize(("version", "properties"), CASES)
def test_payload_in_value_out(version: str, properties: dict[str, str]) -> None:
    with djl(version, properties, {"model.py": PAYLOADS}) as server:
        got = server.post({"inputPrompt": "a b"})
        assert got.json() == {"wrapped": {"generated_text": " a b a"}}


@pytest.mark.parametrize("version", versions())
def test_an_input_formatter_serves_dynamic_batches_too(version: str) -> None:
    only_input = PAYLOADS.partition("@output_formatter")[0]
    properties = {**ECHO, "batch_size": "2", "max_batch_delay": "50"}
    with djl(version, properties, {"model.py": only_input}) as server:
        got = server.post({"inputPrompt": ["a b", "c"]})
        assert got.json() == [{"generated_text": " a b a"}, {"generated_text": " c c c"}]


@pytest.mark.parametrize("version", versions())
def test_a_model_py_may_hold_formatters_and_the_handler(version: str) -> None:
    files = {"model.py": "from handler.entry import handle\n\nprint('model.py runs')\n" + OWN + LINES}
    properties = {key: value for key, value in ROLLING.items() if key != "option.entryPoint"}
    with djl(version, properties, files) as server:
        assert server.post({"question": "a b"}).text == ANSWER
        if not newer(version, "0.36"):  # whose djl_python executes it several times
            assert server.log.count("model.py runs") == 1


HANGING = (
    OWN
    + """
import time


@input_formatter
def read(decoded_payload: dict) -> dict:
    if decoded_payload.pop("hang", False):
        time.sleep(600)
    return decoded_payload


@output_formatter
def write(request_output: TextGenerationOutput) -> str:
    if request_output.input.input_text == "hang":
        time.sleep(600)
    return request_output.sequences[0].get_next_token()[0].text
"""
)


@pytest.mark.parametrize(("version", "properties"), CASES[len(versions()) - 1 :])  # once in a rolling batch: 20 s
def test_one_that_hangs_fails_alone_and_the_worker_lives(version: str, properties: dict[str, str]) -> None:
    with djl(version, properties, {"model.py": HANGING}) as server, ThreadPoolExecutor(8) as pool:
        worker, began = server.worker_pid(), time.monotonic()
        hung = [pool.submit(server.post, {"inputs": "hang"}), pool.submit(server.post, {"inputs": "a", "hang": True})]
        time.sleep(0.5)
        others = [pool.submit(server.post, {"inputs": "a b", "parameters": {"max_new_tokens": 3}}) for _ in range(3)]
        assert http.get(server.url + "/ping", timeout=5).status_code == 200
        for one, name in zip(hung, ("write", "read"), strict=True):
            assert f"formatter '{name}' of model.py did not end within 10 s" in one.result().json()["error"]
        assert {one.result().text for one in others} == {" a b a"}
        assert 20 <= time.monotonic() - began < 40
        assert server.worker_pid() == worker
