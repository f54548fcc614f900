"""The OpenAI route and its bearer tokens (SageMaker's guide: realtime-endpoints-openai-compatible)."""

from __future__ import annotations

import base64
import functools
import json
import re
import socket
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from urllib.parse import quote

import httpx
import pytest
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from werkzeug.serving import make_server

from deploy.emulator.access import check_token
from deploy.emulator.endpoint import EndpointComponent, Limits
from deploy.emulator.protocol import ApiError
from deploy.emulator.runtimes import relayed
from tests.deploy.local.servers import Local, Loop
from tests.deploy.local.servers import local as make_local
from tests.servers import PATIENCE, http

PATH = "/endpoints/local/openai/v1/chat/completions"


def presigned(region: str = "us-east-1", expires: int = 3600, action: str = "CallWithBearerToken") -> str:
    request = AWSRequest(
        "POST", "https://sagemaker.amazonaws.com/", {"host": "sagemaker.amazonaws.com"}, params={"Action": action}
    )
    SigV4QueryAuth(Credentials("AKIDEXAMPLE", "secret"), "sagemaker", region, expires=expires).add_auth(request)
    return str(request.url).removeprefix("https://") + "&Version=1"


def token(url: str | None = None) -> str:
    return "sagemaker-api-key-" + base64.b64encode((url or presigned()).encode()).decode()


def post(
    local: Local, body: object = None, path: str = PATH, bearer: str | None = None, **headers: str
) -> httpx.Response:
    authorization = {"Authorization": f"Bearer {bearer or token()}"}
    return http.post(
        local.url + path, json=body or {"messages": []}, headers={**authorization, **headers}, timeout=PATIENCE
    )


def test_a_chat_is_passed_on_as_it_is(local: Local) -> None:
    answer = post(local, {"text": '{"choices": []}', "model": "", "messages": []}, **{"X-Mine": "1"})
    assert (answer.status_code, answer.json()) == (200, {"choices": []})
    assert answer.headers["content-type"] == "application/json"
    assert local.container.paths == ["/v1/chat/completions"]
    [headers] = local.container.headers
    assert json.loads(local.container.bodies[0])["model"] == ""
    assert headers["content-type"] == "application/json"
    assert not {"authorization", "x-mine", "user-agent"} & set(headers)


def test_a_refusal_is_passed_on_too(local: Local) -> None:
    answer = post(local, {"status": 400, "text": '{"error": {"message": "no"}}'})
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "no"}})


def test_events_arrive_one_by_one(local: Local) -> None:
    events = [b'data: {"n": 1}\n\n', b"data: [DONE]\n\n"]
    body = {"do": "stream", "stream": True, "pieces": [event.hex() for event in events],
            "headers": {"Content-Type": "text/event-stream"}}  # fmt: skip
    headers = {"Authorization": f"Bearer {token()}"}
    with http.stream("POST", local.url + PATH, json=body, headers=headers, timeout=PATIENCE) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        pieces = answer.iter_raw()
        assert next(pieces) == events[0]
        local.container.may_go_on.set()
        assert b"".join(pieces) == events[1]


