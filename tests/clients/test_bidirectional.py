"""AWS's SDK for bidirectional streams, in two versions, before `lmi deploy local` and a container."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from websockets.sync.client import connect

from tests.clients import toolchains
from tests.clients.driver import Driver, Outcome, python_client, skipped_without
from tests.deploy.local.servers import LocalProcess, local_process
from tests.environment import clean_environment
from tests.examples.programs import EXAMPLES, ROOT
from tests.servers import LiveServer, options, serve, wait_for

pytestmark = pytest.mark.clients

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}
TEXT = {"data_type": "UTF8", "completion_state": "COMPLETE"}
SETTINGS = ("option.echo_tokens_per_second=500", "option.websockets_max=16")
_READY = re.compile(r"bidirectional streams are at (\S+); .* SSL_CERT_FILE=(\S+)")
_MODELS = "aws_sdk_sagemaker_runtime_http2.models"


def prompt(words: str, tokens: int = 3) -> dict[str, Any]:
    return {"inputs": words, "parameters": {"max_new_tokens": tokens}, "stream": True}


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def part(data: bytes, **members: str) -> dict[str, str]:
    return {"data": base64.b64encode(data).decode(), **members}


class Endpoint(NamedTuple):
    """An emulated endpoint and its container."""

    container: LiveServer
    url: str
    certificate: str


def endpoint_of(local: LocalProcess, container: LiveServer) -> Endpoint:
    """The endpoint that `lmi deploy local` has made of a container."""
    wait_for(lambda: _READY.search(local.log), 0, "there is no port for bidirectional streams")
    ready = _READY.search(local.log)
    assert ready is not None
    return Endpoint(container, ready[1], ready[2])


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with serve("--engine", "echo", *options(*SETTINGS)) as container:
        container.wait_ready()
        arguments = ("--container", container.url, "--bidirectional-port", "0")
        with local_process(*arguments, variables=KEYS) as local:
            yield endpoint_of(local, container)


Part = dict[str, str]


class Client:
    """The SDK, whose streams are read to their end.

    Args:
        driver: the script with one version of the SDK.
    """

    def __init__(self, driver: Driver, endpoint: Endpoint) -> None:
        self._driver = driver
        self.endpoint = endpoint

    def call(self, *streams: Sequence[Part], **more: Any) -> Outcome:
        settings = {"certificate": self.endpoint.certificate, "streams": streams, **more}
        return self._driver.call("generate", self.endpoint.url, "", **settings)

    def read(self, *parts: Part, **more: Any) -> Any:
        """The parts of one stream."""
        [stream] = self.read_several(parts, **more)
        return stream

    def read_several(self, *streams: Sequence[Part], **more: Any) -> Any:
        outcome = self.call(*streams, **more)
        assert outcome.error is None, f"{outcome.error}: {outcome.message}"
        return outcome.answer


@pytest.fixture(scope="module", params=["bidirectional", pytest.param("bidirectional-2025", marks=pytest.mark.nightly)])
def client(request: pytest.FixtureRequest, endpoint: Endpoint) -> Client:
    with skipped_without():
        return Client(python_client(request.param, "drive_bidirectional", "async"), endpoint)
    raise AssertionError


CUT = encoded(prompt("a wörld b")).index("ö".encode()) + 1  # inside the character


@pytest.mark.parametrize(
    "parts",
    [
        [part(encoded(prompt("a wörld b")), **TEXT)],
        [part(encoded(prompt("a wörld b")))],
        [
            part(encoded(prompt("a wörld b"))[:CUT], data_type="UTF8", completion_state="PARTIAL"),
            part(encoded(prompt("a wörld b"))[CUT:], **TEXT),
        ],
    ],
    ids=["text", "binary", "partial"],
)
def test_each_event_is_a_part(client: Client, parts: list[dict[str, str]]) -> None:
    received = client.read(*parts, events=3)
    expected = client.endpoint.container.post(prompt("a wörld b")).text.splitlines()
    assert [json.loads(text) for *_, text in received] == [json.loads(line) for line in expected]
    assert {(kind, state) for kind, state, _ in received} == {("UTF8", "COMPLETE")}


def test_responses_by_the_path(client: Client) -> None:
    create = {"type": "response.create", "model": "model", "input": "a", "max_output_tokens": 2}
    received = client.read(part(encoded(create), **TEXT), path="v1/responses", events=10)
    kinds = [json.loads(text)["type"] for *_, text in received]
    assert (kinds[0], kinds[-1], len(kinds)) == ("response.created", "response.incomplete", 10)


def test_streams_at_once_are_not_crossed(client: Client) -> None:
    """Eight streams send five requests each, which bring the lines of the same requests over HTTP."""
    bodies = [[prompt(f"stream{stream} request{number}", 6) for number in range(5)] for stream in range(8)]
    streams = [[part(encoded(body), **TEXT) for body in requests] for requests in bodies]
    received = client.read_several(*streams, events=30)
    texts = [[json.loads(text) for *_, text in parts] for parts in received]
    post = client.endpoint.container.post
    expected = [[json.loads(line) for body in requests for line in post(body).text.splitlines()] for requests in bodies]
    assert texts == expected


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"path": "no/such"}, "ModelError", "404"),
        ({"path": "/v1/responses"}, "InputValidationError", "ModelInvocationPath"),
        ({"query": "no query"}, "InputValidationError", "ModelQueryString"),
        ({"secret": "another"}, "ModelStreamError", "signature of an event"),
    ],
)
def test_a_stream_is_refused(client: Client, more: Any, error: str, text: str) -> None:
    outcome = client.call([part(encoded(prompt("a")), **TEXT)], **more)
    assert outcome.error == f"{_MODELS}.{error}"
    assert text in outcome.message


def test_a_container_without_room_is_a_model_error(client: Client) -> None:
    container = client.endpoint.container
    wait_for(lambda: not container.metric("lmi_websockets"), 0, "streams of other tests go on")
    with contextlib.ExitStack() as sockets:
        for _ in range(16):
            sockets.enter_context(connect(container.url.replace("http", "ws", 1) + "/v1/responses"))
        outcome = client.call([part(encoded(prompt("a")), **TEXT)])
    assert outcome.error == f"{_MODELS}.ModelError"
    assert "Received server error (503) from primary" in outcome.message


def test_the_containers_close_frame_is_an_error(client: Client) -> None:
    outcome = client.call([part(b"\xff", **TEXT)])
    assert outcome.error == f"{_MODELS}.ModelStreamError"


def test_a_refused_request_is_an_event(client: Client) -> None:
    [[_, _, text]] = client.read(part(encoded(prompt("a", -1)), **TEXT), events=1)
    assert json.loads(text)["status"] == 424


def test_a_client_that_vanishes_ends_its_request(client: Client) -> None:
    container = client.endpoint.container
    before = container.log.count("outcome=cancelled")
    with pytest.raises(AssertionError, match="ended with status 3"):
        client.call([part(encoded(prompt("a b", 100_000)), **TEXT)], vanishes=True)
    wait_for(lambda: container.log.count("outcome=cancelled") == before + 1, 0, "the request goes on")


# -- `lmi deploy stream|chat --bidirectional` -------------------------------------------------------------------------


class Commands:
    """`lmi deploy` on the Python that has AWS's SDK."""

    def __init__(self, endpoint: Endpoint, python: str) -> None:
        self.endpoint = endpoint
        self._python = python

    def run(self, *arguments: str, input: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        command = [self._python, *arguments]
        environment = {
            **clean_environment(),
            **KEYS,
            "PYTHONPATH": str(ROOT),
            "SSL_CERT_FILE": self.endpoint.certificate,
        }
        environment |= variables
        return subprocess.run(command, input=input, capture_output=True, text=True, env=environment, timeout=120)

    def deploy(
        self, command: str, *arguments: str, input: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        more = ("--bidirectional", "--endpoint-url", self.endpoint.url, "--region", "us-east-1", "--patience", "0")
        return self.run("-m", "deploy", command, *more, *arguments, input=input, **variables)


@pytest.fixture(scope="module")
def commands(endpoint: Endpoint) -> Commands:
    with skipped_without():
        return Commands(endpoint, str(toolchains.python("bidirectional")))
    raise AssertionError


def test_a_streamed_response_by_the_command(commands: Commands) -> None:
    body = json.dumps(prompt("a wörld b"))
    done = commands.deploy("stream", "local", body, "--raw")
    assert (done.returncode, done.stderr) == (0, "")
    expected = commands.endpoint.container.post(prompt("a wörld b")).text
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        json.loads(line) for line in expected.splitlines()
    ]
    done = commands.deploy("stream", "local", body)
    assert (done.stdout, done.stderr) == (" a wörld b\n", "")


def test_a_chat_by_the_command(commands: Commands) -> None:
    messages = [{"role": "user", "content": "one"}]
    texts = []
    for _ in range(2):
        response = commands.endpoint.container.post({"messages": messages, "max_tokens": 20})
        texts.append(response.json()["choices"][0]["message"]["content"])
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "two"}]
    done = commands.deploy("chat", "local", "-p", "max_tokens=20", input="one\ntwo\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(f"{text}\n" for text in texts)


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "message"),
    [
        (["another", "a"], {}, 4, "Endpoint another of account 000000000000 not found"),
        (["local", "a"], {"AWS_SECRET_ACCESS_KEY": "wrong"}, 1, "The signature of an event does not match"),
    ],
)
def test_a_failure_of_the_command_is_one_message(
    commands: Commands, arguments: list[str], variables: dict[str, str], status: int, message: str
) -> None:
    done = commands.deploy("stream", *arguments, **variables)
    assert (done.returncode, done.stdout.strip()) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_bidirectional_stream_cannot_do_is_refused_by_name(commands: Commands) -> None:
    code = f"""
from deploy.client import Patience, Predictor, RequestFailed

def attempt(body, url="{commands.endpoint.url}", **options):
    try:
        predictor = Predictor(
            "local", "us-east-1", bidirectional=True, endpoint_url=url, patience=Patience(busy=0, cold=0)
        )
        print("".join(predictor.predict_stream(body, **options).text()))
    except RequestFailed as error:
        print(f"{{type(error).__name__}}: {{error}}")

attempt({{"inputs": "a", "parameters": {{"max_new_tokens": -1}}}})
attempt({{"inputs": "a"}}, inference_id="x")
attempt({{"text_input": "a"}})
attempt({{"inputs": "a"}}, content_type="text/plain")
attempt({{"inputs": "a"}}, url="http://localhost:1")
attempt({{"inputs": "a"}}, url="https://localhost:1")
attempt({{"inputs": "a", "parameters": {{"max_new_tokens": 2}}}})
"""
    done = commands.run("-c", code)
    assert done.stderr == ""
    expected = (
        "ModelRefused: the model rejected the request (424): parameters.max_new_tokens=-1",
        "NotSent: InferenceId: not supported by bidirectional streams",
        "NotSent: text_input: Triton's streams end only with their connection",
        "NotSent: the body of a bidirectional stream must be application/json, not text/plain",
        "NotSent: bidirectional streams need https, not http://localhost:1",
        "Unreachable: no connection",
        " a a",
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected)
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == [*expected]


