"""The client through the emulator to our own server: every schema, as a user meets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import pytest

from deploy.cli.main import main
from deploy.client import Finish, ModelRefused, NotSent, Patience, Predictor, RequestFailed, Token
from deploy.emulator.endpoint import Endpoint, EndpointComponent
from deploy.emulator.runtime import RuntimeEmulator
from tests.deploy import thoughts
from tests.deploy.local.servers import Loop
from tests.servers import LiveServer, options, serve

WORDS = "one two three four"
NOW = Patience(busy=0, cold=0)


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    """The echo engine, with its cues for failures."""
    with serve("--engine", "echo", "-o", "option.echo_cues=true") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def emulated(served: LiveServer) -> Iterator[tuple[str, Endpoint]]:
    loop = Loop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        endpoint = Endpoint(served.url, part_bytes=5)
        yield stack.enter_context(loop.serving(RuntimeEmulator(endpoint).app())), endpoint


@pytest.fixture
def predictor(emulated: tuple[str, Endpoint], boto: boto3.session.Session) -> Predictor:
    return Predictor("local", "us-east-1", endpoint_url=emulated[0], session=boto, patience=NOW)


BODIES = {
    "lmi": {"inputs": WORDS, "parameters": {"max_new_tokens": 4}},
    "lmi sse": {"inputs": WORDS, "parameters": {"max_new_tokens": 4, "output_formatter": "sse"}},
    "chat": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 4},
    "openai": {"prompt": WORDS, "max_tokens": 4},
    "triton": {"text_input": WORDS, "max_tokens": 4},
}


@pytest.mark.parametrize("schema", BODIES)
def test_every_schema_comes_token_by_token(predictor: Predictor, schema: str) -> None:
    """The echo engine says the prompt's words."""
    stream = predictor.predict_stream(BODIES[schema])
    text = "".join(stream.text())
    assert len([event for event in stream.arrived if isinstance(event, Token)]) == 4
    assert text.split() == (WORDS.split() if schema != "chat" else text.split())
    whole = predictor.predict(BODIES[schema] if schema != "lmi sse" else BODIES["lmi"])
    assert json.dumps(text)[1:-1] in json.dumps(whole)  # Triton's whole answer begins with the prompt


def test_tgis_schema(emulated: tuple[str, Endpoint], boto: boto3.session.Session) -> None:
    with serve("--engine", "echo", "-o", "option.tgi_compat=true") as server:
        server.wait_ready()
        loop = Loop()
        with ExitStack() as stack:
            stack.callback(loop.close)
            url = stack.enter_context(loop.serving(RuntimeEmulator(Endpoint(server.url)).app()))
            predictor = Predictor("local", "us-east-1", endpoint_url=url, session=boto)
            stream = predictor.predict_stream({"inputs": WORDS, "parameters": {"max_new_tokens": 4}})
            text = "".join(stream.text())
            assert stream.finish == Finish("length", text, stream.finish.details if stream.finish else None)
            assert (
                predictor.predict({"inputs": WORDS, "parameters": {"max_new_tokens": 4}})[0]["generated_text"] == text
            )


@pytest.fixture(scope="module")
def thinking() -> Iterator[str]:
    """The emulator of a server that reads thoughts."""
    with serve("--engine", "echo", *options(*map("=".join, thoughts.OPTIONS.items()))) as server, ExitStack() as stack:
        server.wait_ready()
        loop = Loop()
        stack.callback(loop.close)
        yield stack.enter_context(loop.serving(RuntimeEmulator(Endpoint(server.url, part_bytes=7)).app()))


@pytest.mark.parametrize("name", thoughts.CASES)
def test_thoughts_by_boto3(thinking: str, boto: boto3.session.Session, name: str) -> None:
    case = thoughts.CASES[name]
    client = boto.client("sagemaker-runtime", region_name="us-east-1", endpoint_url=thinking)
    asked = {"EndpointName": "local", "ContentType": "application/json", "CustomAttributes": case.attributes}
    found = client.invoke_endpoint(Body=json.dumps(case.body), **asked)["Body"].read()
    assert case.whole(json.loads(found)) == [thoughts.THOUGHT, thoughts.TEXT]
    streamed = client.invoke_endpoint_with_response_stream(Body=json.dumps({**case.body, "stream": True}), **asked)
    assert streamed["ContentType"] == case.stream_type
    body = b"".join(part["PayloadPart"]["Bytes"] for part in streamed["Body"])
    assert case.streamed(body.decode()) == [thoughts.THOUGHT, thoughts.TEXT]


