"""Whole answers: at once, in a session, or by S3; what is sent, and what becomes of failures."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from deploy.client import (
    AsyncAnswer,
    BytesDeserializer,
    ComponentFailed,
    Forbidden,
    JSONDeserializer,
    ModelBusy,
    ModelFailed,
    ModelRefused,
    NoCapacity,
    NoSuchEndpoint,
    NotSent,
    NotStarted,
    Patience,
    Predictor,
    RequestFailed,
    ServiceFailed,
    TimedOut,
    Unreachable,
)
from deploy.client.asynchronous import split_s3
from deploy.client.errors import failure
from deploy.client.runtime import MAX_BYTES, WARN_BYTES, LargePayload, check_size
from deploy.credentials import SIGN_IN_AGAIN
from deploy.errors import DeployError, NotAllowed, NotThere
from tests.deploy.aws.client.double import Answer, Double, Handler, fails, golden, model_answers, says, stalls, streams

# -- whole answers: what is sent, what comes back, and what becomes of failures ----------------------------------------


NO_CAPACITY = fails(400, "ValidationError", "Inference Component has no capacity to process this request.")
NO_NAME = fails(400, "ValidationError",
                "Inference Component Name header is required for endpoints to which you plan to deploy inference "
                "components.")  # fmt: skip


def test_an_answer(predictor: Predictor, aws: Double) -> None:
    aws.answers = [says({"generated_text": "ab é"})]
    assert predictor.predict({"inputs": "ü"}, inference_id="i-1", custom_attributes="a=b") == {"generated_text": "ab é"}
    request = aws.requests[0]
    assert request.path == "/endpoints/e/invocations"
    assert request.json == {"inputs": "ü"}
    assert request.headers["content-type"] == request.headers["accept"] == "application/json"
    assert request.headers["x-amzn-sagemaker-inference-id"] == "i-1"
    assert request.headers["x-amzn-sagemaker-custom-attributes"] == "a=b"
    assert "x-amzn-sagemaker-inference-component" not in request.headers


def test_bytes_go_and_come_as_they_are(aws: Double) -> None:
    aws.answers = [says(b"\xff\x00")]
    predictor = Predictor("e", deserializer=BytesDeserializer())
    assert predictor.predict(b"\x00\xfe", content_type="application/x-npy") == b"\xff\x00"
    assert aws.requests[0].body == b"\x00\xfe"
    assert aws.requests[0].headers["content-type"] == "application/x-npy"
    assert aws.requests[0].headers["accept"] == "*/*"


def test_an_answer_that_is_no_json_is_text(predictor: Predictor, aws: Double) -> None:
    aws.answers = [says(b"plain")]
    assert predictor.predict({}) == "plain"


def test_arguments_of_boto3_and_a_named_component(aws: Double) -> None:
    aws.answers = [says({})]
    Predictor("e", adapter="french").predict({}, {"TargetVariant": "blue"})
    assert aws.requests[0].headers["x-amzn-sagemaker-inference-component"] == "french"
    assert aws.requests[0].headers["x-amzn-sagemaker-target-variant"] == "blue"
    with pytest.raises(NotSent, match="component or adapter"):
        Predictor("e", adapter="french", component="base")


def test_an_unknown_option_is_refused_by_name(predictor: Predictor) -> None:
    with pytest.raises(NotSent, match=r"unknown options: variant; supported: .*target_variant"):
        predictor.predict({}, variant="blue")  # type: ignore[call-arg]


@pytest.mark.parametrize("more", [{}, {"routing_target": "all"}])
def test_an_unknown_argument_is_refused_by_name(more: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"unknown arguments: timeout; supported: .*timeouts"):
        Predictor("e", timeout=5, **more)  # type: ignore[call-arg]


def test_without_a_region_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(NotSent, match="no region"):
        Predictor("e")


@pytest.mark.parametrize(
    ("answer", "kind", "message", "status"),
    [
        (model_answers(400, "bad input"), ModelRefused, "the model rejected the request (400): bad input", 400),
        (model_answers(404, "no adapter"), ModelRefused, "the model rejected the request (404): no adapter", 404),
        (model_answers(424, "engine failure"), ModelFailed, "the model failed (424): engine failure", 424),
        (model_answers(424, '{"error": "x", "error_type": "generation"}'), ModelFailed,
         "the model failed (424): x", 424),
        (model_answers(424, '{"error": "x", "code": 424}'), ModelRefused,
         "the model rejected the request (424): x", 424),
        (model_answers(400, '{"error": {"message": "y", "type": "z"}}'), ModelRefused,
         "the model rejected the request (400): y", 400),
        (model_answers(500, "oops"), ModelFailed, "the model failed (500): oops", 500),
        (model_answers(507, "memory"), ModelFailed, "the model failed (507): memory", 507),
        (model_answers(503, "queue full"), ModelBusy, "the model is busy (503): queue full", 503),
        (model_answers(0, "Your invocation timed out while waiting for a response from container primary."), TimedOut,
         "Your invocation timed out while waiting for a response from container primary.", 0),
        (model_answers(0, "reset"), ModelFailed, "the model failed (0): reset", 0),
        (fails(400, "ValidationError", "1 validation error detected"), NotSent, "1 validation error detected", None),
        (fails(413, "ValidationError", "too large"), NotSent, "too large", None),
        (fails(400, "ValidationError", "Endpoint e of account 1 not found."), NoSuchEndpoint,
         "Endpoint e of account 1 not found.", None),
        (fails(403, "AccessDeniedException", "no"), Forbidden, "InvokeEndpoint: AccessDeniedException: no", None),
        (fails(500, "InternalFailure", "oops"), ServiceFailed, "InternalFailure: oops", None),
        (fails(530, "InternalDependencyException", "oops"), ServiceFailed, "InternalDependencyException: oops", None),
    ],
)  # fmt: skip
def test_failures_that_are_final(
    predictor: Predictor, aws: Double, answer: Answer, kind: type[DeployError], message: str, status: int | None
) -> None:
    aws.answers = [answer]
    with pytest.raises(DeployError) as caught:
        predictor.predict({})
    error: Any = caught.value
    assert type(caught.value) is kind
    assert str(error) == message
    assert error.original_status == status
    assert error.request_id == "request-7" or status is not None
    assert (error.log_stream is not None) == (status is not None)
    assert len(aws.requests) == 1


@pytest.mark.parametrize(
    ("code", "advice"),
    [("AccessDeniedException", "InvokeEndpoint"), ("ExpiredTokenException", "Sign in again")],
)
def test_what_is_advised_where_it_is_not_allowed(predictor: Predictor, aws: Double, code: str, advice: str) -> None:
    aws.answers = [fails(403, code, "no")]
    with pytest.raises(Forbidden) as caught:
        predictor.predict({})
    assert advice in caught.value.advice


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (NoCredentialsError(), "Sign in (aws"),
        (UnauthorizedSSOTokenError(), "Sign in again"),
        (TokenRetrievalError(provider="sso", error_msg="no"), "Sign in again"),
        (CredentialRetrievalError(provider="process", error_msg="no"), "Sign in again"),
        (ProfileNotFound(profile="p"), "Sign in again"),
    ],
)
def test_who_is_not_signed_in_is_told(error: BotoCoreError, advice: str) -> None:
    found = failure(error)
    assert isinstance(found, Forbidden)
    assert advice in found.advice


def test_the_command_line_knows_them_by_their_status() -> None:
    assert issubclass(NoSuchEndpoint, NotThere)
    assert NoSuchEndpoint("x").status == 4
    assert issubclass(Forbidden, NotAllowed)
    assert Forbidden("x").status == 3
    assert NoCapacity("x").status == 1


@pytest.mark.parametrize(
    "answer",
    [
        NO_CAPACITY,
        fails(503, "ServiceUnavailable", "The endpoint is overloaded"),
        fails(429, "ModelNotReadyException", "loading"),
        fails(400, "ThrottlingException", "Rate exceeded"),
    ],
)
def test_what_was_not_begun_is_sent_again(aws: Double, answer: Answer) -> None:
    aws.answers = [answer, answer, says({"generated_text": "a"})]
    seen: list[tuple[NotStarted, float]] = []
    patience = Patience(first=0.01, longest=0.02)
    predictor = Predictor("e", patience=patience, report=lambda error, pause: seen.append((error, pause)))
    assert predictor.predict({"inputs": "x"}) == {"generated_text": "a"}
    assert [request.json for request in aws.requests] == [{"inputs": "x"}] * 3
    assert len(seen) == 2
    assert all(0 < pause <= 0.02 for _, pause in seen)


def test_patience_ends(aws: Double) -> None:
    aws.answers = [NO_CAPACITY]
    with pytest.raises(NoCapacity, match="no capacity"):
        Predictor("e", patience=Patience(busy=100, cold=0)).predict({})
    assert len(aws.requests) == 1


@pytest.mark.parametrize("names", [["base"], []])
def test_no_copy_of_a_failed_component_is_waited_for(aws: Double, names: list[str]) -> None:
    """Also where the component is found only by asking."""
    state = says({"InferenceComponentStatus": "Failed", "FailureReason": "it did not pass the ping health check"})
    aws.answers = [*([] if names else [NO_NAME, listed("base")]), NO_CAPACITY, state]
    with pytest.raises(ComponentFailed, match="component base has failed: it did not pass the ping health check"):
        Predictor("e", component=next(iter(names), None), patience=Patience(first=0.01, cold=0.1)).predict({})
    assert ComponentFailed("x").status == 5


def test_a_copy_of_a_component_that_is_being_made_is_waited_for(aws: Double) -> None:
    aws.answers = [NO_CAPACITY, says({"InferenceComponentStatus": "Creating"}), says({"n": 1})]
    assert Predictor("e", component="base", patience=Patience(first=0.01)).predict({}) == {"n": 1}


def test_a_copy_is_waited_for_where_the_component_may_not_be_described(aws: Double) -> None:
    aws.answers = [NO_CAPACITY, fails(400, "AccessDeniedException", "not authorized"), says({"n": 1})]
    assert Predictor("e", component="base", patience=Patience(first=0.01)).predict({}) == {"n": 1}


def test_a_slow_answer_is_asked_for_once(impatient: Predictor, aws: Double) -> None:
    """boto3's own retries would have the model at it three times."""
    aws.answers = [stalls]
    with pytest.raises(TimedOut, match="no response in time"):
        impatient.predict({"inputs": "x"})
    assert len(aws.requests) == 1