@pytest.fixture
def rehearsed(local: Local) -> Iterator[str]:
    """The URL of a server like the rehearsal's, in front of the emulator."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = make_server("127.0.0.1", 0, functools.partial(relayed, local.url), True, fd=listener.fileno())
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield "http://{}:{}".format(*listener.getsockname())
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("front", "version"), [("emulator", "1.0"), ("emulator", "1.1"), ("rehearsal", "1.0")])
@pytest.mark.parametrize("end", ["cut", "well"])
def test_a_stream_shows_by_its_end_whether_it_is_whole(
    local: Local, rehearsed: str, front: str, version: str, end: str
) -> None:
    """By its last chunk; to HTTP/1.0, which has no chunks, a broken one ends in a reset."""
    local.container.may_go_on.set()
    body = json.dumps({"do": "stream", "pieces": [b"data: 1\n\n".hex()], "end": end, "stream": True}).encode()
    head = f"POST {PATH} HTTP/{version}\r\nHost: localhost\r\nAuthorization: Bearer {token()}\r\n"
    host, _, port = (local.url if front == "emulator" else rehearsed).rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        received, reset = b"", False
        try:
            while data := connection.recv(65536):
                received += data
        except ConnectionResetError:
            reset = True
    assert b"data: 1" in received or reset
    assert (reset if version == "1.0" else not received.endswith(b"0\r\n\r\n")) == (end == "cut")


def test_a_component_is_in_the_path(loop: Loop) -> None:
    with make_local(loop, components={"sql": EndpointComponent("sql-lora")}) as local:
        path = "/endpoints/local/inference-components/sql/openai/v1/chat/completions"
        assert post(local, path=path).status_code == 200
        assert local.container.headers[0]["x-amzn-sagemaker-adapter-identifier"] == "sql-lora"
        refused = post(local)
        assert (refused.status_code, refused.headers["x-amzn-ErrorType"]) == (400, "ValidationError")


def test_limits_are_those_of_whole_and_streamed_answers(loop: Loop) -> None:
    with make_local(loop, limits=Limits(invoke=0.2, stream=2)) as local:
        slow = post(local, {"do": "wait"})
        assert (slow.status_code, slow.json()["OriginalStatusCode"]) == (424, 0)
        stall = {"do": "stream", "stream": True, "pieces": ["41"], "end": "stall"}
        local.container.may_go_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            post(local, stall)
        assert local.container.gone.wait(PATIENCE)


def test_only_chat_completions_is_routed(local: Local) -> None:
    answer = post(local, path="/endpoints/local/openai/v1/completions")
    assert (answer.status_code, answer.headers["x-amzn-ErrorType"]) == (404, "UnknownOperationException")


def test_another_endpoint_is_not_found(local: Local) -> None:
    answer = post(local, path=PATH.replace("local", "other"))
    assert (answer.status_code, answer.json()["Message"]) == (400, "Endpoint other of account 000000000000 not found.")


OLD = presigned().replace(f"X-Amz-Date={datetime.now(timezone.utc):%Y}", "X-Amz-Date=2020")


@pytest.mark.parametrize(
    ("authorization", "code", "part"),
    [
        ("", "MissingAuthenticationToken", "Missing Authentication Token"),
        ("AWS4-HMAC-SHA256 Credential=x", "AccessDeniedException", "Bearer sagemaker-api-key-"),
        ("Bearer abc", "AccessDeniedException", "Bearer sagemaker-api-key-"),
        ("Bearer sagemaker-api-key-%%%", "AccessDeniedException", "not a base64-encoded presigned URL"),
        ("Bearer sagemaker-api-key-YWJj", "AccessDeniedException", "not a base64-encoded presigned URL"),
        (f"Bearer {token(presigned(action='GetCallerIdentity'))}", "AccessDeniedException", "GetCallerIdentity"),
        (f"Bearer {token(presigned(expires=43201))}", "AccessDeniedException", "the maximum is 43200 s"),
        (f"Bearer {token(OLD)}", "ExpiredTokenException", "expired: it was valid for 3600 s from 2020-"),
        (f"Bearer {token(presigned('eu-west-1'))}", "AccessDeniedException", "is in us-east-1"),
        (f"Bearer {token(presigned().replace(quote('/sagemaker/', ''), quote('/bedrock/', '')))}",
         "AccessDeniedException", "service sagemaker"),
    ],
    ids=["none", "sigv4", "other", "no base64", "no URL", "action", "too long", "old", "region", "service"],
)  # fmt: skip
def test_a_token_that_is_not_good_is_refused(loop: Loop, authorization: str, code: str, part: str) -> None:
    with make_local(loop, region="us-east-1") as local:
        headers = {"Authorization": authorization} if authorization else {}
        answer = http.post(local.url + PATH, json={}, headers=headers, timeout=PATIENCE)
        assert (answer.status_code, answer.headers["x-amzn-ErrorType"]) == (403, code)
        assert part in answer.json()["Message"]
        assert local.container.paths == []


def test_a_token_is_good_to_its_last_second() -> None:
    bearer = f"Bearer {token(presigned('eu-west-1', expires=900))}"
    now = datetime.now(timezone.utc)
    assert check_token(bearer, None, now + timedelta(seconds=890)) == "eu-west-1"
    with pytest.raises(ApiError, match="expired: it was valid for 900 s"):
        check_token(bearer, None, now + timedelta(seconds=902))


def test_a_token_whose_end_no_date_can_be(local: Local) -> None:
    url = re.sub(r"X-Amz-Date=\w+", "X-Amz-Date=99991231T235959Z", presigned(expires=43200))
    answer = post(local, bearer=token(url))
    assert (answer.status_code, answer.headers["x-amzn-ErrorType"]) == (403, "AccessDeniedException")


def test_a_body_that_is_not_compressed_as_it_says(local: Local) -> None:
    answer = post(local, **{"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.headers["x-amzn-ErrorType"]) == (400, "ValidationError")
