"""A model.py with its own `handle` answers in the embedded server as under DJL, whose Java side calls it itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.server import serve
from tests.djl.servers import djl, newer, versions
from tests.formatters_model import write_model

pytestmark = [pytest.mark.djl, pytest.mark.long]

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


ASYNC = """
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
    with djl(version, options, {"model.py": ASYNC}) as theirs:
        wanted = [theirs.post({"do": do}) for do in ("", "error")]
        # Java may drop a stream's last piece (handler/djl/batches.next_piece).
        wanted.append(max((theirs.post({"do": "stream"}) for _ in range(3)), key=lambda answer: len(answer.content)))
    properties = write_model(tmp_path, ASYNC)
    properties.write_text("".join(f"{key}={value}\n" for key, value in options.items()))
    with serve("--properties", str(properties)) as ours:
        ours.wait_ready()
        found = [ours.post({"do": do}) for do in ("", "error", "stream")]
    for one, other in zip(found, wanted, strict=True):
        assert (one.status_code, one.content) == (other.status_code, other.content)
        assert one.headers.get("x-mine") == other.headers.get("x-mine")
        if one.status_code == 200:
            assert one.headers["content-type"] == other.headers["content-type"]