def test_no_connection_is_tried_again(aws: Double) -> None:
    attempts: list[NotStarted] = []
    predictor = Predictor(
        "e",
        endpoint_url="http://127.0.0.1:1",
        patience=Patience(busy=1, first=0.1),
        report=lambda error, pause: attempts.append(error),
    )
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        predictor.predict({})
    assert attempts
    assert all(type(error) is Unreachable for error in attempts)


def test_large_bodies_are_warned_about_and_huge_ones_not_sent(predictor: Predictor, aws: Double) -> None:
    aws.answers = [says({})]
    with pytest.warns(LargePayload, match="6,291,457 bytes") as warned:
        predictor.predict(b"x" * (WARN_BYTES + 1))
    assert warned[0].filename == __file__
    with pytest.raises(NotSent, match="26,214,401 bytes"):
        predictor.predict(b"x" * (MAX_BYTES + 1))
    assert len(aws.requests) == 1
    check_size(b"x" * WARN_BYTES)


def listed(*names: str) -> Answer:
    return says({"InferenceComponents": [{"InferenceComponentName": name, "EndpointName": "e"} for name in names]})


def test_the_only_component_is_found(predictor: Predictor, aws: Double) -> None:
    aws.answers = [NO_NAME, listed("base"), says({"n": 1}), says({"n": 2})]
    assert predictor.predict({}) == {"n": 1}
    assert predictor.predict({}) == {"n": 2}
    asked = [request.headers.get("x-amz-target") for request in aws.requests]
    assert asked == [None, "SageMaker.ListInferenceComponents", None, None]
    assert aws.requests[1].json["EndpointNameEquals"] == "e"
    assert [r.headers.get("x-amzn-sagemaker-inference-component") for r in aws.requests] == [None, None, "base", "base"]


