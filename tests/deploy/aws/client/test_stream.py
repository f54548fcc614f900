"""Streams through botocore: what comes, when it comes, and how they break."""

from __future__ import annotations

import pytest

from deploy.client import (
    Event,
    Finish,
    ModelFailed,
    ModelRefused,
    Patience,
    Predictor,
    RequestFailed,
    StreamBroken,
    TimedOut,
    Token,
)
from deploy.emulator.relay import payload_part
from tests.deploy.aws.client.double import Answer, Double, Handler, fails, golden, model_answers, stalls, streams
from tests.servers import PATIENCE

SHOWN = 'Deep "Learning" 😀\n'
LMI = golden("lmi/stream")


@pytest.mark.parametrize("part", [1, 7, 10_000])
def test_events_come_of_parts_of_any_size(predictor: Predictor, aws: Double, part: int) -> None:
    aws.answers = [streams(LMI.body, part=part)]
    stream = predictor.predict_stream({"inputs": "x"})
    events = list(stream)
    assert events[0] == Token("Deep", 304, -0.05)
    assert events[-1] == stream.finish == Finish(None, SHOWN)
    assert stream.arrived == tuple(events)
    assert (stream.content_type, stream.variant) == ("application/jsonlines", "AllTraffic")
    assert aws.requests[0].path == "/endpoints/e/invocations-response-stream"
    assert aws.requests[0].json == {"inputs": "x", "stream": True}


@pytest.mark.parametrize(
    "name", ["lmi/stream", "lmi/stream_sse", "tgi/stream", "tgi_compat/stream", "triton/stream", "openai/chat/stream",
             "openai/completion/stream", "chat/stream"]
)  # fmt: skip
def test_the_text_of_every_schema(predictor: Predictor, aws: Double, name: str) -> None:
    wire = golden(name)
    aws.answers = [streams(wire.body, wire.content_type)]
    assert "".join(predictor.predict_stream({}).text()) == SHOWN


def test_an_answer_that_is_not_streamed_has_its_text_at_once(predictor: Predictor, aws: Double) -> None:
    aws.answers = [streams(b'{"generated_text": "ab"}', "application/json")]
    assert list(predictor.predict_stream({}).text()) == ["ab"]


def test_the_first_token_comes_before_the_last_is_sent(predictor: Predictor, aws: Double) -> None:
    first, _, rest = LMI.body.partition(b"\n")

    def answer(handler: Handler) -> None:
        handler.begin_stream("application/jsonlines")
        handler.chunk(payload_part(first))
        handler.double.released.wait()
        handler.chunk(payload_part(rest))
        handler.chunk(b"")

    aws.answers = [answer]
    events = iter(predictor.predict_stream({}))
    assert next(events) == Token("Deep", 304, -0.05)
    aws.released.set()
    assert len(list(events)) == 5


def test_what_says_itself_whether_to_stream_is_left_as_it_is(predictor: Predictor, aws: Double) -> None:
    aws.answers = [streams(LMI.body)]
    for data in ({"inputs": "x", "stream": False}, {"own": "x"}, b"x"):
        list(predictor.predict_stream(data))
    assert [request.body for request in aws.requests] == [b'{"inputs": "x", "stream": false}', b'{"own": "x"}', b"x"]
    list(predictor.chat("x", stream=True))
    assert aws.requests[3].json == {"messages": [{"role": "user", "content": "x"}], "stream": True}


@pytest.mark.parametrize(
    ("then", "kind", "message"),
    [
        ("time", TimedOut, "did not complete sending the inference response in the allotted time"),
        ("broken", StreamBroken, "ModelStreamError: The model's container closed the stream."),
        ("internal", StreamBroken, "InternalStreamFailure: boom"),
        ("cut", StreamBroken, "the connection was lost during the response"),
        ("stall", TimedOut, "the response stalled for too long"),
    ],
)
def test_a_fault_in_the_middle_keeps_what_had_arrived(
    impatient: Predictor, aws: Double, then: str, kind: type[RequestFailed], message: str
) -> None:
    two = b"".join(line + b"\n" for line in LMI.body.split(b"\n")[:2]) + b'{"tok'
    aws.answers = [streams(two, then=then)]
    seen: list[Event] = []
    with pytest.raises(RequestFailed, match=message) as caught:
        seen.extend(impatient.predict_stream({}))
    assert type(caught.value) is kind
    assert list(caught.value.arrived) == seen == [Token("Deep", 304, -0.05), Token(' "Learning"', 11157, -1.25)]
    assert len(aws.requests) == 1


