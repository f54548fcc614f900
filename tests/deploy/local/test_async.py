"""Requests and answers by way of S3: InvokeEndpointAsync and batch transform by stock boto3, and data capture."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from deploy.emulator import asynchronous
from deploy.emulator.endpoint import Capture, Captures, Limits, Shadow
from deploy.emulator.store import Store
from proof.replay.exchange import Request
from proof.replay.sources import open_requests
from tests.deploy.local.servers import Local, Loop
from tests.deploy.local.servers import local as make_local
from tests.servers import PATIENCE, wait_for

# -- InvokeEndpointAsync by stock boto3, with a directory as S3; limits from botocore's API model ----------------------


@pytest.fixture
def s3(local: Local) -> Iterator[Any]:
    config = Config(retries={"total_max_attempts": 1})
    with contextlib.closing(
        boto3.client("s3", region_name="us-east-1", endpoint_url=local.url, aws_access_key_id="x",
                     aws_secret_access_key="x", config=config)
    ) as client:  # fmt: skip
        yield client


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "s3"


def invoke(local: Local, **more: Any) -> Any:
    return local.runtime.invoke_endpoint_async(EndpointName="local", **more)


def at(root: Path, uri: str) -> bytes:
    """The object, once it is there."""
    path = root / uri.removeprefix("s3://")
    wait_for(path.exists, PATIENCE, f"nothing at {uri}")
    return path.read_bytes()


def test_an_object_is_answered_with_an_object(local: Local, s3: Any) -> None:
    asked = json.dumps({"text": "done", "do": "echo"}).encode()
    s3.put_object(Bucket="mine", Key="in/a b.json", Body=asked)
    accepted = invoke(local, InputLocation="s3://mine/in/a b.json", ContentType="application/json", InferenceId="i-1",
                      Accept="text/plain", CustomAttributes="a=b")  # fmt: skip
    assert accepted["ResponseMetadata"]["HTTPStatusCode"] == 202
    assert accepted["InferenceId"] == "i-1"
    output = accepted["OutputLocation"]
    assert output.startswith("s3://sagemaker-local/async-out/")
    assert accepted["FailureLocation"].startswith("s3://sagemaker-local/async-failures/")
    bucket, _, key = output.removeprefix("s3://").partition("/")

    s3.get_waiter("object_exists").wait(Bucket=bucket, Key=key, WaiterConfig={"Delay": 0, "MaxAttempts": 2000})
    assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == b"done"
    assert local.container.bodies == [asked]
    [headers] = local.container.headers
    assert (headers["content-type"], headers["accept"]) == ("application/json", "text/plain")
    assert headers["x-amzn-sagemaker-inference-id"] == "i-1"
    assert headers["x-amzn-sagemaker-custom-attributes"] == "a=b"


def test_a_body_may_be_inline_up_to_128_000_bytes(local: Local, root: Path) -> None:
    accepted = invoke(local, Body=128_000 * b"x", S3OutputPathExtension="team/a", Filename="one.out")
    assert accepted["OutputLocation"] == "s3://sagemaker-local/async-out/team/a/one.out"
    assert at(root, accepted["OutputLocation"]) == b"ok"
    assert accepted["InferenceId"]
    with pytest.raises(ClientError, match="Body of 128001 bytes: at most 128000"):
        invoke(local, Body=128_001 * b"x")


def test_it_answers_before_the_container_does(local: Local, root: Path) -> None:
    accepted = invoke(local, Body=b'{"do": "wait"}')
    assert local.container.active.wait(PATIENCE)
    path = root / accepted["OutputLocation"].removeprefix("s3://")
    assert not path.exists()
    local.container.may_go_on.set()
    assert at(root, accepted["OutputLocation"]) == b"late"


def test_failures_are_written_where_they_belong(loop: Loop, tmp_path: Path) -> None:
    """The container's 5xx, one that takes too long, an input that is not there."""
    root = tmp_path / "s3"
    with make_local(loop, Store(root), limits=Limits(asynchronous=2)) as local:
        failed = invoke(local, Body=b'{"status": 500, "text": "out of memory"}')
        slow = invoke(local, Body=b'{"do": "wait"}')
        missing = invoke(local, InputLocation="s3://mine/nothing")
        assert b"Received server error (500)" in at(root, failed["FailureLocation"])
        assert b"out of memory" in at(root, failed["FailureLocation"])
        assert b"s3://mine/nothing: No such file" in at(root, missing["FailureLocation"])
        assert b"timed out while waiting" in at(root, slow["FailureLocation"])
        assert local.container.gone.wait(PATIENCE)
        assert not (root / failed["OutputLocation"].removeprefix("s3://")).exists()


def test_only_so_many_are_in_the_container_at_once(local: Local, root: Path) -> None:
    accepted = [invoke(local, Body=b'{"do": "wait"}') for _ in range(asynchronous.CONCURRENT + 2)]
    wait_for(lambda: len(local.container.paths) == asynchronous.CONCURRENT, 10, "they are not taken up")
    local.container.may_go_on.set()
    assert {at(root, one["OutputLocation"]) for one in accepted} == {b"late"}


