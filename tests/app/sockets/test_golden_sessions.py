"""Whole sessions over WebSockets, frame by frame, with the fields that each client sends; `>` is the client's.

`pytest -n 0 tests/app/sockets/test_golden_sessions.py --update-golden` writes them anew.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.server import serve
from tests.app.sockets.client import open_socket, receive
from tests.servers import LiveServer, options

GOLDEN = Path(__file__).parents[2] / "golden" / "sockets"
WRITTEN = "`pytest -n 0 tests/app/sockets/test_golden_sessions.py --update-golden` writes it; read what it wrote"

RESPONSES, REALTIME, INVOKE = "/v1/responses", "/v1/realtime", "/invocations-bidirectional-stream"
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
DONE = ("response.done", "error")
LAST = "the id of the last response"
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": False}
SILENCE = base64.b64encode(bytes(48)).decode()


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def create(input: Any, **more: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """An event of OpenAI's clients for Responses, and what its response ends with."""
    return {"type": "response.create", "model": "model", "input": input, "max_output_tokens": 3, **more}, ENDS


CODEX = {
    "instructions": "Be brief.", "tools": [CLOCK], "tool_choice": "auto", "parallel_tool_calls": False, "store": False,
    "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0", "client_metadata": {"a": "b"},
}  # fmt: skip
CALL = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "noon"}

Step = tuple[dict[str, Any], tuple[str, ...] | None]

SESSIONS: dict[str, tuple[str, list[Step]]] = {
    "responses_openai": (
        RESPONSES,
        [
            create("one two", store=False),
            create("three", store=False, previous_response_id=LAST),
            create("four", store=False, previous_response_id="resp_0"),
            create("five", store=False, stream_id="a"),
            ({"type": "response.steer", "previous_response_id": "resp_0", "input": "x"}, ("response.steer.failed",)),
        ],
    ),
    "responses_codex": (
        RESPONSES,
        [
            create([user("one two")], **CODEX, generate=False),
            create([user("one two")], **CODEX, previous_response_id=LAST),
            create([CALL, OUTPUT], **CODEX, previous_response_id=LAST),
        ],
    ),
    "realtime_openai": (
        REALTIME,
        [
            ({"type": "session.update", "session": {"instructions": "Be brief."}}, ("session.updated",)),
            ({"type": "conversation.item.create", "item": user("one two")}, ("conversation.item.done",)),
            ({"type": "response.create", "response": {"max_output_tokens": 3}}, DONE),
            ({"type": "response.create", "response": {"output_modalities": ["audio"]}}, DONE),
        ],
    ),
    "invoke_lmi": (
        INVOKE,
        [
            ({"inputs": "one two", "parameters": {"max_new_tokens": 2}, "stream": True}, ()),
            ({"inputs": "one two", "parameters": {"max_new_tokens": 0}}, ("error",)),
        ],
    ),
    "transcription_openai": (
        f"{REALTIME}?intent=transcription",
        [
            ({"type": "input_audio_buffer.append", "audio": SILENCE}, None),
            (
                {"type": "input_audio_buffer.commit"},
                ("conversation.item.input_audio_transcription.completed", "error"),
            ),
        ],
    ),
    "transcription_vllm": (
        REALTIME,
        [
            ({"type": "session.update", "model": "model"}, None),
            ({"type": "input_audio_buffer.append", "audio": SILENCE}, None),
            ({"type": "input_audio_buffer.commit"}, None),
            ({"type": "input_audio_buffer.commit", "final": True}, ("transcription.done", "error")),
        ],
    ),
}  # fmt: skip
"""The path and, for each message, the types of events that end its response, or None if it gets no response. The chunks
of LMI have no type.
"""


@pytest.fixture(scope="module")
def hearing_server() -> Iterator[LiveServer]:
    with serve(
        "--engine", "echo", *options("option.task=automatic-speech-recognition", "option.max_model_len=12")
    ) as server:
        yield server


class Transcript:
    """The frames of a session, in which numbers replace the ids in the order of their first use."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.last = ""
        self._ids: dict[str, str] = {}

    def add(self, mark: str, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False)
        text = re.sub(r'"(created|created_at|completed_at)": [0-9]+', r'"\1": 0', text)
        self.lines.append(f"{mark} {re.sub(r'([a-z]+)_([0-9a-f]{24,})', self._number, text)}")

    def _number(self, found: re.Match[str]) -> str:
        return self._ids.setdefault(found[0], f"{found[1]}_{len(self._ids) + 1}")


def play(server: LiveServer, path: str, messages: list[Any]) -> str:
    transcript = Transcript()
    with open_socket(server, path) as client:
        if path.startswith(REALTIME):
            transcript.add("<", receive(client))
        for message, ends in messages:
            if message.get("previous_response_id") == LAST:
                message = {**message, "previous_response_id": transcript.last}
            client.send(json.dumps(message))
            transcript.add(">", message)
            while ends is not None:
                event = receive(client)
                transcript.add("<", event)
                transcript.last = event.get("response", {}).get("id", transcript.last)
                if event.get("type") in ends or (not ends and event.get("generated_text") is not None):
                    break
    return "\n".join(transcript.lines) + "\n"


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session(
    name: str, echo_server: LiveServer, hearing_server: LiveServer, request: pytest.FixtureRequest
) -> None:
    server = hearing_server if name.startswith("transcription") else echo_server
    text, file = play(server, *SESSIONS[name]), GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), WRITTEN


def test_each_file_is_of_a_session() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {*SESSIONS}
