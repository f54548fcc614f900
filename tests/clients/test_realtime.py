"""Realtime sessions of OpenAI's clients: text with tools, and transcription by Whisper."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import trustme

from tests.app.media.clips import wav
from tests.checkpoints.audio import clip
from tests.clients.agents.scripted import Model, call, said_by
from tests.clients.driver import Driver, drivers, driving_node
from tests.clients.test_sockets import QUESTION, WEATHER, Client, scripted_model, text_of
from tests.random_models import unpack
from tests.servers import LiveServer, http, serve

__all__ = ["scripted_model"]

pytestmark = pytest.mark.clients

WHISPER = Path(__file__).parents[1] / "golden" / "engines" / "whisper" / "whisper.tar.xz"
HEARD = "conversation.item.input_audio_transcription"

sockets = drivers("openai", "drive_openai_sockets")


def say(text: str) -> tuple[str, Any]:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return "conversation.item.create", {"item": item}


RESPOND = ("response.create", {"response": {"output_modalities": ["text"]}})


# -- text --------------------------------------------------------------------------------------------------------------

TEXT_TURN = [
    "session.updated", "conversation.item.added", "conversation.item.done", "response.created",
    "response.output_item.added", "conversation.item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "conversation.item.done", "response.done",
]  # fmt: skip


def kinds(events: list[Any]) -> list[str]:
    """The types of the events, with one for a run of deltas."""
    return [kind for kind, _ in itertools.groupby(event["type"] for event in events)]


def test_a_text_session(sockets: Driver, scripted_model: Model) -> None:
    scripted_model.says(lambda prompt: f"Reply {len(said_by('user', prompt))}.")
    client = Client(sockets, scripted_model.front, "realtime")
    assert client.opening[0]["session"]["type"] == "realtime"
    settings = {"type": "realtime", "output_modalities": ["text"], "instructions": "Be brief."}
    events = client.call(("session.update", {"session": settings}), say(QUESTION), RESPOND, until=["response.done"])
    assert kinds(events) == TEXT_TURN
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(events[-1]["response"]) == "Reply 1."
    assert len(deltas) > 1
    again = client.call(say("And of Italy?"), RESPOND, until=["response.done"])
    assert text_of(again[-1]["response"]) == "Reply 2."
    prompt = scripted_model.prompts[-1]
    assert (said_by("system", prompt), said_by("user", prompt)) == (["Be brief."], [QUESTION, "And of Italy?"])
    assert said_by("assistant", prompt) == ["Reply 1."]


def test_a_loop_of_tools(sockets: Driver, scripted_model: Model) -> None:
    """Four calls, one after another, whose results the model reads."""

    def answer(prompt: str) -> str:
        results = said_by("tool", prompt)
        return f"Read {' '.join(results)}." if len(results) == 4 else call("weather", city=f"C{len(results)}")

    scripted_model.says(answer)
    client = Client(sockets, scripted_model.front, "realtime")
    tool = {name: value for name, value in WEATHER.items() if name != "strict"}
    settings = {"type": "realtime", "output_modalities": ["text"], "tools": [tool]}
    events = client.call(("session.update", {"session": settings}), say(QUESTION), RESPOND, until=["response.done"])
    for number in range(4):
        assert "response.function_call_arguments.done" in kinds(events)
        [item] = events[-1]["response"]["output"]
        assert (item["type"], json.loads(item["arguments"])) == ("function_call", {"city": f"C{number}"})
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": f"{number} °C"}
        events = client.call(("conversation.item.create", {"item": result}), RESPOND, until=["response.done"])
    assert text_of(events[-1]["response"]) == "Read 0 °C 1 °C 2 °C 3 °C."
    assert len(scripted_model.prompts) == 5


def test_an_error_is_an_event(sockets: Driver, echo_server: LiveServer) -> None:
    client = Client(sockets, echo_server, "realtime")
    event = client.call(("response.cancel", {}), until=["error"])[-1]
    assert event["error"]["code"] == "response_cancel_not_active"
    wrong = {"type": "realtime", "output_modalities": ["audio"]}
    event = client.call(("session.update", {"session": wrong}), until=["error"])[-1]
    assert event["error"]["param"] == "session.output_modalities"
    short = ("response.create", {"response": {"output_modalities": ["text"], "max_output_tokens": 2}})
    done = client.call(say("a"), short, until=["response.done"])[-1]["response"]
    assert (done["status"], done["usage"]["output_tokens"]) == ("incomplete", 2)


@pytest.fixture
def encrypted_server(tmp_path: Path) -> Iterator[LiveServer]:
    certificate = tmp_path / "both.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    with serve("--engine", "echo", "--ssl-certfile", str(certificate)) as server:
        yield server


def test_the_client_for_node(encrypted_server: LiveServer) -> None:
    """It connects with TLS only."""
    encrypted_server.wait_ready()
    with driving_node("drive_openai") as driver:
        client = Client(driver, encrypted_server, "realtime")
        assert client.opening[0]["session"]["type"] == "realtime"
        respond = ("response.create", {"response": {"output_modalities": ["text"], "max_output_tokens": 4}})
        events = client.call(say(QUESTION), respond, until=["response.done"])
        assert kinds(events)[-5:] == TEXT_TURN[-5:]
        assert client.call(("response.cancel", {}), until=["error"])[-1]["error"]["type"] == "invalid_request_error"
        done = client.call(say(QUESTION), respond, until=["response.done"])[-1]["response"]
        assert done["usage"]["output_tokens"] == 4


# -- transcription -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Whisper with random weights, which makes a text of hundreds of tokens from any sound."""
    directory = tmp_path_factory.mktemp("whisper")
    unpack(WHISPER, directory)
    with serve(str(directory / "openvino"), "-o", "option.dtype=fp32") as server:
        server.wait_ready()
        yield server


