"""SageMaker's Python SDK 2: Predictor.predict and predict_stream, by stock boto3 through the emulator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.checks import PARIS
from tests.clients.driver import Driver, python_client
from tests.clients.emulator import OTHER

pytestmark = pytest.mark.clients

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
