"""typesafe-sdk and openai's `client.decisions`, which check answers against their types."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.driver import Driver, drivers
from tests.servers import LiveServer, serve

pytestmark = pytest.mark.clients

decisions = drivers("decisions", "drive_decisions")

STATE = "The parcel arrived broken, and nobody replies to my mails!"
QUESTIONS: dict[str, dict[str, Any]] = {
    "refund": {"type": "noul", "instructions": "Does the customer want their money back?"},
    "team": {"type": "choice", "instructions": "Who helps?", "criteria": {"bills": "about money", "parcels": None}},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", {"mood": "annoyed"}, "furious"]},
}
_DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # a pixel


@pytest.fixture(scope="module")
def echo() -> Iterator[LiveServer]:
    with serve("--engine", "echo") as server:
        server.wait_ready()
        yield server


def probable(number: Any) -> bool:
    return isinstance(number, float) and 0 <= number <= 1


def test_system_one(decisions: Driver, model_server: LiveServer) -> None:
    found = decisions.generate(model_server.url, STATE, what="systemone", questions=QUESTIONS)
    assert [*found["answers"]] == [*QUESTIONS]
    assert (found["nouls"], found["choices"], found["scores"]) == (["refund"], ["team"], ["anger"])
    refund, team, anger = found["answers"].values()
    assert probable(refund["noul"])
    assert team["choice"] == max(team["probabilities"], key=team["probabilities"].get)
    assert [*team["probabilities"]] == ["bills", "parcels"]
    assert [*anger["legend"].values()] == QUESTIONS["anger"]["criteria"]
    for answer in (team, anger):
        assert sum(answer["probabilities"].values()) == pytest.approx(1)
        assert probable(answer["confidence"])
    assert anger["score"] == pytest.approx(sum(int(n) * p for n, p in anger["probabilities"].items()))
    assert found["model"] == "model"
    assert found["usage"]["input_tokens"] > 3 * 20
    assert found["usage"]["output_tokens"] == 0
    assert found["request_id"].startswith("decision-")


def test_system_ones_models(decisions: Driver, echo: LiveServer) -> None:
    (model, *_) = decisions.generate(echo.url, "", what="models")["models"]
    assert model["name"] == "model"
    assert len(model["release_date"].split("-")) == 3


def test_an_image_arrives_in_a_form(decisions: Driver, echo: LiveServer, tmp_path: Path) -> None:
    photo = tmp_path / "dot.png"
    photo.write_bytes(base64.b64decode(_DOT))
    asked = {"what": "systemone", "questions": {"broken": QUESTIONS["refund"]}}
    found = decisions.generate(echo.url, STATE, **asked, image=str(photo))
    plain = decisions.generate(echo.url, STATE, **asked)
    assert found["usage"]["input_tokens"] > plain["usage"]["input_tokens"]


def test_system_ones_errors(decisions: Driver, model_server: LiveServer, echo: LiveServer, tmp_path: Path) -> None:
    essay = {"tone": {"type": "essay"}}
    refused = decisions.call("generate", echo.url, STATE, what="systemone", questions=essay)
    assert refused.error == "typesafe_sdk._core.errors.TypeSafeUnprocessableEntityError"
    assert "questions.tone.type: " in refused.message
    assert "request_id=decision-" in refused.message
    other = decisions.call("generate", echo.url, STATE, what="systemone", questions=QUESTIONS, model="other")
    assert other.error == "typesafe_sdk._core.errors.TypeSafeNotFoundError"
    photo = tmp_path / "dot.png"
    photo.write_bytes(base64.b64decode(_DOT))
    asked = {"what": "systemone", "questions": {"broken": QUESTIONS["refund"]}, "image": str(photo)}
    blind = decisions.call("generate", model_server.url, STATE, **asked)
    assert blind.error == "typesafe_sdk._core.errors.TypeSafeBadRequestError"
    assert "'image' is not supported" in blind.message


ASKED: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "The customer wants their money back."},
    {"type": "choice", "name": "late", "instructions": "Is it late?", "choices": [{"value": True}, {"value": "true"}]},
    {
        "type": "score",
        "name": "anger",
        "instructions": "How angry?",
        "levels": [{"label": "calm"}, {"label": "furious", "description": "with capitals"}],
    },
]


def test_openais_decisions(decisions: Driver, model_server: LiveServer) -> None:
    found = decisions.generate(model_server.url, STATE, what="openai", model="model", questions=ASKED)
    predicate, choice, score = found["answers"]
    assert (predicate["type"], predicate["name"]) == ("predicate", None)
    assert probable(predicate["probability"])
    assert [option["value"] for option in choice["probabilities"]] == [True, "true"]
    assert type(choice["choice"]) in (bool, str)
    assert probable(choice["confidence"])
    assert [(level["value"], level["label"]) for level in score["probabilities"]] == [(0, "calm"), (1, "furious")]
    assert probable(score["score"])
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] > 3 * 20
    assert usage["input_tokens_details"]["cache_write_tokens"] == usage["output_tokens"] == 0
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    (diagnostics, *_) = found["diagnostics"]
    assert probable(diagnostics["label_mass"])


def test_openais_errors(decisions: Driver, echo: LiveServer) -> None:
    short = [{**ASKED[1], "choices": [{"value": "a"}]}]
    refused = decisions.call("generate", echo.url, STATE, what="openai", model="model", questions=short)
    assert refused.error == "openai.BadRequestError"
    assert "questions[0].choices" in refused.message
    other = decisions.call("generate", echo.url, STATE, what="openai", model="other", questions=ASKED)
    assert other.error == "openai.NotFoundError"
