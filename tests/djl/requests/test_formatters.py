"""A user's model.py under DJL: its formatters, and a `handle` of its own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.app.server import serve
from tests.djl.servers import djl, newer, versions
from tests.servers import http
from tests.user_files import ANSWER, DJL, LEGACY, LEGACY_ANSWER, LINES, OWN, PAYLOADS, write_model

pytestmark = [pytest.mark.djl, pytest.mark.long]

# -- a user's model.py beside serving.properties, read by the handler under DJL as by the embedded server --------------


ECHO = {"option.entryPoint": "handler.entry", "option.llm_engine": "echo"}
ROLLING = {**ECHO, "option.rolling_batch": "auto"}
ASYNC = {**ECHO, "option.async_mode": "true", "option.rolling_batch": "disable"}
SCHEMA = {**ASYNC, "option.lmi_version": "0.36"}  # LMI's own of the async mode
CASES = [
    *(pytest.param(version, ROLLING, id=f"{version}-rolling") for version in versions()),
    *(pytest.param(version, ASYNC, id=f"{version}-async") for version in versions("0.31")),
    *(pytest.param(version, SCHEMA, id=f"{version}-async schema") for version in versions("0.33")),
]


@pytest.mark.parametrize(("version", "properties"), CASES)
def test_decorated_functions_read_and_write(version: str, properties: dict[str, str]) -> None:
    """The decorators are djl_python's where it has them, but for one mode."""
    imports = DJL if newer(version, "0.29") and properties is not ASYNC else OWN
    with djl(version, properties, {"model.py": imports + LINES}) as server:
        for stream in (True, False):
            got = server.post({"question": "a b", "stream": stream})
            assert (got.status_code, got.text) == (200, ANSWER)
        assert server.post({"question": "a b", "shout": True, "tokens": 1}).json()["text"] == " A"
        refused = server.post({"nothing": "a b"})
        assert refused.status_code == 424
        assert "read_question" in refused.json()["error"]
        assert server.post({"question": "a b", "stream": True}).text == ANSWER


@pytest.mark.parametrize("version", versions()[:1])
def test_the_six_arguments_of_old(version: str) -> None:
    with djl(version, ROLLING, {"model.py": LEGACY}) as server:
        got = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 3}, "stream": True})
        assert (got.status_code, got.text) == (200, LEGACY_ANSWER)


@pytest.mark.parametrize(("version", "properties"), CASES[len(versions()) - 1 :])
def test_payload_in_value_out(version: str, properties: dict[str, str]) -> None:
    with djl(version, properties, {"model.py": PAYLOADS}) as server:
        got = server.post({"inputPrompt": "a b"})
        assert got.json() == {"wrapped": {"generated_text": " a b a"}}


@pytest.mark.parametrize("version", versions()[-1:])
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


@pytest.mark.parametrize(("version", "properties"), CASES[len(versions()) - 1 :][:2])  # in each mode: 20 s
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
        assert time.monotonic() - began >= 20
        assert server.worker_pid() == worker


# -- handle ------------------------------------------------------------------------------------------------------------
# A model.py with its own `handle` answers in the embedded server as under DJL, whose Java side calls it itself.


HANDLE = """
from djl_python import Input, Output
from djl_python.encode_decode import decode

first = []


def handle(inputs: Input):
    if inputs.is_empty():
        first.append(inputs.get_properties())
        return None
    do = decode(inputs, inputs.get_property("Content-Type")).get("do")
    if do == "raise":
        raise ValueError("as asked")
    if do == "type":
        return "text"
    if do == "error":
        return Output().error("not this", 401)
    if do == "stream":
        return Output().add_stream_content(iter(["one", "two"]))
    if do == "raw":
        return Output().add_property("content-type", "text/plain").add_stream_content(iter(["one", "two"]), None)
    if do == "options":
        return Output().add_as_json({name: first[0][name] for name in ("my_own", "model_dir")}["my_own"])
    if do == "none":
        return None
    return Output().add_as_json({"batch": inputs.is_batch(), "e": "\\u00e9"}).add_property("x-mine", "1")
"""


@pytest.mark.parametrize("version", versions())
def test_both_answer_the_same(version: str, tmp_path: Path) -> None:
    options = {"option.my_own": "value", "option.lmi_version": "0.34" if newer(version, "0.31") else "0.28"}
    asked = ["", "raise", "type", "error", "stream", "raw", "options", "none"]
    with djl(version, options, {"model.py": HANDLE}) as theirs:
        wanted = [theirs.post({"do": do}) for do in asked]
    properties = write_model(tmp_path, HANDLE)
    properties.write_text("".join(f"{key}={value}\n" for key, value in options.items()))
    with serve("--properties", str(properties)) as ours:
        ours.wait_ready()
        found = [ours.post({"do": do}) for do in asked]
    for do, one, other in zip(asked, found, wanted, strict=True):
        assert (do, one.status_code, one.content) == (do, other.status_code, other.content)
        for name in ("content-type", "x-mine"):
            assert one.headers.get(name) == other.headers.get(name), do


HANDLE_ASYNC = """
from djl_python import Input
from djl_python.async_utils import create_non_stream_output, create_stream_chunk_output
from djl_python.encode_decode import decode


async def chunks():
    for word in ("one", "two"):
        yield create_stream_chunk_output({"text": word}, word == "two")


async def handle(inputs: Input):
    if inputs.is_empty():
        return None
    do = decode(inputs, inputs.get_property("Content-Type")).get("do")
    if do == "error":
        return create_non_stream_output("", error="no such thing", code=418)
    if do == "stream":
        return chunks()
    return create_non_stream_output({"text": "\\u00e9"}, properties={"x-mine": 1})
"""


@pytest.mark.parametrize("version", versions(since="0.34"))
def test_both_answer_the_same_in_async_mode(version: str, tmp_path: Path) -> None:
    options = {"option.async_mode": "true", "option.rolling_batch": "disable", "option.lmi_version": "0.34"}
    with djl(version, options, {"model.py": HANDLE_ASYNC}) as theirs:
        wanted = [theirs.post({"do": do}) for do in ("", "error")]
        # Java may drop a stream's last piece (handler/djl/batches.next_piece).
        wanted.append(max((theirs.post({"do": "stream"}) for _ in range(3)), key=lambda answer: len(answer.content)))
    properties = write_model(tmp_path, HANDLE_ASYNC)
    properties.write_text("".join(f"{key}={value}\n" for key, value in options.items()))
    with serve("--properties", str(properties)) as ours:
        ours.wait_ready()
        found = [ours.post({"do": do}) for do in ("", "error", "stream")]
    for one, other in zip(found, wanted, strict=True):
        assert (one.status_code, one.content) == (other.status_code, other.content)
        assert one.headers.get("x-mine") == other.headers.get("x-mine")
        if one.status_code == 200:
            assert one.headers["content-type"] == other.headers["content-type"]
