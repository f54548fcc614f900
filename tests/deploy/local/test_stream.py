"""InvokeEndpointWithResponseStream by stock boto3: event-stream parts and errors as botocore's API model has them."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from botocore.exceptions import ClientError, EventStreamError
from urllib3.exceptions import ReadTimeoutError

from deploy.emulator import relay
from deploy.emulator.endpoint import Limits
from tests.deploy.local.servers import Local, Loop, client
from tests.deploy.local.servers import local as make_local
from tests.servers import PATIENCE

LINES = [json.dumps({"token": {"text": text}}, ensure_ascii=False).encode() + b"\n" for text in ("Hé", "日本", "🙂")]


def script(*pieces: bytes, **more: Any) -> dict[str, Any]:
    return {"do": "stream", "pieces": [piece.hex() for piece in pieces], **more}


def test_each_piece_arrives_before_the_next_is_made(local: Local) -> None:
    answer = local.stream(script(*LINES))
    assert answer["ContentType"] == "application/jsonlines"
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    parts = iter(answer["Body"])
    assert next(parts)["PayloadPart"]["Bytes"] == LINES[0]
    assert local.container.active.wait(PATIENCE), "the container has not stopped after its first piece"
    local.container.may_go_on.set()  # only now does it make the rest
    assert b"".join(part["PayloadPart"]["Bytes"] for part in parts) == b"".join(LINES[1:])


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_parts_are_cut_as_asked(loop: Loop, size: int) -> None:
    whole = b"".join(LINES)
    with make_local(loop, part_bytes=size) as local:
        local.container.may_go_on.set()
        parts = [part["PayloadPart"]["Bytes"] for part in local.stream(script(whole))["Body"]]
    assert parts == [whole[i : i + size] for i in range(0, len(whole), size)]


def test_any_bytes_and_an_empty_answer_pass(local: Local) -> None:
    local.container.may_go_on.set()
    data = bytes(range(256)) * 4000
    got = b"".join(part["PayloadPart"]["Bytes"] for part in local.stream(script(data, b"\x00"))["Body"])
    assert got == data + b"\x00"
    assert list(local.stream(script())["Body"]) == []


def test_accept_and_type_reach_the_container_as_usual_headers(local: Local) -> None:
    local.container.may_go_on.set()
    asked = script(b"x", headers={"X-Amzn-SageMaker-Custom-Attributes": "a=b"})
    answer = local.stream(asked, Accept="text/event-stream", ContentType="application/json", InferenceId="i",
                          SessionId="s1")  # fmt: skip
    assert answer["CustomAttributes"] == "a=b"
    list(answer["Body"])
    [headers] = local.container.headers
    assert headers["accept"] == "text/event-stream"
    assert headers["content-type"] == "application/json"
    assert headers["x-amzn-sagemaker-inference-id"] == "i"
    assert headers["x-amzn-sagemaker-session-id"] == "s1"
    assert "x-amzn-sagemaker-accept" not in headers


def test_a_session_cannot_be_opened_here(local: Local) -> None:
    with pytest.raises(ClientError, match="SessionId cannot be NEW_SESSION") as raised:
        local.stream({}, SessionId="NEW_SESSION")
    assert raised.value.response["Error"]["Code"] == "ValidationError"


def test_a_failure_before_the_first_byte_is_a_model_error(local: Local) -> None:
    with pytest.raises(local.runtime.exceptions.ModelError) as raised:
        local.stream({"status": 422, "text": '{"error": "too long"}'})
    response = raised.value.response
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert (response["OriginalStatusCode"], response["OriginalMessage"]) == (422, '{"error": "too long"}')
    assert response["LogStreamArn"].endswith("AllTraffic/local")


def test_a_failure_in_the_body_passes_as_it_is(local: Local) -> None:
    local.container.may_go_on.set()
    last = b'{"details": {"finish_reason": "error"}}\n'
    got = [part["PayloadPart"]["Bytes"] for part in local.stream(script(LINES[0], last))["Body"]]
    assert b"".join(got) == LINES[0] + last


def in_stream_error(body: Any) -> tuple[bytes, dict[str, str]]:
    """What came before it, and the error."""
    got: list[bytes] = []
    with contextlib.closing(body), pytest.raises(EventStreamError) as raised:
        got.extend(part["PayloadPart"]["Bytes"] for part in body)
    return b"".join(got), raised.value.response["Error"]


def test_a_cut_connection_is_a_model_stream_error(local: Local) -> None:
    local.container.may_go_on.set()
    got, error = in_stream_error(local.stream(script(LINES[0], end="cut"))["Body"])
    assert got == LINES[0]
    assert error == {"Code": "ModelStreamError", "Message": relay.BROKEN}


def test_a_stall_beyond_the_limit_is_a_model_stream_error(loop: Loop) -> None:
    with make_local(loop, limits=Limits(stream=1.5)) as local:
        local.container.may_go_on.set()
        got, error = in_stream_error(local.stream(script(LINES[0], end="stall"))["Body"])
        assert got == LINES[0]
        assert error == {"Code": "ModelStreamError", "Message": relay.STALLED}
        assert local.container.gone.wait(PATIENCE), "the container goes on for nobody"


def test_the_codes_are_in_the_frames_though_boto3_drops_them(loop: Loop) -> None:
    """Only Code and Message survive in boto3."""
    seen: list[bytes] = []
    with make_local(loop, limits=Limits(stream=1.5)) as local:
        local.container.may_go_on.set()
        for end in ("cut", "stall"):
            with contextlib.closing(local.stream(script(LINES[0], end=end))["Body"]) as body:
                seen.append(b"".join(body._raw_stream.stream()))
    assert b'"ErrorCode": "StreamBroken"' in seen[0]
    assert b'"ErrorCode": "ModelInvocationTimeExceeded"' in seen[1]


def test_what_the_emulator_itself_breaks_is_an_internal_failure(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes) -> bytes:
        raise RuntimeError("boom")

    monkeypatch.setattr(relay, "payload_part", broken)
    got, error = in_stream_error(local.stream(script(*LINES))["Body"])
    assert (got, error["Code"]) == (b"", "InternalStreamFailure")


@pytest.mark.parametrize("do", ["wait", "hang up"])
def test_no_head_in_time_is_status_0(loop: Loop, do: str) -> None:
    with make_local(loop, limits=Limits(stream=0.3)) as local:
        with pytest.raises(local.runtime.exceptions.ModelError) as raised:
            local.stream({"do": do})
        assert raised.value.response["OriginalStatusCode"] == 0


def test_a_stalled_stream_is_the_client_s_own_timeout_before_sagemaker_s(local: Local) -> None:
    """boto3 raises urllib3's own error there, not one of botocore's."""
    local.container.may_go_on.set()
    asked = json.dumps(script(LINES[0], end="stall"))
    with contextlib.closing(client(local.url, read_timeout=1.5)) as impatient:
        body = impatient.invoke_endpoint_with_response_stream(EndpointName="local", Body=asked)["Body"]
        with contextlib.closing(body):
            parts = iter(body)
            assert next(parts)["PayloadPart"]["Bytes"] == LINES[0]
            with pytest.raises(ReadTimeoutError):
                next(parts)


def test_a_client_that_closes_the_stream_ends_the_container_s_work(local: Local) -> None:
    body = local.stream(script(*LINES))["Body"]
    assert next(iter(body))["PayloadPart"]["Bytes"] == LINES[0]
    body.close()
    assert local.container.gone.wait(PATIENCE), "the container goes on for nobody"


def test_streams_go_side_by_side(local: Local) -> None:
    """None waits for another to end."""
    bodies = [local.stream(script(bytes([65 + i]), b"!"))["Body"] for i in range(8)]
    streams = [iter(body) for body in bodies]
    assert [next(parts)["PayloadPart"]["Bytes"] for parts in streams] == [bytes([65 + i]) for i in range(8)]
    local.container.may_go_on.set()
    for parts in streams:
        assert b"".join(part["PayloadPart"]["Bytes"] for part in parts) == b"!"


def test_an_error_without_end_is_not_kept(local: Local) -> None:
    """What is shown of it has come long before the container stops."""
    local.container.may_go_on.set()
    with pytest.raises(ClientError, match=r"server error \(500\)"):
        local.stream(script(b"e" * 70_000, end="stall", status=500))
    with pytest.raises(ClientError, match=r"server error \(500\)"):
        local.invoke(script(b"e" * 70_000, end="stall", status=500))