def test_the_models_own_failure_in_the_stream(predictor: Predictor, aws: Double) -> None:
    wire = golden("openai/chat/stream_fails")
    aws.answers = [streams(wire.body, wire.content_type)]
    with pytest.raises(ModelFailed, match=r"killed by signal 9 \(server_error\)") as caught:
        list(predictor.predict_stream({}))
    assert [event.text for event in caught.value.arrived if isinstance(event, Token)] == ["Deep", ' "Learning"']


def test_an_end_without_the_last_line_is_broken(predictor: Predictor, aws: Double) -> None:
    aws.answers = [streams(b'{"token":{"text":"a"}}\n')]
    with pytest.raises(StreamBroken, match="ended without a final event"):
        list(predictor.predict_stream({}))


def test_refused_before_it_began(predictor: Predictor, aws: Double) -> None:
    aws.answers = [model_answers(422, "too long")]
    with pytest.raises(ModelRefused, match=r"\(422\): too long"):
        predictor.predict_stream({})


@pytest.mark.parametrize("name", ["stream_bad_parameter", "stream_bad_parameter_sse"])
def test_refused_in_the_form_of_its_stream(predictor: Predictor, aws: Double, name: str) -> None:
    aws.answers = [model_answers(424, golden(f"lmi/{name}", 424).body.decode())]
    with pytest.raises(ModelRefused, match=r"\(424\): parameters\.top_p=2: must be"):
        predictor.predict_stream({})


def test_a_stream_without_capacity_is_begun_later(predictor: Predictor, aws: Double) -> None:
    full = fails(400, "ValidationError", "Inference Component has no capacity to process this request.")
    aws.answers = [full, full, streams(LMI.body)]
    assert "".join(predictor.predict_stream({}).text()) == SHOWN
    assert len(aws.requests) == 3


def test_a_stream_that_does_not_begin_is_asked_for_once(impatient: Predictor, aws: Double) -> None:
    aws.answers = [stalls]
    with pytest.raises(TimedOut):
        impatient.predict_stream({})
    assert len(aws.requests) == 1


def test_a_stream_that_is_left_ends_its_connection(predictor: Predictor, aws: Double) -> None:
    ended: list[bytes] = []

    def answer(handler: Handler) -> None:
        handler.begin_stream("application/jsonlines")
        handler.chunk(payload_part(LMI.body.split(b"\n")[0]))
        handler.connection.settimeout(PATIENCE)
        ended.append(handler.connection.recv(1))
        handler.double.released.set()
        handler.cut()

    aws.answers = [answer]
    with predictor.predict_stream({}) as stream:
        assert next(iter(stream)) == Token("Deep", 304, -0.05)
    assert aws.released.wait(PATIENCE)
    assert ended == [b""]


def test_bytes_as_they_come(predictor: Predictor, aws: Double) -> None:
    aws.answers = [streams(LMI.body), streams(b"x", then="internal")]
    assert b"".join(predictor.predict_stream({}).bytes()) == LMI.body
    with pytest.raises(StreamBroken, match="InternalStreamFailure"):
        list(predictor.predict_stream({}).bytes())


def test_retries_of_a_stream_stop_with_its_first_byte(aws: Double) -> None:
    answers: list[Answer] = [streams(b'{"token":{"text":"a"}}\n', then="broken"), streams(LMI.body)]
    aws.answers = answers
    with pytest.raises(StreamBroken):
        list(Predictor("e", patience=Patience(first=0.01)).predict_stream({}))
    assert len(aws.requests) == 1