def test_adapters_are_not_what_is_looked_for(predictor: Predictor, aws: Double) -> None:
    adapter = says({"Specification": {"BaseInferenceComponentName": "base"}})
    aws.answers = [NO_NAME, listed("french", "base"), adapter, says({"Specification": {"ModelName": "m"}}), says({})]
    assert predictor.predict({}) == {}
    assert predictor.runtime.component == "base"


def test_of_several_components_one_must_be_named(predictor: Predictor, aws: Double) -> None:
    model = says({"Specification": {"ModelName": "m"}})
    aws.answers = [NO_NAME, listed("b", "a"), model, model]
    with pytest.raises(NotSent, match="e has several inference components: a, b"):
        predictor.predict({})


def test_no_component_yet(predictor: Predictor, aws: Double) -> None:
    aws.answers = [NO_NAME, listed()]
    with pytest.raises(NotSent, match="no inference component yet"):
        predictor.predict({})


def test_components_that_may_not_be_listed_must_be_named(predictor: Predictor, aws: Double) -> None:
    aws.answers = [NO_NAME, fails(400, "AccessDeniedException", "not authorized")]
    with pytest.raises(Forbidden, match="requests to e must name an inference component") as caught:
        predictor.predict({})
    assert "--component" in caught.value.advice


def test_a_chat_in_predictor(predictor: Predictor, aws: Double) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "Hi"}}]}
    aws.answers = [says(answer)]
    assert predictor.chat("Hello", max_tokens=5) == answer
    assert aws.requests[0].json == {
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "stream": False
    }  # fmt: skip
    predictor.chat([{"role": "system", "content": "x"}])
    assert aws.requests[1].json["messages"] == [{"role": "system", "content": "x"}]


