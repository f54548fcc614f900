"""InvokeEndpoint, whole and streamed, by stock boto3: limits, headers and errors as botocore's model has them."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore import UNSIGNED
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError, EventStreamError
from urllib3.exceptions import ReadTimeoutError

from deploy.emulator import relay
from deploy.emulator.endpoint import EndpointComponent, Limits, Status
from tests.deploy.local.servers import ACCOUNT, Container, Local, Loop, client
from tests.deploy.local.servers import local as make_local
from tests.servers import PATIENCE

# -- InvokeEndpoint by stock boto3: limits, headers and errors, after SageMaker's guide and botocore's model -----------


PATH = "/endpoints/local/invocations"
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261120/eu-west-1/sagemaker/aws4_request, "
    "SignedHeaders=host;x-amz-date, Signature=" + 64 * "0"
}


def error(raised: pytest.ExceptionInfo[ClientError]) -> tuple[int, str, str]:
    response = raised.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"], response["Error"]["Message"]


def post(local: Local, headers: dict[str, str], path: str = PATH, body: bytes = b"{}") -> tuple[int, dict[str, str]]:
    """Without boto3: status, and the error's name and message."""
    connection = http.client.HTTPConnection(urlsplit(local.url).netloc, timeout=PATIENCE)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    code = answer.headers.get("x-amzn-ErrorType")
    return answer.status, {"code": code, **json.loads(found)} if code else {}


def test_body_type_and_variant_come_back(local: Local) -> None:
    answer = local.invoke({"text": '{"a": "é"}', "headers": {"Content-Type": "application/json; charset=utf-8"}})
    assert answer["Body"].read().decode() == '{"a": "é"}'
    assert answer["ContentType"] == "application/json; charset=utf-8"
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    assert "CustomAttributes" not in answer
    assert "NewSessionId" not in answer
    assert local.container.paths == ["/invocations"]


def test_the_api_s_headers_reach_the_container_and_no_others(local: Local) -> None:
    body = json.dumps({"do": "echo", "raw": "\u00e9"}).encode()
    local.invoke(body, ContentType="application/json", Accept="application/jsonlines", CustomAttributes="trace=1",
                 InferenceId="i-1", TargetVariant="AllTraffic", SessionId="abc", PrefixAwareId="p")  # fmt: skip
    [headers] = local.container.headers
    assert local.container.bodies == [body]
    assert headers == {
        "host": urlsplit(local.container.url).netloc,
        "content-length": str(len(body)),
        "connection": "close",
        "content-type": "application/json",
        "accept": "application/jsonlines",
        "x-amzn-sagemaker-custom-attributes": "trace=1",
        "x-amzn-sagemaker-inference-id": "i-1",
        "x-amzn-sagemaker-target-variant": "AllTraffic",
        "x-amzn-sagemaker-session-id": "abc",
        "x-amzn-sagemaker-prefix-aware-id": "p",
    }


def test_other_headers_are_stripped_both_ways(local: Local) -> None:
    dropped = {"X-Request-Id": "7", "Set-Cookie": "a=b", "x-lmi-ignored-parameters": "x"}
    body = json.dumps({"headers": {**dropped, "Content-Type": "text/plain"}}).encode()
    status, _ = post(local, {**SIGNED, "X-Mine": "1", "Cookie": "a=b", "X-Amzn-Trace-Id": "t"}, body=body)
    assert status == 200
    [headers] = local.container.headers
    assert set(headers) == {"host", "content-length", "connection"}
    answer = local.invoke(body)
    returned = {name.lower() for name in answer["ResponseMetadata"]["HTTPHeaders"]}
    assert not returned & {name.lower() for name in dropped}


