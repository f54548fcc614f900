"""litellm's providers for SageMaker: `sagemaker`, which speaks TGI's form, and `sagemaker_chat`, OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.checks import PARIS
from tests.clients.documents import SAYS, example
from tests.clients.driver import Driver, drivers, python_client
from tests.clients.emulator import OTHER, emulated
from tests.servers import LiveServer, serve

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France?"
litellm_sagemaker = drivers("litellm", "drive_litellm_sagemaker")


@pytest.fixture(scope="module")
def whole(openai_server: LiveServer) -> Iterator[str]:
    with emulated(openai_server) as url:
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
def test_a_model_answers(litellm_sagemaker: Driver, schema: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(schema)
    answer = litellm_sagemaker.generate(url, PARIS, provider="sagemaker", max_tokens=8)
    assert answer["content"].startswith(" Paris.")
    assert answer["tokens"] > 3  # its own count


def test_a_chat_answers(litellm_sagemaker: Driver, whole: str) -> None:
    answer = litellm_sagemaker.generate(whole, QUESTION, provider="sagemaker_chat", max_tokens=12, temperature=0)
    assert answer == {"content": "The capital of France is Paris.", "calls": [], "tokens": 8}


@pytest.mark.parametrize(("provider", "wanted"), [("sagemaker", "a b c a"), ("sagemaker_chat", " user: a b c")])
def test_streams(litellm_sagemaker: Driver, slow: str, provider: str, wanted: str) -> None:
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


def test_the_documents_lines(openai_server: LiveServer) -> None:
    assert python_client("litellm", "drive_litellm_sagemaker").run(example("litellm", openai_server.url)) == SAYS
