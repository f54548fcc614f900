"""Answers, and failures, that come to S3."""

from __future__ import annotations

import pytest

from deploy.client import AsyncAnswer, Forbidden, ModelFailed, NotSent, Predictor, TimedOut
from deploy.client.asynchronous import split_s3
from tests.deploy.aws.client.double import Answer, Double, Handler, says


def accepted(handler: Handler) -> None:
    places = {"OutputLocation": "s3://b-1/out/1.out", "FailureLocation": "s3://b-1/bad/1.out"}
    headers = {f"X-Amzn-SageMaker-{name}": place for name, place in places.items()}
    handler.answer(202, b'{"InferenceId": "i-1"}', headers)


def absent(handler: Handler) -> None:
    body = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
    handler.answer(404, body, {"Content-Type": "application/xml"})


def denied(handler: Handler) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    handler.answer(403, body, {"Content-Type": "application/xml"})


def waited(answer: AsyncAnswer, answers: list[Answer], aws: Double) -> list[float]:
    """What `aws` answers next; pauses are counted in place of being slept."""
    pauses: list[float] = []
    answer._clock = lambda: sum(pauses)
    answer._sleep = pauses.append
    aws.answers = answers
    return pauses


def test_an_answer_is_waited_for(predictor: Predictor, aws: Double) -> None:
    aws.answers = [accepted]
    answer = predictor.predict_async({"inputs": "x"}, inference_id="i-1")
    assert (answer.id, answer.output, answer.failure) == ("i-1", "s3://b-1/out/1.out", "s3://b-1/bad/1.out")
    request = aws.requests[0]
    assert (request.path, request.json) == ("/endpoints/e/async-invocations", {"inputs": "x"})
    assert request.headers["x-amzn-sagemaker-inference-id"] == "i-1"
    pauses = waited(answer, [absent, absent, absent, absent, says({"generated_text": "ab"})], aws)
    assert answer.wait(60) == {"generated_text": "ab"}
    assert pauses == [0.5, 0.75]
    assert [r.path.partition("?")[0] for r in aws.requests[1:]] == ["/b-1/out/1.out", "/b-1/bad/1.out"] * 2 + [
        "/b-1/out/1.out"
    ]
    assert answer.ready()


def test_a_failure_is_told(predictor: Predictor, aws: Double) -> None:
    aws.answers = [accepted]
    answer = predictor.predict_async({"inputs": "x"})
    waited(answer, [absent, says(b"Received client error (400) from primary\n")], aws)
    with pytest.raises(ModelFailed, match=r"^the model failed: Received client error \(400\) from primary$"):
        answer.wait(60)


def test_who_may_not_list_the_whole_bucket_waits_too(predictor: Predictor, aws: Double) -> None:
    """S3 then answers 403 for what is not there yet; a list of the answer's own prefix tells."""
    hidden: Answer = lambda handler: handler.answer(403, b"<Error><Code>AccessDenied</Code></Error>", {})  # noqa: E731
    listed = says(b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
    aws.answers = [accepted]
    answer = predictor.predict_async({"inputs": "x"})
    waited(answer, [hidden, listed, hidden, listed, says({"generated_text": "ab"})], aws)
    assert answer.wait(60) == {"generated_text": "ab"}
    assert "prefix=out%2F1.out" in aws.requests[2].path


def test_waiting_ends(predictor: Predictor, aws: Double) -> None:
    aws.answers = [accepted]
    answer = predictor.predict_async({"inputs": "x"})
    pauses = waited(answer, [absent], aws)
    assert not answer.ready()
    with pytest.raises(TimedOut, match=r"no answer at s3://b-1/out/1.out in 60 s"):
        answer.wait(60)
    assert sum(pauses) == 60
    assert max(pauses) == 10


def test_a_bucket_that_may_not_be_read_is_said(predictor: Predictor, aws: Double) -> None:
    aws.answers = [accepted, denied]
    with pytest.raises(Forbidden, match="AccessDenied") as caught:
        predictor.predict_async({"inputs": "x"}).wait()
    assert "s3:ListBucket" in caught.value.advice


def test_large_data_goes_through_s3(predictor: Predictor, aws: Double) -> None:
    with pytest.raises(NotSent, match="128,001 bytes") as caught:
        predictor.predict_async(b"x" * 128_001)
    assert "upload=" in caught.value.advice
    aws.answers = [says(b""), accepted]
    predictor.predict_async(b"x" * 128_001, upload="s3://b-1/in/1.json")
    put, invoke = aws.requests
    assert (put.method, put.path) == ("PUT", "/b-1/in/1.json")
    assert b"x" * 1000 in put.body
    assert invoke.headers["x-amzn-sagemaker-inputlocation"] == "s3://b-1/in/1.json"
    assert invoke.body == b""


def test_data_that_is_there_already(predictor: Predictor, aws: Double) -> None:
    aws.answers = [accepted]
    predictor.predict_async(input_location="s3://b-1/in/1.json")
    assert aws.requests[0].headers["x-amzn-sagemaker-inputlocation"] == "s3://b-1/in/1.json"
    with pytest.raises(NotSent, match="exactly one of data and input_location"):
        predictor.predict_async()


@pytest.mark.parametrize("uri", ["https://b/k", "s3://b", "s3://b/", "b/k"])
def test_what_is_no_object(uri: str) -> None:
    with pytest.raises(NotSent, match="is not s3://BUCKET/KEY"):
        split_s3(uri)
