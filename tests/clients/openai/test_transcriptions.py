"""OpenAI's client reads transcriptions in each format, and their events."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from tests.app.media.clips import clip_file
from tests.clients.driver import Driver, drivers
from tests.servers import LiveServer, options, serve

pytestmark = pytest.mark.clients

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
