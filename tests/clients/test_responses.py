"""openai's Responses API, and its transcriptions."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.media.clips import clip_file
from tests.clients.driver import Driver, drivers
from tests.servers import LiveServer, options, serve

pytestmark = pytest.mark.clients

# -- openai's Responses API --------------------------------------------------------------------------------------------


QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY, "strict": False}
CALL = '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>'
GOLDEN = Path(__file__).parents[1] / "golden" / "responses"


@pytest.fixture(scope="session")
def root(echo_url: str) -> str:
    return echo_url.removesuffix("/invocations")


def test_a_response(responses: Driver, model_server: LiveServer) -> None:
    for gathered in (False, True):
        found = responses.generate(model_server.url, QUESTION, temperature=0, gathered=gathered)
        (item,) = found["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", ANSWER)
        assert (found["status"], found["model"], found["object"]) == ("completed", "model", "response")
        usage = found["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (37, 8, 45)


def test_a_custom_tool(responses: Driver, model_server: LiveServer) -> None:
    format = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}-[0-9]{4}"}
    dial = {"type": "custom", "name": "dial", "description": "Dials a number.", "format": format}
    asked = {
        "tools": [dial],
        "tool_choice": {"type": "custom", "name": "dial"},
        "temperature": 0,
        "max_output_tokens": 64,
    }
    (item,) = responses.generate(model_server.url, "Dial 555-0199.", **asked)["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "dial")
    assert re.fullmatch(format["definition"], item["input"])
    events = responses.stream(model_server.url, "Dial 555-0199.", **asked)
    (told,) = [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert told == item["input"]


def test_a_responses_stream(responses: Driver, model_server: LiveServer) -> None:
    events = responses.stream(model_server.url, QUESTION, temperature=0)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = ["output_text.delta"] * kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *deltas, "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == ANSWER


def test_a_tool_and_its_output(responses: Driver, root: str) -> None:
    """The echo engine says the prompt's words."""
    found = responses.generate(root, f"So {CALL}", tools=[WEATHER], max_output_tokens=400)
    call = next(item for item in found["output"] if item["type"] == "function_call" and "Paris" in item["arguments"])
    assert json.loads(call["arguments"]) == {"city": "Paris"}
    turns: list[Any] = [{"role": "user", "content": "a"}, call]
    turns.append({"type": "function_call_output", "call_id": call["call_id"], "output": "12 °C"})
    again = responses.generate(root, "", input=[{k: v for k, v in turn.items() if v is not None} for turn in turns])
    assert again["status"] == "incomplete"
    assert again["incomplete_details"]["reason"] == "max_output_tokens"


def test_a_count(responses: Driver, model_server: LiveServer) -> None:
    counted = responses.generate(model_server.url, QUESTION, counted=True)
    assert counted == {"object": "response.input_tokens", "input_tokens": 37}
    tools = {"tools": [WEATHER], "instructions": "Be brief."}
    counted = responses.generate(model_server.url, QUESTION, counted=True, **tools)
    asked = responses.generate(model_server.url, QUESTION, max_output_tokens=1, **tools)
    assert counted["input_tokens"] == asked["usage"]["input_tokens"] > 37


