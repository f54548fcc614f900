"""langchain_aws's SagemakerEndpoint and ChatSagemakerEndpoint, by stock boto3 through SageMaker's emulator."""

from __future__ import annotations

import pytest

from tests.clients.checks import PARIS, UNICODE
from tests.clients.driver import Driver, drivers
from tests.clients.emulator import OTHER

pytestmark = pytest.mark.clients

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
def test_a_stream_says_what_the_whole_answer_says(
    langchain_aws: Driver, sagemaker_url: str, prompt: str, options: dict[str, object], wanted: str
) -> None:
    """Its line iterators put parts together that end within a line."""
    text = langchain_aws.generate(sagemaker_url, prompt, **options)
    assert text.startswith(wanted)
    pieces = langchain_aws.stream(sagemaker_url, prompt, **options)
    assert "".join(pieces) == text
    assert len(pieces) > 4


@both
def test_a_refusal_is_in_boto3s_exception(langchain_aws: Driver, sagemaker_url: str, how: str) -> None:
    outcome = langchain_aws.call(how, sagemaker_url, PARIS, max_new_tokens=-1)
    assert outcome.error == "botocore.errorfactory.ModelError"
    assert "parameters.max_new_tokens=-1: must be an integer from 1" in outcome.message
    outcome = langchain_aws.call(how, sagemaker_url, PARIS, endpoint="other")
    assert OTHER in outcome.message
