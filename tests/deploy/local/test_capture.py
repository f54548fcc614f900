"""Data capture, as the emulator plays it: sampled, in SageMaker's directories and lines, also of a shadow variant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.emulator.endpoint import Captures, DataCapture, ShadowVariant
from proof.replay.exchange import Request
from proof.replay.sources import open_requests
from tests.deploy.local.servers import Local, Loop
from tests.servers import PATIENCE, wait_for

JSON = "application/json"
CONFIG: dict[str, Any] = {
    "EnableCapture": True,
    "InitialSamplingPercentage": 100,
    "DestinationS3Uri": "s3://captured/llama/",
    "CaptureOptions": [{"CaptureMode": "InputAndOutput"}],
    "CaptureContentTypeHeader": {"JsonContentTypes": [JSON], "CsvContentTypes": ["text/csv"]},
}


def written(loop: Loop, config: dict[str, Any], *asked: tuple[str, bytes, str, bytes | None]) -> dict[str, bytes]:
    """The objects that are written of requests: content type and body of each, and of its answer."""
    objects: dict[str, bytes] = {}
    capture = DataCapture.of(config, objects.__setitem__, None)

    async def ask() -> None:
        captures = Captures("chat")
        for content_type, body, of_answer, answer in asked:
            event = captures.begin(capture, {"Content-Type": content_type}, body)
            captures.end(event, "AllTraffic", None if answer is None else (of_answer, answer))
        await captures.close()

    loop.run(ask())
    return objects


def requests_of(objects: dict[str, bytes], directory: Path) -> list[Request]:
    for uri, content in objects.items():
        path = directory / uri.removeprefix("s3://")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    found = list(open_requests(str(directory)))
    assert [one for one in found if not isinstance(one, Request)] == []
    return [one for one in found if isinstance(one, Request)]


def test_bodies_are_text_where_their_types_are_named(loop: Loop, tmp_path: Path) -> None:
    cases = (
        (JSON + "; charset=utf-8", '{"a": "é\u2028"}'.encode(), "text/csv", b"1,2\n"),
        (JSON, b"\xff", "text/event-stream", b"data: 1\n\n"),
    )
    objects = written(loop, CONFIG, *cases)
    [(uri, content)] = objects.items()
    assert uri.startswith("s3://captured/llama/chat/AllTraffic/20")
    assert uri.endswith(".jsonl")
    lines = [json.loads(line)["captureData"] for line in content.splitlines()]
    assert [[part["encoding"] for part in data.values()] for data in lines] == [["JSON", "CSV"], ["BASE64", "BASE64"]]
    requests = requests_of(objects, tmp_path)
    responses = [(one.response or (0, "", b""))[1:] for one in requests]
    assert [(one.headers["content-type"], one.body) for one in requests] == [case[:2] for case in cases]
    assert responses == [case[2:] for case in cases]


def test_inputs_or_outputs_alone_and_failures(loop: Loop) -> None:
    asked = ((JSON, b"{}", JSON, b"[]"), (JSON, b"{}", JSON, None))

    def parts(*modes: str) -> list[list[str]]:
        config = {**CONFIG, "CaptureOptions": [{"CaptureMode": mode} for mode in modes]}
        [content] = written(loop, config, *asked).values()
        return [list(json.loads(line)["captureData"]) for line in content.splitlines()]

    assert parts("Input") == [["endpointInput"], ["endpointInput"]]
    assert parts("Output") == [["endpointOutput"]]
    assert (
        parts("Input", "Output") == parts("InputAndOutput") == [["endpointInput", "endpointOutput"], ["endpointInput"]]
    )


def test_a_share_is_captured(loop: Loop) -> None:
    asked = [(JSON, b"{}", JSON, b"[]")] * 1_000
    [content] = written(loop, {**CONFIG, "InitialSamplingPercentage": 20}, *asked).values()
    assert 120 < len(content.splitlines()) < 290
    assert written(loop, {**CONFIG, "InitialSamplingPercentage": 0}, *asked) == {}


def test_a_destination_that_fails_changes_no_answer(loop: Loop) -> None:
    def fails(uri: str, content: bytes) -> None:
        raise PermissionError("denied")

    async def ask() -> None:
        captures = Captures("chat")
        captures.end(captures.begin(DataCapture.of(CONFIG, fails, None), {}, b"{}"), "AllTraffic", (JSON, b"[]"))
        await captures.close()

    loop.run(ask())


def test_invocations_and_streams_are_captured_and_the_shadow_gets_a_copy(local: Local, tmp_path: Path) -> None:
    objects: dict[str, bytes] = {}
    local.endpoint.capture = DataCapture.of(CONFIG, objects.__setitem__, ShadowVariant("Shadow", 1.0))
    local.container.may_go_on.set()
    whole, stream = b'{"do": "echo", "text": "[1]"}', b'{"do": "stream", "pieces": ["e2", "9883"]}'
    local.invoke(json.loads(whole))
    pieces = [part["PayloadPart"]["Bytes"] for part in local.stream(json.loads(stream))["Body"]]
    assert b"".join(pieces) == "☃".encode()
    wait_for(lambda: sum(content.count(b"\n") for content in objects.values()) == 4, PATIENCE, "not captured")
    requests = requests_of(objects, tmp_path)
    assert {json.loads(one.body)["do"] for one in requests} == {"echo", "stream"}
    assert {one.response and one.response.body for one in requests} == {b"[1]", "☃".encode()}
    assert all(one.response == one.other for one in requests)