def test_custom_attributes_come_back_if_the_container_sets_them(local: Local) -> None:
    set_ = {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/x; took=3"}
    assert local.invoke({"headers": set_}, CustomAttributes="mine")["CustomAttributes"] == "route=/v1/x; took=3"


def test_sessions_are_opened_used_and_closed(local: Local) -> None:
    new = "X-Amzn-SageMaker-New-Session-Id"
    opened = local.invoke({"requestType": "NEW_SESSION", "headers": {new: "abc; Expires=2026-11-20T20:00:00Z"}},
                          SessionId="NEW_SESSION")  # fmt: skip
    assert opened["NewSessionId"] == "abc; Expires=2026-11-20T20:00:00Z"
    local.invoke({}, SessionId="abc")
    closed = local.invoke({"requestType": "CLOSE", "headers": {"X-Amzn-SageMaker-Closed-Session-Id": "abc"}},
                          SessionId="abc")  # fmt: skip
    assert closed["ClosedSessionId"] == "abc"
    name = "x-amzn-sagemaker-session-id"
    assert [headers[name] for headers in local.container.headers] == ["NEW_SESSION", "abc", "abc"]


def test_an_unknown_session_is_the_container_s_400(local: Local) -> None:
    with pytest.raises(ClientError) as raised:
        local.invoke({"status": 400, "text": "session expired"}, SessionId="old")
    assert raised.value.response["OriginalStatusCode"] == 400


@pytest.mark.parametrize(
    ("headers", "part"),
    [
        ({"TargetModel": "m.tar.gz"}, "TargetModel is for multi-model endpoints"),
        ({"TargetContainerHostname": "c"}, "TargetContainerHostname is for multi-container endpoints"),
        ({"EnableExplanations": "`true`"}, "EnableExplanations is for endpoints with an explainer"),
        ({"TargetVariant": "Other"}, "Variant Other of endpoint local not found"),
        ({"InferenceComponentName": "ic"}, "Inference Component Name header is not allowed"),
        ({"SessionId": "a_b"}, "Header X-Amzn-SageMaker-Session-Id must match"),
        ({"CustomAttributes": 1025 * "a"}, "Header X-Amzn-SageMaker-Custom-Attributes must match"),
        ({"EndpointName": "other"}, f"Endpoint other of account {ACCOUNT} not found."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_endpoint_has_not_is_a_validation_error(local: Local, headers: dict[str, str], part: str) -> None:
    with pytest.raises(ClientError) as raised:
        local.invoke({}, **headers)
    status, code, message = error(raised)
    assert (status, code) == (400, "ValidationError")
    assert part in message
    assert local.container.paths == []


@pytest.mark.parametrize(
    ("status", "code", "side"),
    [
        (400, "CLIENT_ERROR_FROM_MODEL", "client"),
        (424, "CLIENT_ERROR_FROM_MODEL", "client"),
        (500, "SERVER_ERROR_FROM_MODEL", "server"),
        (503, "SERVER_ERROR_FROM_MODEL", "server"),
        (507, "SERVER_ERROR_FROM_MODEL", "server"),
        (302, "CLIENT_ERROR_FROM_MODEL", "client"),
    ],
)
def test_a_failed_answer_is_a_model_error(local: Local, status: int, code: str, side: str) -> None:
    with pytest.raises(local.runtime.exceptions.ModelError) as raised:
        local.invoke({"status": status, "text": '{"error": "no é"}'})
    response = raised.value.response
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert response["OriginalStatusCode"] == status
    assert response["OriginalMessage"] == '{"error": "no é"}'
    assert response["LogStreamArn"] == (
        f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/sagemaker/Endpoints/local:log-stream:AllTraffic/local"
    )
    assert response["Error"]["Message"].startswith(f'Received {side} error ({status}) from primary with message "{{')
    _, plain = post(local, SIGNED, body=json.dumps({"status": status}).encode())
    assert plain["ErrorCode"] == code


def test_a_long_message_is_cut(local: Local) -> None:
    with pytest.raises(local.runtime.exceptions.ModelError) as raised:
        local.invoke({"status": 500, "text": 5000 * "x"})
    assert raised.value.response["OriginalMessage"] == 2048 * "x"


TIMED_OUT = "Your invocation timed out while waiting for a response from container primary"


def test_a_slow_container_is_status_0_and_is_left_alone(loop: Loop) -> None:
    with make_local(loop, limits=Limits(invoke=1)) as local:
        with pytest.raises(local.runtime.exceptions.ModelError) as raised:
            local.invoke({"do": "wait"})
        response = raised.value.response
        assert (response["OriginalStatusCode"], response["OriginalMessage"]) == (0, TIMED_OUT)
        assert local.container.gone.wait(PATIENCE), "the container still works on an answer that nobody waits for"


def test_a_dead_socket_is_status_0(local: Local) -> None:
    with pytest.raises(local.runtime.exceptions.ModelError) as raised:
        local.invoke({"do": "hang up"})
    assert (raised.value.response["OriginalStatusCode"], raised.value.response["OriginalMessage"]) == (0, TIMED_OUT)


def test_no_container_is_status_0(loop: Loop) -> None:
    container = Container()
    with loop.serving(container.app()) as free:
        pass
    with make_local(loop, at=free) as local, pytest.raises(local.runtime.exceptions.ModelError) as raised:
        local.invoke({})
    assert raised.value.response["OriginalStatusCode"] == 0


def test_a_client_that_goes_away_ends_the_container_s_work(local: Local) -> None:
    connection = http.client.HTTPConnection(urlsplit(local.url).netloc, timeout=PATIENCE)
    connection.request("POST", PATH, b'{"do": "wait"}', SIGNED)
    assert local.container.active.wait(PATIENCE)
    connection.close()
    assert local.container.gone.wait(PATIENCE), "the container goes on for nobody"


# -- who may call ------------------------------------------------------------------------------------------------


def test_an_unsigned_request_has_no_token(local: Local) -> None:
    unsigned = boto3.client("sagemaker-runtime", region_name="us-east-1", endpoint_url=local.url,
                            config=Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1}))  # fmt: skip
    with pytest.raises(ClientError) as raised:
        unsigned.invoke_endpoint(EndpointName="local", Body=b"{}")
    assert error(raised) == (403, "MissingAuthenticationToken", "Missing Authentication Token")


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        ("Bearer sagemaker-api-key-abc", "IncompleteSignature"),
        ("AWS4-HMAC-SHA256 Credential=a/20261120/us-east-1/sagemaker/aws4_request", "IncompleteSignature"),
        (SIGNED["Authorization"].replace("sagemaker", "s3"), "InvalidSignatureException"),
    ],
)
def test_another_signature_is_refused(local: Local, authorization: str, code: str) -> None:
    status, found = post(local, {"Authorization": authorization})
    assert (status, found["code"]) == (403, code)


