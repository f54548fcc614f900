"""Inference routers: the client and stock boto3 through the emulator's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import boto3
import pytest
from botocore.exceptions import ClientError

from deploy.cli.main import main
from deploy.client import ModelRefused, NotReady, NotSent, Patience, Predictor
from deploy.client.errors import failure
from deploy.emulator.endpoint import Endpoint, Status
from deploy.emulator.runtime import RuntimeEmulator
from tests.deploy.local.servers import Loop
from tests.servers import serve

NOW = Patience(busy=0, cold=0)
BODY = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}


@pytest.fixture(scope="module")
def emulated() -> Iterator[tuple[str, Endpoint]]:
    loop = Loop()
    with serve("--engine", "echo") as server, ExitStack() as stack:
        server.wait_ready()
        stack.callback(loop.close)
        endpoint = Endpoint(server.url)
        yield stack.enter_context(loop.serving(RuntimeEmulator(endpoint).app())), endpoint


@pytest.fixture
def predictor(emulated: tuple[str, Endpoint], boto: boto3.session.Session) -> Predictor:
    url, _ = emulated
    return Predictor("local", "us-east-1", routing_target="all", endpoint_url=url, session=boto, patience=NOW)


def test_requests_go_through_it(predictor: Predictor) -> None:
    assert predictor.predict(BODY) == {"generated_text": " one two three"}
    assert predictor.chat("one two", max_tokens=2)["choices"][0]["message"]["role"] == "assistant"
    answer = predictor.runtime.invoke({"Body": b'{"inputs": "one"}', "ContentType": "application/json"})
    assert answer["InvokedRoutedResourceArn"] == "arn:aws:sagemaker:us-east-1:000000000000:endpoint/local"
    assert (answer["RoutingReason"], answer["InvokedProductionVariant"]) == ("local-preferred", "AllTraffic")


def test_what_a_router_lacks_is_refused(predictor: Predictor, emulated: tuple[str, Endpoint]) -> None:
    with pytest.raises(NotSent, match="inference routers do not support streaming"):
        predictor.predict_stream(BODY)
    with pytest.raises(NotSent, match="inference routers do not support asynchronous"):
        predictor.predict_async(BODY)
    with pytest.raises(NotSent, match="inference routers have no OpenAI route"):
        predictor.openai_route()
    with pytest.raises(NotSent, match="SessionId: not supported; routers accept only Accept, Body"):
        predictor.predict(BODY, session_id="x")
    with pytest.raises(NotSent, match="6,291,457 bytes, but a router accepts at most 6,291,456"):
        predictor.runtime.invoke({"Body": bytes(6 * 2**20 + 1)})
    with pytest.raises(NotSent, match="routing_target cannot be combined with component"):
        Predictor("local", "us-east-1", routing_target="all", component="chat", endpoint_url=emulated[0])


def test_its_errors_are_the_client_s(predictor: Predictor, emulated: tuple[str, Endpoint]) -> None:
    _, endpoint = emulated
    with pytest.raises(ModelRefused):
        predictor.predict({"inputs": 1})
    endpoint.status = Status.UNHEALTHY
    try:
        with pytest.raises(NotReady, match="No instance of endpoint local"):
            predictor.predict(BODY)
    finally:
        endpoint.status = Status.IN_SERVICE


def test_a_denial_names_the_router_s_action() -> None:
    denied = {"Error": {"Code": "AccessDeniedException", "Message": "no"}}
    told = failure(ClientError(denied, "InvokeInferenceRouter")).advice
    assert "sagemaker:InvokeInferenceRouter on the router" in told
    assert (
        failure(ClientError(denied, "InvokeEndpoint")).advice
        == "The caller needs sagemaker:InvokeEndpoint (`lmi deploy iam`)."
    )


def test_stock_boto3_gets_the_api_s_own_errors(emulated: tuple[str, Endpoint], boto: boto3.session.Session) -> None:
    client = boto.client("sagemaker-inference-router-runtime", "us-east-1", endpoint_url=emulated[0])
    where = {"InferenceRouterName": "local", "RoutingTargetName": "all"}
    answer = client.invoke_inference_router(**where, ContentType="application/json", Body=b'{"inputs": "one"}')
    assert b"generated_text" in answer["Body"].read()
    for wrong, words in (({"InferenceRouterName": "other"}, "not found"), ({"Body": b""}, "can't be empty")):
        with pytest.raises(client.exceptions.ValidationException, match=words):
            client.invoke_inference_router(**{**where, "Body": b"{}", **wrong})
    with pytest.raises(ClientError, match="larger than 6291456 bytes") as raised:
        client.invoke_inference_router(**where, Body=bytes(6 * 2**20 + 1))
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 413
    with pytest.raises(client.exceptions.ModelError) as failed:
        client.invoke_inference_router(**where, ContentType="application/json", Body=b'{"inputs": 1}')
    assert failed.value.response["OriginalStatusCode"] in (400, 424)
    with pytest.raises(client.exceptions.ValidationException, match="no asynchronous routing target"):
        client.invoke_inference_router_async(**where, InputLocation="s3://b/x")


def test_the_command_in_router(emulated: tuple[str, Endpoint], capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--endpoint-url", emulated[0], "--routing-target", "all"]
    assert main(["invoke", "local", '{"inputs": "one two"}', *where]) == 0
    assert "one two" in capsys.readouterr().out
