"""Libraries that speak to SageMaker, through its emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from deploy.client import Predictor
from deploy.client.runtime import boto_session
from deploy.emulator.endpoint import Endpoint, EndpointComponent
from deploy.emulator.runtime import RuntimeEmulator
from tests.clients.checks import PARIS, UNICODE
from tests.clients.documents import SAYS, example
from tests.clients.driver import Driver, drivers, python_client
from tests.deploy.local.servers import OTHER, Loop, emulated
from tests.servers import LiveServer, serve

pytestmark = pytest.mark.clients

# -- SageMaker's Python SDK 2: Predictor.predict and predict_stream, by stock boto3 through the emulator ---------------


SHORT = {"parameters": {"max_new_tokens": 8, "details": True}}


@pytest.fixture(scope="module")
def sagemaker() -> Driver:
    return python_client("sagemaker", "drive_sagemaker")


def test_predict(sagemaker: Driver, sagemaker_url: str) -> None:
    answer = sagemaker.generate(sagemaker_url, PARIS, **SHORT)
    assert answer["generated_text"].startswith(" Paris.")
    assert len(answer["details"]["tokens"]) == 8


def test_predict_stream_by_lines(sagemaker: Driver, sagemaker_url: str) -> None:
    answer = sagemaker.generate(sagemaker_url, PARIS, **SHORT)
    *events, last = sagemaker.stream(sagemaker_url, PARIS, **SHORT)
    assert len(events) == 7
    assert last["generated_text"] == answer["generated_text"]
    assert "".join(event["token"]["text"] for event in [*events, last]) == answer["generated_text"]


def test_predict_stream_by_parts(sagemaker: Driver, sagemaker_url: str) -> None:
    parts = sagemaker.stream(sagemaker_url, PARIS, bytes=True, **SHORT)
    assert max(map(len, parts)) == 11
    assert "".join(parts).count("\n") == 8


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_refusal_is_in_boto3s_exception(sagemaker: Driver, sagemaker_url: str, how: str) -> None:
    wrong: dict[str, Any] = {"parameters": {"max_new_tokens": -1}}
    outcome = sagemaker.call(how, sagemaker_url, PARIS, **wrong)
    assert outcome.error == "botocore.errorfactory.ModelError"
    assert "parameters.max_new_tokens=-1: must be an integer from 1" in outcome.message
    assert OTHER in sagemaker.call(how, sagemaker_url, PARIS, endpoint="other").message


# -- `Predictor.openai()` with the real openai package, through SageMaker's emulator -----------------------------------


QUESTION = "What is the capital of France?"
chat = drivers("llmeter", "drive_predictor")


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    return Endpoint("")


@pytest.fixture(scope="module")
def url(model_server: LiveServer, endpoint: Endpoint) -> Iterator[str]:
    endpoint.container = model_server.url
    loop = Loop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        yield stack.enter_context(loop.serving(RuntimeEmulator(endpoint).app()))


def test_a_stream_says_what_the_whole_answer_says_for_sagemaker(chat: Driver, url: str) -> None:
    answer = chat.generate(url, QUESTION, max_tokens=12, temperature=0)
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert answer["usage"]["completion_tokens"] > 4
    chunks = chat.stream(url, QUESTION, max_tokens=12, temperature=0)
    assert "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks) == text
    assert len(chunks) >= answer["usage"]["completion_tokens"]


def test_a_refusal_is_the_servers_own_for_sagemaker(chat: Driver, url: str) -> None:
    outcome = chat.call("generate", url, QUESTION, max_tokens=-1)
    assert outcome.error == "openai.BadRequestError"
    assert "max_tokens" in outcome.message


def test_a_component_is_in_the_address(chat: Driver, url: str, endpoint: Endpoint) -> None:
    endpoint.components = {"base": EndpointComponent()}
    try:
        answer = chat.generate(url, QUESTION, component="base", max_tokens=2)
        assert answer["usage"]["completion_tokens"] == 2
        assert chat.call("generate", url, QUESTION, max_tokens=2).error == "openai.BadRequestError"
    finally:
        endpoint.components = {}


# -- langchain_aws's SagemakerEndpoint and ChatSagemakerEndpoint, by stock boto3 through SageMaker's emulator ----------


langchain_aws = drivers("langchain", "drive_langchain_aws")
both = pytest.mark.parametrize("how", ["generate", "stream"])


@pytest.mark.parametrize(
    ("prompt", "options", "wanted"),
    [
        (PARIS, {"max_new_tokens": 8}, " Paris."),
        ("What is the capital of France?", {"chat": True, "max_tokens": 12, "temperature": 0}, "The capital of France"),
        (f"Repeat: {UNICODE} {UNICODE}", {"max_new_tokens": 24}, ""),
    ],
    ids=["text", "chat", "unicode"],
)
def test_a_stream_says_to_langchain_what_the_whole_answer_says(
    langchain_aws: Driver, sagemaker_url: str, prompt: str, options: dict[str, object], wanted: str
) -> None:
    """Its line iterators put parts together that end within a line."""
    text = langchain_aws.generate(sagemaker_url, prompt, **options)
    assert text.startswith(wanted)
    pieces = langchain_aws.stream(sagemaker_url, prompt, **options)
    assert "".join(pieces) == text
    assert len(pieces) > 4


@both
def test_a_refusal_is_in_boto3s_exception_under_langchain(langchain_aws: Driver, sagemaker_url: str, how: str) -> None:
    outcome = langchain_aws.call(how, sagemaker_url, PARIS, max_new_tokens=-1)
    assert outcome.error == "botocore.errorfactory.ModelError"
    assert "parameters.max_new_tokens=-1: must be an integer from 1" in outcome.message
    outcome = langchain_aws.call(how, sagemaker_url, PARIS, endpoint="other")
    assert OTHER in outcome.message


# -- litellm's providers for SageMaker: `sagemaker`, which speaks TGI's form, and `sagemaker_chat`, OpenAI's -----------


litellm_sagemaker = drivers("litellm", "drive_litellm_sagemaker")


@pytest.fixture(scope="module")
def whole(model_server: LiveServer) -> Iterator[str]:
    with emulated(model_server) as url:
        yield url


@pytest.fixture(scope="module")
def tgi(tgi_server: LiveServer) -> Iterator[str]:
    with emulated(tgi_server) as url:
        yield url


@pytest.fixture(scope="module")
def slow() -> Iterator[str]:
    """It wants each event in a part of its own: of two in one it reads neither."""
    with serve("--engine", "echo", "-o", "option.echo_tokens_per_second=10") as server, emulated(server) as url:
        yield url


@pytest.mark.parametrize("schema", ["whole", "tgi"])
def test_a_model_answers_for_sagemaker(litellm_sagemaker: Driver, schema: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(schema)
    answer = litellm_sagemaker.generate(url, PARIS, provider="sagemaker", max_tokens=8)
    assert answer["content"].startswith(" Paris.")
    assert answer["tokens"] > 3  # its own count


def test_a_chat_answers(litellm_sagemaker: Driver, whole: str) -> None:
    answer = litellm_sagemaker.generate(whole, QUESTION, provider="sagemaker_chat", max_tokens=12, temperature=0)
    assert answer == {"content": "The capital of France is Paris.", "calls": [], "tokens": 8}


@pytest.mark.parametrize(("provider", "wanted"), [("sagemaker", "a b c a"), ("sagemaker_chat", " user: a b c")])
def test_litellm_streams_in_pieces(litellm_sagemaker: Driver, slow: str, provider: str, wanted: str) -> None:
    """The echo engine's, of which `sagemaker` cuts the first space, and puts the first two together."""
    pieces = [piece for piece in litellm_sagemaker.stream(slow, "a b c", provider=provider, max_tokens=4) if piece]
    assert "".join(pieces) == wanted
    assert len(pieces) >= 3


