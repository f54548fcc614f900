"""The measurements, through the emulator on our own server; and the checks before `up` from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError

from deploy.cli import main as cli
from deploy.client.runtime import boto_session, runtime_client
from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import Runtime
from deploy.operations.doctor import OPEN, SIZES, Finding, Target, measure, report
from tests.deploy.doubles.aws import Cloud
from tests.deploy.doubles.deployer import Deployer
from tests.deploy.doubles.endpoints import IMAGE, ROLE
from tests.deploy.local.servers import Loop
from tests.servers import serve


@pytest.fixture(scope="module")
def emulated() -> Iterator[str]:
    """The echo engine behind the emulator, whose parts are of 7 bytes."""
    with ExitStack() as stack:
        server = stack.enter_context(serve("--engine", "echo"))
        server.wait_ready()
        loop = Loop()
        stack.callback(loop.close)
        yield stack.enter_context(loop.serving(Runtime(Endpoint(server.url, part_bytes=7)).app()))


def by_question(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.question: finding for finding in findings}


def client_of(url: str) -> Any:
    return runtime_client(boto_session("us-east-1", url), "us-east-1", url, read_timeout=130)


def test_an_endpoint_is_measured(emulated: str) -> None:
    found = by_question(list(measure(Target(client_of(emulated), "local"), tokens=6)))
    plain = found["a plain answer"].figures
    assert plain is not None
    assert plain["bytes"] > 0
    assert found["Accept on a stream"].answer.startswith("changes nothing: application/jsonlines gives")
    assert found["Accept on a stream"].figures == {
        "content_types": {
            "application/jsonlines": "application/jsonlines",
            "text/event-stream": "application/jsonlines",
        }
    }
    parts = found["PayloadParts of a stream"].figures
    assert parts is not None
    assert parts["parts"] > 6
    assert parts["bytes_max"] == 7
    assert parts["first_after"] <= parts["last_after"]
    assert found["a body of 20.00 MiB"].answer == "taken"
    headers = found["headers through and back"].figures
    assert headers is not None
    assert "x-amzn-invoked-production-variant" in headers["headers"]
    assert [question for question, finding in found.items() if finding.answer.startswith("not measurable")] == [*OPEN]


def test_what_fails_is_an_answer_too(emulated: str) -> None:
    asked = Target(client_of(emulated), "another")
    findings = list(measure(asked))
    assert findings[0].figures is None
    assert findings[0].answer.startswith("ValidationError (status 400)")
    assert len(findings) == 6 + len(SIZES) + len(OPEN)


class Stuck:
    """A client whose answers take a minute and a half, on a clock of its own, and whose streams break."""

    def __init__(self) -> None:
        self.now = 0.0
        self.bodies: list[bytes] = []

    def clock(self) -> float:
        return self.now

    def invoke_endpoint(self, **arguments: Any) -> Any:
        self.bodies.append(arguments["Body"])
        self.now += 60
        error = {"Error": {"Code": "ModelError", "Message": "timed out"}, "OriginalStatusCode": 0,
                 "ResponseMetadata": {"HTTPStatusCode": 424}}  # fmt: skip
        raise ClientError(error, "InvokeEndpoint")

    def invoke_endpoint_with_response_stream(self, **arguments: Any) -> Any:
        def body() -> Iterator[Any]:
            self.now += 1
            yield {"PayloadPart": {"Bytes": b"a\n"}}
            self.now += 2
            yield {"PayloadPart": {"Bytes": b"bcd"}}
            self.invoke_endpoint(**arguments)

        return {"Body": body(), "ContentType": "application/jsonlines"}


def test_the_time_limit_is_seen_where_it_is_asked_for() -> None:
    client = Stuck()
    found = by_question(list(measure(Target(client, "e", "chat-a"), slow=9000, clock=client.clock)))
    limit = found["an answer beyond the time limit"]
    assert limit.answer == "ended after 60.0 s by ModelError (status 424, the container 0): timed out"
    assert limit.figures == {"seconds": 60.0, "answered": False}
    stream = found["a stream beyond a minute"]
    assert stream.answer.startswith(
        "2 parts of 2 to 3 bytes (median 2.5), the first after 1.00 s, the last after 3.00 s"
    )
    assert stream.answer.endswith("ended by ModelError (status 424, the container 0): timed out")
    assert [len(body) for body in client.bodies if len(body) > 1000] == list(SIZES)
    assert report("e", list(found.values()))["findings"][0]["figures"] is None


def test_the_command_measures(emulated: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "local", "--live", "--endpoint-url", emulated, "--tokens", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["endpoint"] == "local"
    assert said["findings"][0]["question"] == "a plain answer"
    assert cli.main(["doctor", "--live"]) == 1
    assert "--live needs the endpoint's name" in capsys.readouterr().err
    assert cli.main(["doctor", "local", "--endpoint-url", emulated]) == 2
    assert "--endpoint-url and --component are for --live\nlmi deploy doctor NAME --live" in capsys.readouterr().err


def test_the_emulator_is_measured_without_credentials(
    emulated: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    assert cli.main(["doctor", "local", "--live", "--endpoint-url", emulated, "--tokens", "2"]) == 0
    assert "a plain answer: " in capsys.readouterr().out
    assert cli.main(["doctor", "local", "--live"]) == 2
    assert "no region is set" in capsys.readouterr().err


def test_the_command_checks(cloud: Cloud, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="of-ours")
    content = {"name": "chat", "role": ROLE, "image": {"uri": IMAGE}, "model": {"s3": "s3://of-ours/llama/"},
               "instance": {"type": "ml.g5.xlarge"}}  # fmt: skip
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump(content))
    Deployer(cloud, cli.main).takes(str(path), ["model.shape={parameters: 1e9, layers: 9, kv_heads: 8, head_dim: 64}"])
    assert cli.main(["doctor", str(tmp_path / "chat.yaml"), "--aws-only"]) == 2
    out = capsys.readouterr().out
    assert f"error   role: {ROLE} does not exist" in out
    assert "error   model: there is nothing" in out
    assert cli.main(["doctor", str(tmp_path / "chat.yaml"), "--aws-only", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)[0] == {
        "name": "account", "verdict": "ok", "says": "123456789012 in us-east-1", "advice": "",
    }  # fmt: skip
