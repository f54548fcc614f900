"""Stateful sessions."""

from __future__ import annotations

import datetime

import pytest

from deploy.client import ModelFailed, ModelRefused, Predictor
from tests.deploy.aws.client.double import Double, model_answers, says, streams
from tests.deploy.aws.client.wire import golden

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
    with pytest.raises(ModelFailed, match="without a session's id"):
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
