"""Errors as client libraries recognize them: what tests/joints/test_error_words.py states, held against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.driver import Driver, drivers, python_client
from tests.servers import LiveServer, serve

pytestmark = pytest.mark.clients

LONG = "a " * 200

langchain = drivers("openai", "drive_langchain_openai")
pydantic_ai = drivers("openai", "drive_pydantic_ai")


@pytest.fixture(scope="module")
def short() -> Iterator[LiveServer]:
    with serve("--engine", "echo", "-o", "option.max_model_len=64") as server:
        server.wait_ready()
        yield server


def raised(driver: Driver, how: str, url: str, prompt: str = LONG, **options: Any) -> str:
    """The name of the exception, without its module."""
    return (driver.call(how, url, prompt, **options).error or "").split(".")[-1]


both = pytest.mark.parametrize("how", ["generate", "stream"])


@both
@pytest.mark.parametrize(
    ("provider", "path"),
    [("hosted_vllm", "/v1"), ("openai", "/v1"), ("anthropic", "")],
)
def test_litellm(litellm: Driver, short: LiveServer, provider: str, path: str, how: str) -> None:
    """On these exceptions its fallbacks and retries depend."""
    url, options = short.url + path, dict[str, Any](provider=provider, max_tokens=4)
    assert raised(litellm, how, url, **options) == "ContextWindowExceededError"
    assert raised(litellm, how, url, "a", **options | {"model": f"{provider}/nobody"}) == "NotFoundError"


@both
def test_litellm_before_a_full_server(litellm: Driver, busy_url: str, how: str) -> None:
    url = busy_url.removesuffix("/invocations")
    assert raised(litellm, how, f"{url}/v1", "a", provider="hosted_vllm") == "RateLimitError"
    assert raised(litellm, how, url, "a", provider="anthropic") == "InternalServerError"  # as for Anthropic's 529


def test_litellm_with_a_wrong_key(litellm: Driver) -> None:
    with serve("--engine", "echo", env={"LMI_API_KEY": "k"}) as server:
        server.wait_ready()
        for provider, path in (("hosted_vllm", "/v1"), ("openai", "/v1"), ("anthropic", "")):
            assert raised(litellm, "generate", server.url + path, "a", provider=provider) == "AuthenticationError"


@both
@pytest.mark.parametrize(
    ("dialect", "error"),
    [
        ("chat", "OpenAIContextOverflowError"),
        ("responses", "OpenAIContextOverflowError"),
        ("messages", "AnthropicContextOverflowError"),
    ],
)
def test_langchain_for_errors(langchain: Driver, short: LiveServer, dialect: str, error: str, how: str) -> None:
    assert raised(langchain, how, short.url, dialect=dialect) == error


@both
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_pydantic_ai(pydantic_ai: Driver, short: LiveServer, dialect: str, how: str) -> None:
    assert raised(pydantic_ai, how, short.url, dialect=dialect) == "ModelContextWindowExceededError"


@pytest.mark.parametrize("provider", ["chat", "responses", "anthropic"])
def test_strands(short: LiveServer, provider: str) -> None:
    """Its agent then shortens the conversation, as long as there is more than one turn."""
    driver = python_client("strands", "drive_strands", "async")
    assert raised(driver, "generate", short.url, provider=provider) == "ContextWindowOverflowException"
