"""The messages that real clients send over WebSockets, recorded, are those of tests/golden/sockets."""

from __future__ import annotations

import json
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.app.sockets.test_golden_sessions import GOLDEN, LAST, SESSIONS, hearing_server
from tests.clients.agents.scripted import Model, call, said_by
from tests.clients.agents.test_agents import QUESTION, Agent, Codex, Trap, trap
from tests.clients.driver import Driver, drivers, driving_node, python_client, skipped_without
from tests.clients.recorder import Recorder, recording
from tests.clients.test_bidirectional import KEYS, TEXT, encoded, endpoint_of, part
from tests.clients.test_bidirectional import Client as AwsClient
from tests.clients.test_sockets import Client, responses_sockets, scripted_model
from tests.deploy.local.servers import local_process
from tests.servers import LiveServer, wait_for

__all__ = ["hearing_server", "responses_sockets", "scripted_model", "trap"]

pytestmark = pytest.mark.clients

sockets = drivers("openai", "drive_openai_sockets")

_ID = re.compile(r"\b(resp|msg|call|fc|fco)_[0-9a-f-]{20,}|\b(resp|msg|fc|fco)_[0-9]+\b")
_WORDING = {
    "arguments", "call_id", "content", "description", "instructions", "name", "output", "parameters",
    "prompt_cache_key", "text", "strict",
}  # fmt: skip
"""Fields whose values differ from one run of an agent to the next; only that they are there is compared."""


def golden(name: str) -> list[Any]:
    """The client's messages in a golden file."""
    lines = (GOLDEN / f"{name}.txt").read_text().splitlines()
    return [json.loads(line[2:]) for line in lines if line.startswith("> ")]


def without_ids(value: Any) -> Any:
    """A message with one id for all of a kind."""
    return json.loads(_ID.sub(lambda found: f"{found[1] or found[2]}_", json.dumps(value)))


def form(value: Any) -> Any:
    """The fields of a message, its kinds of items and parts, and the values that say how it is to be read."""
    if isinstance(value, list):
        forms: list[Any] = []
        for element in map(form, value):
            if element not in forms:
                forms.append(element)
        return forms
    if not isinstance(value, dict):
        return value
    fields = {name: part for name, part in value.items() if name != "max_output_tokens"}
    return {name: _form_of(name, part) for name, part in fields.items()}


def _form_of(name: str, value: Any) -> Any:
    if name == "client_metadata":
        return sorted(value)
    if name in _WORDING and not isinstance(value, list):
        return type(value).__name__
    return form(value)


def forms(messages: list[Any]) -> list[Any]:
    return [form(message) for message in without_ids(messages)]


# -- openai ------------------------------------------------------------------------------------------------------------


def play(driver: Driver, recorder: Recorder, name: str, resource: str, **query: str) -> None:
    """Have a client send the messages of a golden session, and compare what arrives."""
    client = Client(driver, recorder, resource, **query)
    last = ""
    for message, ends in SESSIONS[name][1]:
        fields = {key: value for key, value in message.items() if key != "type"}
        if fields.get("previous_response_id") == LAST:
            fields["previous_response_id"] = last
        for event in client.call((message["type"], fields), until=ends or ()):
            last = (event.get("response") or {}).get("id", last)
    assert without_ids(received(recorder, name)) == without_ids(golden(name))


def received(recorder: Recorder, name: str) -> list[Any]:
    """The messages of the newest connection, as many as the golden session has."""
    wait_for(lambda: len(recorder.sessions[-1]) >= len(golden(name)), 20, "a message has not arrived")
    return recorder.sessions[-1]


def test_responses_of_openai(responses_sockets: Driver, echo_server: LiveServer) -> None:
    with recording(echo_server.port) as recorder:
        play(responses_sockets, recorder, "responses_openai", "responses")


def test_realtime_of_openai(sockets: Driver, echo_server: LiveServer) -> None:
    with recording(echo_server.port) as recorder:
        play(sockets, recorder, "realtime_openai", "realtime")


def test_realtime_of_openai_for_node(echo_server: LiveServer) -> None:
    """It connects with TLS only."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(tls)
    with recording(echo_server.port, tls) as recorder, driving_node("drive_openai") as driver:
        play(driver, recorder, "realtime_openai", "realtime")


def test_transcription_of_openai(sockets: Driver, hearing_server: LiveServer) -> None:
    with recording(hearing_server.port) as recorder:
        play(sockets, recorder, "transcription_openai", "realtime", intent="transcription")


# -- agents ------------------------------------------------------------------------------------------------------------


def test_responses_of_openai_agents(scripted_model: Model) -> None:
    scripted_model.says(lambda prompt: "Done." if said_by("tool", prompt) else call("weather", city="Paris"))
    with recording(scripted_model.front.port) as recorder:
        driver = python_client("agents", "drive_openai_agents", "async")
        assert Agent("openai-agents", "socket", driver, recorder.url).answers(QUESTION) == "Done."
        messages = received(recorder, "responses_agents")
    assert forms(messages) == forms(golden("responses_agents"))


def test_responses_of_codex(scripted_model: Model, tmp_path: Path, trap: Trap) -> None:
    with skipped_without(), recording(scripted_model.front.port) as recorder:
        codex = Codex(tmp_path, recorder.url, trap)
        scripted_model.says(lambda prompt: "FOUND" if said_by("tool", prompt) else codex.runs("echo 1"))
        assert "FOUND" in codex.answers("Compute.")
        messages = received(recorder, "responses_codex")
    expected = golden("responses_codex")
    expected[-1]["input"] = [item for item in expected[-1]["input"] if item["type"] != "function_call"]
    assert forms(messages) == forms(expected)


# -- SageMaker ---------------------------------------------------------------------------------------------------------


def test_requests_of_the_sdk_of_aws(echo_server: LiveServer) -> None:
    """Each part is a message: the client's JSON as it is."""
    echo_server.wait_ready()
    with recording(echo_server.port) as recorder, skipped_without():
        arguments = ("--container", recorder.url, "--bidirectional-port", "0")
        with local_process(*arguments, variables=KEYS) as local:
            client = AwsClient(
                python_client("bidirectional", "drive_bidirectional", "async"), endpoint_of(local, recorder)
            )
            parts = [part(encoded(message), **TEXT) for message, _ in SESSIONS["invoke_lmi"][1]]
            client.read(*parts, events=3)
        assert received(recorder, "invoke_lmi") == golden("invoke_lmi")