def sound(seed: int, rate: int, bits: int) -> bytes:
    """A second of sound. Its bytes mean something in each format."""
    samples = numpy.resize(numpy.frombuffer(clip(1.0, seed).data, numpy.float32), rate)
    whole = (samples * 32767).astype("<i2")
    return whole.tobytes() if bits == 16 else (whole >> 8).astype("i1").tobytes()


def appends(data: bytes) -> list[tuple[str, Any]]:
    """The data in four events."""
    size = len(data) // 4
    pieces = [base64.b64encode(data[start : start + size]).decode() for start in range(0, len(data), size)]
    return [("input_audio_buffer.append", {"audio": piece}) for piece in pieces]


@pytest.mark.parametrize(
    ("format", "rate", "code", "bits"),
    [({"type": "audio/pcm", "rate": 24000}, 24000, 1, 16), ({"type": "audio/pcmu"}, 8000, 7, 8)],
    ids=["pcm", "pcmu"],
)
def test_a_transcript_is_that_of_http(
    sockets: Driver, whisper: LiveServer, format: Any, rate: int, code: int, bits: int
) -> None:
    heard = {"format": format, "transcription": {"model": "model", "language": "en"}, "turn_detection": None}
    update = ("session.update", {"session": {"type": "transcription", "audio": {"input": heard}}})
    client = Client(sockets, whisper, "realtime", intent="transcription")
    assert client.opening[0]["session"]["type"] == "transcription"
    items = []
    for seed in (1, 2):
        data = sound(seed, rate, bits)
        commit: tuple[str, dict[str, Any]] = ("input_audio_buffer.commit", {})
        events = client.call(update, *appends(data), commit, until=[f"{HEARD}.completed", f"{HEARD}.failed"])
        assert kinds(events) == [
            "session.updated", "input_audio_buffer.committed", "conversation.item.added", "conversation.item.done",
            f"{HEARD}.delta", f"{HEARD}.completed",
        ]  # fmt: skip
        deltas = [event["delta"] for event in events if event["type"] == f"{HEARD}.delta"]
        assert "".join(deltas) == events[-1]["transcript"]
        assert len(deltas) > 1
        file = wav(data, rate=rate, bits=bits, code=code)
        whole = http.post(f"{whisper.url}/v1/audio/transcriptions", files={"file": file}, data={"language": "en"})
        assert events[-1]["transcript"] == whole.json()["text"]
        items.append(events[-1]["item_id"])
    assert len({*items}) == 2


def test_an_unknown_model_is_refused_and_the_session_goes_on(sockets: Driver, whisper: LiveServer) -> None:
    client = Client(sockets, whisper, "realtime", intent="transcription")
    heard = {"transcription": {"model": "whisper-1"}, "turn_detection": None}
    update = ("session.update", {"session": {"type": "transcription", "audio": {"input": heard}}})
    error = client.call(update, until=["error", "session.updated"])[-1]
    assert error["error"]["param"] == "session.audio.input.transcription.model"
    commit: tuple[str, dict[str, Any]] = ("input_audio_buffer.commit", {})
    client.call(*appends(sound(1, 24000, 16)), commit, until=[f"{HEARD}.completed"])