def test_one_that_waits_beyond_its_time_expires(local: Local, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(asynchronous.CONCURRENT):
        invoke(local, Body=b'{"do": "wait"}')
    wait_for(lambda: len(local.container.paths) == asynchronous.CONCURRENT, 10, "they are not taken up")
    late = invoke(local, Body=b"{}", RequestTTLSeconds=60)
    in_time = invoke(local, Body=b"{}", RequestTTLSeconds=600)
    monkeypatch.setattr(asynchronous, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
    local.container.may_go_on.set()
    assert at(root, late["FailureLocation"]) == b"The request waited for more than 60 s and has expired."
    assert at(root, in_time["OutputLocation"]) == b"ok"


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({}, "Exactly one of InputLocation and Body"),
        ({"Body": b"x", "InputLocation": "s3://a-bucket/b"}, "Exactly one of InputLocation and Body"),
        ({"InputLocation": "https://a-bucket/b"}, "must be s3://bucket/key"),
        ({"InputLocation": "s3://a-bucket/../../etc/passwd"}, "leads out of the bucket"),
        ({"InputLocation": "s3://a-bucket/"}, "names no object"),
        ({"Body": b"x", "InvocationTimeoutSeconds": 3601}, "a number from 1 to 3600"),
        ({"Body": b"x", "RequestTTLSeconds": 21601}, "a number from 60 to 21600"),
        ({"Body": b"x", "Filename": "a/b"}, "Filename 'a/b' must match"),
        ({"Body": b"x", "S3OutputPathExtension": "../../../a"}, "leads out of the bucket"),
    ],
)
def test_what_the_api_does_not_allow(local: Local, given: dict[str, Any], part: str) -> None:
    with pytest.raises(ClientError) as raised:
        invoke(local, **given)
    assert raised.value.response["Error"]["Code"] == "ValidationError"
    assert part in raised.value.response["Error"]["Message"]
    assert local.container.paths == []


def test_without_a_store_it_is_no_asynchronous_endpoint(loop: Loop) -> None:
    with make_local(loop) as local, pytest.raises(ClientError, match="no AsyncInferenceConfig"):
        invoke(local, Body=b"x")


def test_an_object_that_is_not_there(s3: Any) -> None:
    with pytest.raises(ClientError) as raised:
        s3.get_object(Bucket="mine", Key="none")
    assert raised.value.response["Error"]["Code"] == "NoSuchKey"
    with pytest.raises(ClientError) as raised:
        s3.put_object(Bucket="mine", Key="../../x", Body=b"")
    assert raised.value.response["Error"]["Code"] == "InvalidArgument"


def test_names_that_begin_alike_are_written_apart(tmp_path: Path) -> None:
    """At once, and of any length that a file's name may have."""
    store = Store(tmp_path)
    names = [f"{200 * 'n'}{index}" for index in range(40)] + [80 * "日"]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.write(f"s3://bucket/{name}", name.encode() * 1000), names))
        list(pool.map(lambda _: store.write("s3://bucket/same", 1000 * b"x"), range(40)))
    for name in names:
        assert store.read(f"s3://bucket/{name}") == name.encode() * 1000
    assert len(list((tmp_path / "bucket").iterdir())) == len(names) + 1


def test_an_object_that_no_directory_can_hold_is_refused(s3: Any, root: Path) -> None:
    s3.put_object(Bucket="mine", Key="a", Body=b"x")
    for key in ("a/b", 300 * "n"):
        with pytest.raises(ClientError, match="a directory cannot hold it"):
            s3.put_object(Bucket="mine", Key=key, Body=b"x")
    assert [path.name for path in (root / "mine").iterdir()] == ["a"]


def test_an_answer_that_cannot_be_written_is_a_failure(local: Local, root: Path) -> None:
    (root / asynchronous.BUCKET / "async-out").mkdir(parents=True)
    (root / asynchronous.BUCKET / "async-out" / "team").write_bytes(b"a file")
    accepted = invoke(local, Body=b"x", S3OutputPathExtension="team", Filename="one")
    assert b"Not a directory" in at(root, accepted["FailureLocation"]) or b"File exists" in at(
        root, accepted["FailureLocation"]
    )


# -- capture -----------------------------------------------------------------------------------------------------------
# Data capture, as the emulator plays it: sampled, in SageMaker's directories and lines, also of a shadow variant.


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
    capture = Capture.of(config, objects.__setitem__, None)

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
    assert [(one.headers["content-type"], one.body, *(one.answer or (0, "", b""))[1:]) for one in requests] == [*cases]


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
        captures.end(captures.begin(Capture.of(CONFIG, fails, None), {}, b"{}"), "AllTraffic", (JSON, b"[]"))
        await captures.close()

    loop.run(ask())


def test_invocations_and_streams_are_captured_and_the_shadow_gets_a_copy(local: Local, tmp_path: Path) -> None:
    objects: dict[str, bytes] = {}
    local.endpoint.capture = Capture.of(CONFIG, objects.__setitem__, Shadow("Shadow", 1.0))
    local.container.may_go_on.set()
    whole, stream = b'{"do": "echo", "text": "[1]"}', b'{"do": "stream", "pieces": ["e2", "9883"]}'
    local.invoke(json.loads(whole))
    pieces = [part["PayloadPart"]["Bytes"] for part in local.stream(json.loads(stream))["Body"]]
    assert b"".join(pieces) == "☃".encode()
    wait_for(lambda: sum(content.count(b"\n") for content in objects.values()) == 4, PATIENCE, "not captured")
    requests = requests_of(objects, tmp_path)
    assert {json.loads(one.body)["do"] for one in requests} == {"echo", "stream"}
    assert {one.answer and one.answer.body for one in requests} == {b"[1]", "☃".encode()}
    assert all(one.answer == one.other for one in requests)