def test_the_example_chats_over_one_stream(commands: Commands) -> None:
    script = EXAMPLES / "sagemaker" / "bidirectional_chat.py"
    container = commands.endpoint.container
    before = container.log.count("outcome=ok")
    settings = {"ENDPOINT_NAME": "local", "AWS_REGION": "us-east-1", "URL": commands.endpoint.url}
    done = commands.run(str(script), input="one\ntwo\n", **settings)
    assert (done.returncode, done.stderr) == (0, "")
    body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 64, "temperature": 0}
    first, second = done.stdout.splitlines()
    assert first == container.post(body).json()["choices"][0]["message"]["content"]
    assert len(second.split()) == 64
    requests = re.findall(r" id=(\S+) outcome=ok", container.log)[before : before + 2]
    assert len({id.rpartition("-")[0] for id in requests}) == 1


def test_a_stream_that_is_closed_early_ends_its_request(commands: Commands) -> None:
    container = commands.endpoint.container
    before = container.log.count("outcome=cancelled")
    code = f"""
from deploy.client import Predictor

predictor = Predictor("local", "us-east-1", bidirectional=True, endpoint_url="{commands.endpoint.url}")
with predictor.predict_stream({prompt("a b", 100_000)}) as stream:
    print(next(stream.text()))
with predictor.predict_stream({prompt("c d")}) as stream:
    print("".join(stream.text()))
"""
    done = commands.run("-c", code)
    assert (done.stdout, done.stderr) == (" a\n c d c\n", "")
    wait_for(lambda: container.log.count("outcome=cancelled") == before + 1, 0, "the request goes on")