def test_a_presigned_url_needs_no_header(local: Local) -> None:
    """As browsers and proxies send it: the signature is in the query."""
    request = AWSRequest("POST", f"{local.url}{PATH}", data=b"{}")
    SigV4QueryAuth(Credentials("AKID", "secret"), "sagemaker", "us-east-1", expires=60).add_auth(request)
    assert post(local, {"Content-Type": "application/json"}, request.url.removeprefix(local.url))[0] == 200


def test_a_region_that_is_set_is_held_to(loop: Loop) -> None:
    with make_local(loop, region="eu-west-1") as local:
        assert post(local, SIGNED)[0] == 200
        with pytest.raises(ClientError) as raised:
            local.invoke({})
        assert error(raised)[:2] == (403, "InvalidSignatureException")
        assert "us-east-1; this endpoint is in eu-west-1" in error(raised)[2]


def test_the_log_s_region_is_that_of_the_signature(local: Local) -> None:
    _, found = post(local, SIGNED, body=b'{"status": 500}')
    assert found["LogStreamArn"].startswith("arn:aws:logs:eu-west-1:")


def test_another_path_is_no_operation(local: Local) -> None:
    assert post(local, SIGNED, "/endpoints/local/other")[0] == 404
    assert post(local, SIGNED, "/endpoints/local/other")[1]["code"] == "UnknownOperationException"


def test_the_control_plane_is_elsewhere(local: Local) -> None:
    status, found = post(local, {**SIGNED, "X-Amz-Target": "SageMaker.CreateTransformJob"}, "/")
    assert (status, found["code"]) == (404, "UnknownOperationException")
    assert found["Message"].startswith("No operation CreateTransformJob here. lmi deploy local --aws")