def refused(driver: Driver, how: str, url: str, **options: Any) -> str:
    outcome = driver.call(how, url, PARIS, **options)
    assert outcome.error is not None
    assert outcome.error.startswith("litellm.exceptions.")
    return outcome.message


def test_a_refusal_is_in_its_exceptions(litellm_sagemaker: Driver, whole: str) -> None:
    wanted = "max_tokens=-1: must be an integer from 1"
    for how in ("generate", "stream"):
        assert wanted in refused(litellm_sagemaker, how, whole, provider="sagemaker_chat", max_tokens=-1)
        assert OTHER in refused(litellm_sagemaker, how, whole, provider="sagemaker_chat", endpoint="other")
    # Of the other provider's whole answers litellm itself drops the text.
    assert "max_new_tokens=-1" in refused(litellm_sagemaker, "stream", whole, provider="sagemaker", max_tokens=-1)
    assert refused(litellm_sagemaker, "generate", whole, provider="sagemaker", max_tokens=-1)


def test_the_documents_lines_for_sagemaker(model_server: LiveServer) -> None:
    assert python_client("litellm", "drive_litellm_sagemaker").run(example("litellm", model_server.url)) == SAYS


# -- llmeter against SageMaker's emulator, by stock boto3 and by the OpenAI route --------------------------------------


TOKENS, CLIENTS, EACH = 8, 2, 3


@pytest.fixture(scope="module")
def llmeter() -> Driver:
    return python_client("llmeter", "drive_llmeter", "async")


@pytest.fixture(scope="module")
def lmi(model_server: LiveServer) -> Iterator[str]:
    with emulated(model_server, part_bytes=11) as url:
        yield url


@pytest.fixture(scope="module")
def llmeter_tgi(tgi_server: LiveServer) -> Iterator[str]:
    with emulated(tgi_server, part_bytes=11) as url:
        yield url


def measure_stream(driver: Driver, url: str, endpoint: str, **options: Any) -> list[dict[str, Any]]:
    load = {"endpoint": endpoint, "tokens": TOKENS, "clients": CLIENTS, "requests": EACH, **options}
    found = driver.generate(url, PARIS, **load)
    assert found["failed"] == 0
    assert found["total"] == len(found["responses"]) == CLIENTS * EACH
    responses: list[dict[str, Any]] = found["responses"]
    assert all(response["error"] is None for response in responses)
    return responses


@pytest.mark.parametrize("schema", ["tgi", "lmi"])
def test_streams_through_boto3(llmeter: Driver, schema: str, request: pytest.FixtureRequest) -> None:
    """It is written for TGI's events; LMI's lines have what it looks for, too."""
    for response in measure_stream(llmeter, request.getfixturevalue(schema), "stream"):
        assert response["text"].startswith(" Paris")
        assert response["tokens"] == TOKENS
        assert 0 < response["first"] < response["last"]


def test_whole_answers_through_boto3(llmeter: Driver, lmi: str) -> None:
    for response in measure_stream(llmeter, lmi, "whole"):
        assert response["text"].startswith(" Paris")
        assert response["tokens"] == TOKENS


def test_chat_streams_through_the_openai_route(llmeter: Driver, lmi: str) -> None:
    route = Predictor("local", endpoint_url=lmi, session=boto_session("us-east-1", lmi)).openai_route()
    for response in measure_stream(llmeter, route.base_url, "openai", key=route.token()):
        assert response["text"]
        assert response["tokens"] == TOKENS
        assert 0 < response["first"] < response["last"]