def test_a_refusal_before_the_stream(predictor: Predictor) -> None:
    with pytest.raises(ModelRefused, match=r"\(424\): parameters.top_p=2: must be a number"):
        predictor.predict_stream({"inputs": WORDS, "parameters": {"top_p": 2}})


def test_without_sessions_none_is_opened(predictor: Predictor) -> None:
    with pytest.raises(ModelRefused, match=r"\(400\).*stateful sessions not enabled"):
        predictor.session()


def test_sessions_by_boto3_and_by_the_client(boto: boto3.session.Session, tmp_path: Path) -> None:
    sessions = options("option.enable_stateful_sessions=true", f"option.sessions_path={tmp_path}")
    with serve("--engine", "echo", *sessions) as server, ExitStack() as stack:
        server.wait_ready()
        loop = Loop()
        stack.callback(loop.close)
        url = stack.enter_context(loop.serving(RuntimeEmulator(Endpoint(server.url)).app()))
        client = boto.client("sagemaker-runtime", region_name="us-east-1", endpoint_url=url)

        def invoke(body: object, session: str) -> dict[str, Any]:
            answer: dict[str, Any] = client.invoke_endpoint(
                EndpointName="local", Body=json.dumps(body), ContentType="application/json", SessionId=session
            )
            return answer

        opened = invoke({"requestType": "NEW_SESSION"}, "NEW_SESSION")["NewSessionId"]
        mine, _, expires = opened.partition("; Expires=")
        with Predictor("local", "us-east-1", endpoint_url=url, session=boto).session() as other:
            assert other.id != mine
            assert other.expires is not None
            assert expires <= f"{other.expires:%Y-%m-%dT%H:%M:%SZ}"
            assert other.predict(BODIES["lmi"]) == json.loads(invoke(BODIES["lmi"], mine)["Body"].read())
            assert "".join(other.predict_stream(BODIES["chat"]).text())
            assert invoke({"requestType": "CLOSE"}, mine)["ClosedSessionId"] == mine
            with pytest.raises(client.exceptions.ModelError) as refused:
                invoke(BODIES["lmi"], mine)
            assert refused.value.response["OriginalStatusCode"] == 400
            assert f"Bad request: session not found: {mine}" in refused.value.response["OriginalMessage"]
            assert [path.name for path in tmp_path.iterdir() if path.name == other.id]


def test_components(predictor: Predictor, emulated: tuple[str, Endpoint], boto: boto3.session.Session) -> None:
    _, endpoint = emulated
    endpoint.components = {"base": EndpointComponent(), "cold": EndpointComponent(copies=0)}
    try:
        named = Predictor("local", "us-east-1", endpoint_url=emulated[0], component="base", session=boto)
        assert named.predict({"inputs": WORDS})["generated_text"]
        cold = Predictor("local", "us-east-1", endpoint_url=emulated[0], component="cold", session=boto, patience=NOW)
        with pytest.raises(RequestFailed, match="no capacity"):
            cold.predict({"inputs": WORDS})
    finally:
        endpoint.components = {}
    with pytest.raises(NotSent, match="not allowed"):
        named.predict({"inputs": WORDS})


@pytest.mark.parametrize("route", ["invocations", "openai"])
def test_bench_in_emulated(emulated: tuple[str, Endpoint], capsys: pytest.CaptureFixture[str], route: str) -> None:
    arguments = [
        "--clients",
        "1,4",
        "--requests",
        "8",
        "--max-tokens",
        "6",
        "--words",
        "20",
        "--route",
        route,
    ]
    assert main(["bench", "local", "--endpoint-url", emulated[0], *arguments]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [level["errors"] for level in found["levels"]] == [{}, {}]
    for level in found["levels"]:
        assert level["tokens_per_second"] == pytest.approx(6 * level["requests_per_second"], rel=0.02)