# -- stateful sessions -------------------------------------------------------------------------------------------------


OPENED = says({}, New_Session_Id="abc; Expires=2026-11-20T00:00:00Z")
CLOSED = says({}, Closed_Session_Id="abc")


def ids(aws: Double) -> list[str | None]:
    return [request.headers.get("x-amzn-sagemaker-session-id") for request in aws.requests]


def test_requests_of_a_session_carry_its_id(predictor: Predictor, aws: Double) -> None:
    aws.answers = [OPENED, says({"n": 1}), streams(golden("lmi/stream").body), CLOSED]
    with predictor.session() as session:
        assert session.id == "abc"
        assert session.expires == datetime.datetime(2026, 11, 20, tzinfo=datetime.timezone.utc)
        assert session.predict({"inputs": "x"}) == {"n": 1}
        assert "".join(session.predict_stream({"inputs": "x"}).text()) == 'Deep "Learning" 😀\n'
    assert ids(aws) == ["NEW_SESSION", "abc", "abc", "abc"]
    assert aws.requests[0].json == {"requestType": "NEW_SESSION"}
    assert aws.requests[3].json == {"requestType": "CLOSE"}
    session.close()
    assert len(aws.requests) == 4


def test_a_container_without_sessions(predictor: Predictor, aws: Double) -> None:
    aws.answers = [says({}), model_answers(400, "no sessions")]
    with pytest.raises(ModelFailed, match="has no session ID"):
        predictor.session()
    with pytest.raises(ModelRefused, match="no sessions"):
        predictor.session()


def test_the_first_error_is_the_one_to_be_seen(predictor: Predictor, aws: Double) -> None:
    aws.answers = [OPENED, model_answers(400, "session not found")]
    with pytest.raises(ZeroDivisionError), predictor.session():
        _ = 1 // 0
    aws.answers = [OPENED, model_answers(400, "session not found")]
    with pytest.raises(ModelRefused, match="session not found"), predictor.session():
        pass
    assert len(aws.requests) == 4


# -- answers, and failures, that come to S3 ----------------------------------------------------------------------------


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
    with pytest.raises(TimedOut, match=r"no response at s3://b-1/out/1.out in 60 s"):
        answer.wait(60)
    assert sum(pauses) == 60
    assert max(pauses) == 10


def test_a_bucket_that_may_not_be_read_is_said(predictor: Predictor, aws: Double) -> None:
    aws.answers = [accepted, denied]
    with pytest.raises(Forbidden, match="AccessDenied") as caught:
        predictor.predict_async({"inputs": "x"}).wait()
    assert "s3:ListBucket" in caught.value.advice


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (EndpointConnectionError(endpoint_url="https://s3"), "Check the region, and this machine's network."),
        (ClientError({"Error": {"Code": "ExpiredToken"}}, "GetObject"), SIGN_IN_AGAIN),
        (ClientError({"Error": {"Code": "NoSuchBucket"}}, "GetObject"), ""),
        (ReadTimeoutError(endpoint_url="https://s3"), "Read the response again."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_only_a_denied_bucket_needs_permissions(error: Exception, advice: str) -> None:
    class S3:
        def get_object(self, **request: str) -> None:
            raise error

    answer = AsyncAnswer({"OutputLocation": "s3://b-1/out/1.out"}, S3(), JSONDeserializer())
    with pytest.raises(RequestFailed) as caught:
        answer.wait()
    assert caught.value.advice == advice


def test_an_upload_that_stalls_is_to_be_repeated(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    class S3:
        def put_object(self, **request: object) -> None:
            raise ReadTimeoutError(endpoint_url="https://s3")

    monkeypatch.setattr(predictor.runtime.session, "client", lambda *args, **options: S3())
    monkeypatch.setattr("deploy.client.predictor.web_pages.refused", lambda client: client)
    with pytest.raises(TimedOut, match=r"no response in time: .*https://s3") as caught:
        predictor.predict_async(b"x", upload="s3://b-1/in/1.json")
    assert caught.value.advice == "Upload the input again."


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
    with pytest.raises(NotSent, match="is not of the form s3://BUCKET/KEY"):
        split_s3(uri)
