"""Whole sessions over WebSockets, frame by frame, with the fields that each client sends; `>` is the client's.

tests/clients/test_recorded_sessions.py compares these fields with those of the real clients. Two things differ in the
sessions of agents: `max_output_tokens` keeps the files short, and Codex' last message has the call that echo cannot
make.

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
CLOCK = {
    "type": "function",
    "name": "clock",
    "description": "The time.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
TEXT = {"type": "realtime", "output_modalities": ["text"], "instructions": "Be brief."}
_INPUT = {
    "format": {"type": "audio/pcm", "rate": 24000},
    "transcription": {"model": "model", "language": "en"},
    "turn_detection": None,
}
HEARING = {"type": "transcription", "audio": {"input": _INPUT}}
SILENCE = base64.b64encode(bytes(48)).decode()


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def said(role: str, text: str) -> dict[str, Any]:
    """A message of Codex's."""
    return {**user(text), "id": "msg_0", "role": role}


def create(input: Any, **more: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """An event of OpenAI's clients for Responses, and what its response ends with."""
    return {"type": "response.create", "model": "model", "input": input, "max_output_tokens": 3, **more}, ENDS


CODEX = {
    "tools": [CLOCK, {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [CLOCK]}],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False,
    "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0",
    "client_metadata": {
        "session_id": "0", "thread_id": "0", "turn_id": "", "x-codex-installation-id": "0",
        "x-codex-turn-metadata": "{}", "x-codex-window-id": "0", "x-codex-ws-stream-request-start-ms": "0",
    },
}  # fmt: skip
TURN = {**CODEX, "client_metadata": {**CODEX["client_metadata"], "root_turn_id": "0"}}  # type: ignore[dict-item]
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "noon"}
AGENTS = {"instructions": "Be brief.", "include": [], "tools": [{**CLOCK, "strict": True}], "stream": True}
ASKED = {"content": "one two", "role": "user"}
CALL = {
    "arguments": "{}",
    "call_id": "c",
    "name": "clock",
    "type": "function_call",
    "id": "fc_0",
    "status": "completed",
}

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
            create([said("developer", "one two")], **CODEX, generate=False),
            create([said("developer", "three"), said("user", "four")], **TURN, previous_response_id=LAST),
            create([CALL, {**OUTPUT, "id": "fco_0"}], **TURN, previous_response_id=LAST),
        ],
    ),
    "responses_agents": (
        RESPONSES,
        [create([ASKED], **AGENTS), create([ASKED, CALL, OUTPUT], **AGENTS)],
    ),
    "realtime_openai": (
        REALTIME,
        [
            ({"type": "session.update", "session": TEXT}, ("session.updated",)),
            ({"type": "conversation.item.create", "item": user("one two")}, ("conversation.item.done",)),
            ({"type": "response.create", "response": {"output_modalities": ["text"], "max_output_tokens": 3}}, DONE),
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
            ({"type": "session.update", "session": HEARING}, ("session.updated", "error")),
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