# -- the body's size ---------------------------------------------------------------------------------------------


def test_beyond_6_mb_the_log_warns_and_beyond_25_it_is_refused(local: Local, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "deploy.emulator"):
        assert local.invoke(6 * 2**20 * b"x")["Body"].read() == b"ok"
        assert caplog.messages == []
        assert local.invoke((6 * 2**20 + 1) * b"x")["Body"].read() == b"ok"
    assert "6291457 bytes" in caplog.messages[0]
    assert local.invoke(25 * 2**20 * b"x")["Body"].read() == b"ok"
    with pytest.raises(ClientError) as raised:
        local.invoke((25 * 2**20 + 1) * b"x")
    assert error(raised) == (413, "ValidationError", "Request body is larger than 26214400 bytes (25 MB).")
    assert len(local.container.bodies) == 3


# -- the endpoint's state ----------------------------------------------------------------------------------------


def test_an_endpoint_that_is_not_in_service_is_not_found(local: Local) -> None:
    local.endpoint.status = Status.CREATING
    with pytest.raises(ClientError) as raised:
        local.invoke({})
    expected = f"Endpoint local of account {ACCOUNT} not found (its status is Creating)."
    assert error(raised) == (400, "ValidationError", expected)
    local.endpoint.status = Status.IN_SERVICE
    assert local.invoke({})["Body"].read() == b"ok"


def test_an_unhealthy_one_is_unavailable(local: Local) -> None:
    local.endpoint.status = Status.UNHEALTHY
    with pytest.raises(ClientError) as raised:
        local.invoke({})
    assert error(raised)[:2] == (503, "ServiceUnavailable")


COMPONENTS = {"base": EndpointComponent(), "sql": EndpointComponent("sql-lora"), "idle": EndpointComponent(copies=0)}


def test_components_are_routed_and_adapters_named(loop: Loop) -> None:
    with make_local(loop, components=COMPONENTS) as local:
        local.invoke({}, InferenceComponentName="base")
        local.invoke({}, InferenceComponentName="sql")
        base, sql = local.container.headers
        assert "x-amzn-sagemaker-adapter-identifier" not in base
        assert sql["x-amzn-sagemaker-adapter-identifier"] == "sql-lora"
        assert "x-amzn-sagemaker-inference-component" not in sql, "it is SageMaker's own"


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ({}, "Inference Component Name header is required"),
        ({"InferenceComponentName": "other"}, "Inference Component other of endpoint local not found."),
        ({"InferenceComponentName": "idle"}, "Inference Component has no capacity"),
    ],
)
def test_a_component_that_cannot_answer_is_a_validation_error(loop: Loop, named: dict[str, str], part: str) -> None:
    with make_local(loop, components=COMPONENTS) as local, pytest.raises(ClientError) as raised:
        local.invoke({}, **named)
    assert error(raised)[:2] == (400, "ValidationError")
    assert part in error(raised)[2]


def test_an_answer_without_end_is_given_up(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MOST", 1000)
    assert local.invoke({"text": 1000 * "x"})["Body"].read() == 1000 * b"x"
    with pytest.raises(ClientError, match="larger than"):
        local.invoke({"text": 1001 * "x"})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:8081"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:8081"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
    ],
)
def test_pages_and_foreign_hosts_are_refused_as_by_the_server_behind(
    local: Local, headers: dict[str, str], status: int
) -> None:
    found, told = post(local, {**SIGNED, **headers})
    assert (found, told.get("code")) == (status, None if status == 200 else "AccessDeniedException")
    assert local.container.paths == ["/invocations"] * (status == 200)


def test_every_answer_names_its_request(local: Local) -> None:
    answers = [local.invoke({"text": "a"})["ResponseMetadata"] for _ in range(2)]
    with pytest.raises(ClientError) as raised:
        local.invoke({"status": 400})
    answers.append(raised.value.response["ResponseMetadata"])
    assert len({answer["RequestId"] for answer in answers}) == 3


# -- stream ------------------------------------------------------------------------------------------------------------
# InvokeEndpointWithResponseStream by stock boto3: event-stream parts and errors as botocore's API model has them.


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