@pytest.mark.parametrize("how", ["generate", "stream"])
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"store": True}, "BadRequestError", "store=true: is not supported"),
        ({"previous_response_id": "resp_1"}, "BadRequestError", "previous_response_id"),
        ({"model": "other"}, "NotFoundError", "Model not found: other"),
        (
            {"tools": [{"type": "file_search", "vector_store_ids": ["a"]}]},
            "BadRequestError",
            "hosted tools only run on OpenAI's servers",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals_for_responses(
    responses: Driver, root: str, how: str, options: dict[str, Any], error: str, words: str
) -> None:
    outcome = responses.call(how, root, QUESTION, **options)
    assert (outcome.error or "").split(".")[-1] == error
    assert words in outcome.message


def test_a_compacted_conversation(responses: Driver, root: str) -> None:
    found = responses.generate(root, QUESTION, compacted=True)
    message, item = found["output"]
    assert (found["object"], message["role"], message["content"][0]["text"]) == (
        "response.compaction",
        "user",
        QUESTION,
    )
    assert (item["type"], bool(item["encrypted_content"])) == ("compaction", True)


def test_stored_responses(responses: Driver, storing_server: LiveServer) -> None:
    found = responses.generate(storing_server.url, QUESTION, temperature=0, stored=True)
    first, second = found["turns"]
    assert found["found"] == first
    assert second["previous_response_id"] == first["id"]
    given = [{"role": "user", "content": QUESTION}]
    said = [{key: value for key, value in item.items() if value is not None} for item in first["output"]]
    whole = responses.generate(storing_server.url, "", input=[*given, *said, *given], temperature=0, store=False)
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    assert [(item["role"], item["content"][0]["text"]) for item in found["items"]] == [("user", QUESTION)]
    assert found["gone"]["message"] == f"Response with id '{first['id']}' not found."


def test_golden_files_fit_the_clients_types_for_responses(responses: Driver) -> None:
    values = []
    for path in sorted(GOLDEN.glob("*.txt")):
        _, _, answered = path.read_text().partition("\n< ")
        lines = answered.partition("\n")[2].splitlines()
        values += [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.startswith("event: ")]
    kinds = responses.generate("", "", values=[value for value in values if "error" not in value or "id" in value])
    assert {"Response", "ResponseReasoningTextDeltaEvent", "ResponseFunctionCallArgumentsDoneEvent"} <= set(kinds)
    assert "InputTokenCountResponse" in kinds
    assert {"ResponseFailedEvent", "ResponseIncompleteEvent", "ResponseCompletedEvent"} <= set(kinds)


# -- OpenAI's client reads transcriptions in each format, and their events ---------------------------------------------


CLIP = base64.b64encode(clip_file()).decode()
ECHO = "user: <audio> assistant: user: <audio>"
VTT = "WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nuser: &lt;audio&gt; assistant: user: &lt;audio&gt;\n\n"

transcriptions = drivers("openai", "drive_transcriptions")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server: LiveServer
    with serve("--engine", "echo", *options("option.task=transcription", "option.max_model_len=8")) as server:
        server.wait_ready()
        yield server.url


@pytest.mark.parametrize("what", ["transcriptions", "translations"])
def test_documents(transcriptions: Driver, url: str, what: str) -> None:
    kind, found = transcriptions.generate(url, CLIP, what=what)
    assert (kind, found["text"]) == (what.capitalize().rstrip("s"), ECHO)
    kind, found = transcriptions.generate(url, CLIP, what=what, response_format="verbose_json")
    assert kind == what.capitalize().rstrip("s") + "Verbose"
    assert (found["text"], found["duration"], found["language"]) == (ECHO, 0.5, "")
    (segment,) = found["segments"]
    assert (segment["start"], segment["end"], segment["avg_logprob"], segment["no_speech_prob"]) == (
        0.0,
        0.5,
        0.0,
        None,
    )


def test_times_of_segments(transcriptions: Driver, url: str) -> None:
    asked = {"response_format": "verbose_json", "timestamp_granularities": ["segment"]}
    _, found = transcriptions.generate(url, CLIP, **asked)
    assert found["usage"] == {"type": "duration", "seconds": 1.0}
    refused = transcriptions.call("generate", url, CLIP, **{**asked, "timestamp_granularities": ["word", "segment"]})
    assert refused.error == "openai.BadRequestError"
    assert "timestamp_granularities" in refused.message


@pytest.mark.parametrize(
    ("form", "text"),
    [("text", ECHO), ("srt", f"1\n00:00:00,000 --> 00:00:00,500\n{ECHO}\n\n"), ("vtt", VTT)],
)
def test_texts(transcriptions: Driver, url: str, form: str, text: str) -> None:
    assert transcriptions.generate(url, CLIP, response_format=form) == text


def test_events(transcriptions: Driver, url: str) -> None:
    *deltas, (kind, done) = transcriptions.stream(url, CLIP)
    assert {kind for kind, _ in deltas} == {"TranscriptionTextDeltaEvent"}
    assert kind == "TranscriptionTextDoneEvent"
    assert "".join(delta["delta"] for _, delta in deltas) == done["text"] == ECHO
    assert done["usage"]["output_tokens"] == 5


def test_a_broken_file(transcriptions: Driver, url: str) -> None:
    for how in ("generate", "stream"):
        outcome = transcriptions.call(how, url, base64.b64encode(b"hello").decode())
        assert outcome.error == "openai.BadRequestError"
        assert "file: it is not WAV, FLAC, MP3 or Ogg" in outcome.message
