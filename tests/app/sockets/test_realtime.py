"""Realtime sessions: text turns in OpenAI's protocol, transcription in OpenAI's and in vLLM's."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from websockets.exceptions import ConnectionClosed

from handler.http.sockets.transcription import Transcriber
from tests.app.server import serve
from tests.app.sockets.client import open_socket, receive, send, until
from tests.servers import LiveServer

PATH = "/v1/realtime"


def say(text: str, **fields: Any) -> dict[str, Any]:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields}
    return {"type": "conversation.item.create", "item": item}


SHORT: dict[str, Any] = {"output_modalities": ["text"], "max_output_tokens": 4}
RESPOND = {"type": "response.create", "response": SHORT}


def test_a_text_turn_has_the_events_of_the_api(echo_server: LiveServer) -> None:
    with open_socket(echo_server, f"{PATH}?model=model") as client:
        update = {"type": "session.update", "session": {"type": "realtime", "instructions": "Short."}}
        send(client, update, say("hello"), RESPOND)  # the SDK sends them at once
        events = until(client, "response.done")
    assert [event["type"] for event in events] == [
        "session.created",
        "session.updated",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    assert len({event["event_id"] for event in events}) == len(events)
    done = events[-1]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
    (item,) = done["output"]
    assert item["content"][0]["text"] == "".join(event["delta"] for event in events if "delta" in event)
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + 4


def test_a_conversation_goes_on(echo_server: LiveServer) -> None:
    with open_socket(echo_server, PATH) as client:
        send(client, say("red"), RESPOND)
        first = until(client, "response.done")[-1]["response"]
        send(client, say("green"), RESPOND)
        second = until(client, "response.done")[-1]["response"]
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 3
        alone = {**RESPOND, "response": {**SHORT, "conversation": "none", "input": [say("blue")["item"]]}}
        send(client, alone)
        apart = until(client, "response.done")[-1]["response"]
        assert (apart["conversation_id"], apart["usage"]["input_tokens"]) == (None, first["usage"]["input_tokens"])


def test_items_are_inserted_shown_and_deleted(echo_server: LiveServer) -> None:
    with open_socket(echo_server, PATH) as client:
        receive(client)
        send(client, say("b", id="b"), {**say("a", id="a"), "previous_item_id": "root"})
        send(client, {**say("c", id="c"), "previous_item_id": "a"})
        events = [receive(client) for _ in range(6)]
        assert [event["previous_item_id"] for event in events] == [None, None, None, None, "a", "a"]
        send(client, {"type": "conversation.item.retrieve", "item_id": "c"})
        assert receive(client)["item"]["content"] == [{"type": "input_text", "text": "c"}]
        send(client, {"type": "conversation.item.delete", "item_id": "c"})
        assert receive(client)["type"] == "conversation.item.deleted"
        send(client, {"type": "conversation.item.retrieve", "item_id": "c", "event_id": "mine"})
        error = receive(client)["error"]
        assert (error["code"], error["param"], error["event_id"]) == ("item_not_found", "item_id", "mine")


def test_each_item_names_the_one_before_it(echo_server: LiveServer) -> None:
    with open_socket(echo_server, PATH) as client:
        send(client, say("b", id="b"), RESPOND)
        events = until(client, "response.done")
        send(client, {**say("a", id="a"), "previous_item_id": "root"}, say("c", id="c"), RESPOND)
        events += until(client, "response.done")
        first, second = (event["response"]["output"][0]["id"] for event in events if event["type"] == "response.done")
        before = {"b": None, first: "b", "a": None, "c": first, second: "c"}
        for kind in ("added", "done"):
            placed = [event for event in events if event["type"] == f"conversation.item.{kind}"]
            assert {event["item"]["id"]: event["previous_item_id"] for event in placed} == before


def test_one_response_at_a_time_and_its_cancel(echo_server: LiveServer) -> None:
    with open_socket(echo_server, PATH) as client:
        send(client, say("word " * 10), {"type": "response.create"}, {"type": "response.create"})
        events = until(client, "error")
        assert events[-1]["error"]["code"] == "conversation_already_has_active_response"
        send(client, {"type": "response.cancel"})
        done = until(client, "response.done")[-1]["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
        send(client, {"type": "response.cancel"})
        assert until(client, "error")[-1]["error"]["code"] == "response_cancel_not_active"
        send(client, RESPOND)
        assert until(client, "response.done")[-1]["response"]["status"] == "incomplete"


def test_a_cancelled_response_keeps_what_was_read() -> None:
    words = say("word " * 100)
    with (
        serve("--engine", "echo", "-o", "option.echo_tokens_per_second=20") as server,
        open_socket(server, PATH) as client,
    ):
        send(client, words, {"type": "response.create"})
        until(client, "response.output_text.delta")
        send(client, {"type": "response.cancel"})
        done = until(client, "response.done")[-1]["response"]
        assert [item["status"] for item in done["output"]] == ["incomplete"]
        send(client, {"type": "conversation.item.retrieve", "item_id": done["output"][0]["id"]})
        assert receive(client)["item"] == done["output"][0]
        alone = {"conversation": "none", "input": [words["item"]]}
        send(client, {"type": "response.create", "response": alone})
        id = until(client, "response.created")[-1]["response"]["id"]
        send(client, {"type": "response.cancel", "response_id": id})
        assert until(client, "response.done", "error")[-1]["response"]["status"] == "cancelled"


REFUSED = [
    ({"type": "session.update", "session": {"output_modalities": ["audio"]}}, "session.output_modalities"),
    ({"type": "session.update", "session": {"audio": {"output": "x"}}}, "session.audio.output"),
    ({"type": "session.update", "session": {"truncation": {"type": "retention_ratio"}}}, "session.truncation"),
    ({"type": "session.update", "session": {"include": ["x"]}}, "session.include"),
    ({"type": "session.update", "session": {"prompt": {"id": "x"}}}, "session.prompt"),
    ({"type": "session.update", "session": {"temperature": 1}}, "session.temperature"),
    ({"type": "session.update", "session": {"max_output_tokens": 0}}, "session.max_output_tokens"),
    ({"type": "session.update", "session": {"model": "other"}}, "session.model"),
    ({"type": "session.update"}, "session"),
    (say("x", role="tool"), "item.role"),
    (say("x", content="x"), "item.content"),
    (say("x", content=[{"type": "input_audio", "audio": ""}]), "item.content[0].type"),
    ({"type": "conversation.item.create", "item": {"type": "mcp_call"}}, "item.type"),
    ({**say("x"), "previous_item_id": "none"}, "previous_item_id"),
    ({"type": "conversation.item.truncate"}, "type"),
    ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "type"),
    ({"type": "response.create", "response": {"conversation": "new"}}, "response.conversation"),
    ({"type": "response.create", "response": {"output_modalities": ["audio"]}}, "response.output_modalities"),
    ({"type": "nothing"}, "type"),
    ({}, "type"),
]


@pytest.mark.parametrize(("event", "param"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(echo_server: LiveServer, event: Any, param: str) -> None:
    with open_socket(echo_server, PATH) as client:
        receive(client)
        send(client, event)
        error = receive(client)
        assert (error["type"], error["error"]["param"]) == ("error", param)
        send(client, say("x"))
        assert receive(client)["type"] == "conversation.item.added"


AUDIO = {
    "input": {
        "format": {"type": "audio/pcm", "rate": 24000},
        "noise_reduction": None,
        "transcription": {"model": "gpt-4o-mini-transcribe"},
        "turn_detection": {"type": "semantic_vad"},
    },
    "output": {"format": {"type": "audio/pcm", "rate": 24000}, "speed": 1, "voice": "ash"},
}
LOGPROBS = "item.input_audio_transcription.logprobs"


@pytest.mark.parametrize(
    "settings",
    [
        {"audio": AUDIO},
        {"audio": {"input": None, "output": {}}},
        {"audio": {"input": {"noise_reduction": None, "turn_detection": None}, "output": {"voice": None}}},
        {"audio": None},
        {"tracing": "auto"},
        {"tracing": {"workflow_name": "a"}},
        {"tracing": None},
        {"truncation": "auto"},
        {"truncation": None},
        {"include": [LOGPROBS]},
        {"include": None},
    ],
    ids=str,
)
def test_a_setting_without_effect_on_text_is_shown_as_it_was_sent(echo_server: LiveServer, settings: Any) -> None:
    """Agents send it in one event with their instructions and tools, which would be lost with it."""
    with open_socket(echo_server, PATH) as client:
        receive(client)
        send(client, {"type": "session.update", "session": {"type": "realtime", "instructions": "Brief.", **settings}})
        session = receive(client)["session"]
        assert {**session, **settings, "instructions": "Brief."} == session
        send(client, say("x"), RESPOND)
        assert until(client, "response.done", "error")[-1]["response"]["status"] == "incomplete"


SETTINGS = (
    "type", "model", "instructions", "tools", "tool_choice", "max_output_tokens", "parallel_tool_calls", "reasoning",
    "output_modalities", "prompt", "temperature", "a_name_of_tomorrow",
)  # fmt: skip


@pytest.mark.parametrize("intent", ["", "?intent=transcription"])
def test_a_setting_of_null_changes_nothing(echo_server: LiveServer, hearing_server: LiveServer, intent: str) -> None:
    """Clients dump their types with all fields."""
    with open_socket(hearing_server if intent else echo_server, PATH + intent) as client:
        receive(client)
        kind = "transcription" if intent else "realtime"
        for name in SETTINGS:
            send(client, {"type": "session.update", "session": {"type": kind, name: None}})
            assert receive(client)["type"] == "session.updated", name


UNREADABLE = [
    ({"type": "function_call_output", "call_id": "none", "output": "x"}, "no earlier function_call"),
    ({"type": "function_call", "name": "f", "arguments": "{}"}, "item.call_id must be a string"),
    ({"type": "function_call", "call_id": "c", "name": 5, "arguments": "{}"}, "item.name must be a string"),
    (say("x", content=[{"type": "input_text", "text": None}])["item"], "item.content[0]"),
    (say("x", role="assistant", content=[{"type": "output_text", "text": 5}])["item"], "item.content[0]"),
    (say("x", content=[{"type": "input_image"}])["item"], "item.content[0]"),
    (
        say("x", content=[{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}])["item"],
        "item.content[0].image_url",
    ),
    (say("x", content=[{"type": "input_image", "image_url": "data:image/png;base64,?"}])["item"], "item.content[0]"),
]


@pytest.mark.parametrize(("item", "words"), UNREADABLE)
def test_an_item_that_no_response_can_read_is_refused_at_once(echo_server: LiveServer, item: Any, words: str) -> None:
    with open_socket(echo_server, PATH) as client:
        receive(client)
        send(client, say("one"), {"type": "conversation.item.create", "item": item})
        assert words in until(client, "error")[-1]["error"]["message"]
        for _ in range(2):
            send(client, RESPOND)
            assert until(client, "response.done", "error")[-1]["response"]["status"] == "incomplete"


CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
OUTPUT = {"type": "conversation.item.create", "item": {"type": "function_call_output", "output": "noon"}}


def test_the_output_of_a_call_is_accepted_before_the_end_of_the_response(echo_server: LiveServer) -> None:
    """Agents run a tool as soon as its call is complete."""
    response = {"output_modalities": ["text"], "tools": [CLOCK], "max_output_tokens": 1000}
    with open_socket(echo_server, PATH) as client:
        send(client, say("x"), {"type": "response.create", "response": response})
        events = until(client, "response.function_call_arguments.done", "response.done")
        assert events[-1]["type"] == "response.function_call_arguments.done"
        until(client, "response.output_item.done")
        item = {**OUTPUT["item"], "call_id": events[-1]["call_id"]}  # type: ignore[dict-item]
        send(client, {**OUTPUT, "item": {**item, "id": "output"}}, {"type": "response.cancel"})
        kinds = [(event["type"], event.get("item", {}).get("id")) for event in until(client, "response.done", "error")]
        assert ("conversation.item.done", "output") in kinds


def test_the_output_of_a_deleted_call_is_named_until_it_is_deleted_too(echo_server: LiveServer) -> None:
    call = {"type": "function_call", "id": "call", "call_id": "c", "name": "clock", "arguments": "{}"}
    output = {**OUTPUT, "item": {**OUTPUT["item"], "id": "output", "call_id": "c"}}  # type: ignore[dict-item]
    with open_socket(echo_server, PATH) as client:
        receive(client)
        send(client, say("x"), {"type": "conversation.item.create", "item": call})
        send(client, {**output, "previous_item_id": "root"})
        assert until(client, "error")[-1]["error"]["message"].endswith("no earlier function_call has this id")
        send(client, output, RESPOND)
        assert until(client, "response.done")[-1]["response"]["status"] == "incomplete"
        send(client, {"type": "conversation.item.delete", "item_id": "call"}, RESPOND)
        refused = until(client, "error", "response.done")[-1]
        assert "'output'" in refused["error"]["message"]
        send(client, {"type": "conversation.item.delete", "item_id": "output"}, RESPOND)
        assert until(client, "response.done", "error")[-1]["response"]["status"] == "incomplete"


def test_a_refused_response_fails_and_leaves_the_session_open(echo_server: LiveServer) -> None:
    with open_socket(echo_server, PATH) as client:
        send(client, {"type": "response.create", "response": {"tools": [{"type": "mcp"}]}})
        done = until(client, "response.done")[-1]["response"]
        assert (done["status"], done["status_details"]["error"]["type"]) == ("failed", "invalid_request_error")
        send(client, say("x"), RESPOND)
        assert until(client, "response.done")[-1]["response"]["status"] == "incomplete"


@pytest.mark.parametrize("message", ["{", "[]", "null"])
def test_a_message_that_is_no_object_gets_an_error_of_the_session(echo_server: LiveServer, message: str) -> None:
    with open_socket(echo_server, PATH) as client:
        receive(client)
        client.send(message)
        event = receive(client)
        assert (event["type"], event["event_id"]) == ("error", "event_2")
        assert (event["error"]["type"], event["error"]["event_id"]) == ("invalid_request_error", None)
        send(client, say("x"))
        assert receive(client)["type"] == "conversation.item.added"


def test_reasoning_is_not_shown_and_does_not_count() -> None:
    with (
        serve("--engine", "echo", "-o", "option.reasoning_parser=qwen3") as server,
        open_socket(server, PATH) as client,
    ):
        send(client, say("<think>Hm</think> Yes"), {"type": "response.create", "response": {"max_output_tokens": 32}})
        events = until(client, "response.done")
    done = events[-1]["response"]
    assert [item["type"] for item in done["output"]] == ["message"]
    assert {event["output_index"] for event in events if "output_index" in event} == {0}
    assert {event["item_id"] for event in events if "item_id" in event} == {done["output"][0]["id"]}


# -- transcription -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hearing_server() -> Iterator[LiveServer]:
    with serve("--engine", "echo", "-o", "option.task=automatic-speech-recognition") as server:
        yield server


DELTA = "conversation.item.input_audio_transcription.delta"
FAILED = "conversation.item.input_audio_transcription.failed"


def audio(seconds: float, rate: int, size: int = 2) -> str:
    return base64.b64encode(bytes(int(seconds * rate) * size)).decode()


@pytest.mark.parametrize(
    ("format", "rate", "size"),
    [
        (None, 24000, 2),
        ({"type": "audio/pcm", "rate": 16000}, 16000, 2),
        ({"type": "audio/pcm", "rate": 48000}, 48000, 2),
        ({"type": "audio/pcmu"}, 8000, 1),
        ({"type": "audio/pcma"}, 8000, 1),
    ],
)
def test_committed_audio_is_transcribed(hearing_server: LiveServer, format: Any, rate: int, size: int) -> None:
    settings = {"format": format, "transcription": {"language": "en"}, "turn_detection": None}
    append = {"type": "input_audio_buffer.append", "audio": audio(0.5, rate, size)}
    with open_socket(hearing_server, f"{PATH}?intent=transcription") as client:
        created = receive(client)
        assert created["session"]["type"] == "transcription"
        send(client, {"type": "session.update", "session": {"type": "transcription", "audio": {"input": settings}}})
        updated = receive(client)["session"]["audio"]["input"]
        assert (updated["turn_detection"], updated["transcription"]) == (None, {"language": "en"})
        send(client, append, append, {"type": "input_audio_buffer.commit"})
        events = until(
            client,
            "conversation.item.input_audio_transcription.completed",
            "conversation.item.input_audio_transcription.failed",
        )
    assert [event["type"] for event in events[:3]] == [
        "input_audio_buffer.committed", "conversation.item.added", "conversation.item.done",
    ]  # fmt: skip
    assert events[-1]["type"].endswith("completed"), events[-1]
    assert {event["item_id"] for event in events if "item_id" in event} == {events[0]["item_id"]}


def test_cleared_audio_is_not_transcribed(hearing_server: LiveServer) -> None:
    append = {"type": "input_audio_buffer.append", "audio": audio(1, 24000)}
    commit = {"type": "input_audio_buffer.commit"}
    with open_socket(hearing_server, f"{PATH}?intent=transcription") as client:
        receive(client)
        send(client, append, {"type": "input_audio_buffer.clear"}, commit)
        assert receive(client)["type"] == "input_audio_buffer.cleared"
        assert receive(client)["error"]["code"] == "input_audio_buffer_commit_empty"
        send(client, append, commit)
        assert receive(client)["type"] == "input_audio_buffer.committed"


def test_minutes_of_audio_are_transcribed(hearing_server: LiveServer) -> None:
    """In JSON, so much audio would be too long a string."""
    append = {"type": "input_audio_buffer.append", "audio": audio(50, 24000)}
    with open_socket(hearing_server, f"{PATH}?intent=transcription") as client:
        send(client, *[append] * 3, {"type": "input_audio_buffer.commit"})
        assert until(client, DELTA, FAILED)[-1]["type"] == DELTA


@pytest.mark.parametrize("name", ["mine", "model", "no"])
def test_a_model_has_the_names_that_it_has_in_requests(name: str) -> None:
    """Those in `option.served_model_name`, and its own."""
    names = ("-o", "option.served_model_name=mine", "-o", "option.task=automatic-speech-recognition")
    word = {"transcription": {"model": name}}
    updates = [
        {"type": "session.update", "session": {"type": "realtime", "model": name}},
        {"type": "session.update", "session": {"type": "transcription", "audio": {"input": word}}},
        {"type": "session.update", "model": name},
    ]
    with serve("--engine", "echo", *names) as server:
        status = server.post({"file": "", "model": name}, "/v1/audio/transcriptions").status_code
        with open_socket(server, PATH) as client:
            receive(client)
            send(client, *updates, {"type": "nothing"})
            events = [receive(client) for _ in range(3)]
    kinds = [event["type"] for event in events]
    assert (kinds == ["error"] * 3) == (status == 404) == (name == "no")
    assert "session.updated" in kinds or events[0]["error"]["param"] == "session.model"


def test_the_prompt_of_a_transcription_may_be_any_text(hearing_server: LiveServer) -> None:
    """Such as the text that begins another part of a form."""
    prompt = '\r\n--\r\nContent-Disposition: form-data; name="language"\r\n\r\nxx'
    settings = {"transcription": {"language": "en", "prompt": prompt}}
    update = {"type": "session.update", "session": {"type": "transcription", "audio": {"input": settings}}}
    append = {"type": "input_audio_buffer.append", "audio": audio(1, 24000)}
    with open_socket(hearing_server, f"{PATH}?intent=transcription") as client:
        send(client, update, append, {"type": "input_audio_buffer.commit"})
        assert until(client, DELTA, FAILED)[-1]["type"] == DELTA


def test_vllms_client_is_answered_in_its_own_words(hearing_server: LiveServer) -> None:
    with open_socket(hearing_server, PATH) as client:
        created = receive(client)
        assert (created["type"], type(created["id"]), type(created["created"])) == ("session.created", str, int)
        send(client, {"type": "session.update", "model": "model"}, {"type": "input_audio_buffer.commit"})
        send(client, {"type": "input_audio_buffer.append", "audio": audio(1, 16000)})
        send(client, {"type": "input_audio_buffer.commit", "final": True})
        events = until(client, "transcription.done", "error")
        assert events[-1]["type"] == "transcription.done", events[-1]
        assert events[-1]["text"] == "".join(event["delta"] for event in events[:-1])
        assert {event["logprobs"] for event in events[:-1]} == {None}
        send(client, {"type": "session.update", "model": "other"})
        assert receive(client)["code"] == "model_not_found"
        send(client, {"type": "session.update", "model": "model", "include": ["x"]})
        refused = receive(client)
        assert (refused["code"], "include" in refused["error"]) == ("invalid_event", True)
        send(client, {"type": "session.update", "model": "model", "language": ["en"]})
        assert receive(client) == {"type": "error", "error": "language: must be a string", "code": "invalid_event"}
        send(client, {"type": "input_audio_buffer.append", "audio": "?"})
        assert receive(client)["code"] == "invalid_audio"
        send(client, {"type": "nothing"})
        assert receive(client)["code"] == "unknown_event"


@pytest.mark.parametrize(
    ("update", "rate"),
    [
        ({"model": "model"}, 16_000),
        ({"session": {"type": "transcription"}}, 24_000),
        ({"session": {"type": "transcription", "audio": {"input": {"format": {"type": "audio/pcmu"}}}}}, 8_000),
    ],
    ids=["vLLM", "OpenAI", "telephone"],
)
def test_the_file_that_is_transcribed_states_the_rate(hearing_server: LiveServer, update: Any, rate: int) -> None:
    files: list[bytes] = []
    original = Transcriber.file

    def file(transcriber: Transcriber, audio: bytes) -> bytes:
        files.append(original(transcriber, audio))
        return files[-1]

    with mock.patch.object(Transcriber, "file", file), open_socket(hearing_server, PATH) as client:
        send(client, {"type": "session.update", **update})
        send(client, {"type": "input_audio_buffer.append", "audio": audio(1, rate)})
        send(client, {"type": "input_audio_buffer.commit", **({"final": True} if "model" in update else {})})
        until(client, "transcription.done", DELTA.replace("delta", "completed"), "error")
    assert [int.from_bytes(data[24:28], "little") for data in files] == [rate]


def test_a_connection_of_vllms_client_has_several_sessions(hearing_server: LiveServer) -> None:
    append = {"type": "input_audio_buffer.append", "audio": audio(0.5, 16000)}
    final = {"type": "input_audio_buffer.commit", "final": True}
    with open_socket(hearing_server, PATH) as client:
        receive(client)
        send(client, {"type": "session.update", "model": "model"})
        for messages in ([append, final], [{"type": "session.update", "model": "model"}, append, final]):
            send(client, *messages)
            assert until(client, "transcription.done", "error")[-1]["type"] == "transcription.done"
        send(client, append, {"type": "input_audio_buffer.commit"}, {"type": "input_audio_buffer.commit"}, final)
        assert until(client, "transcription.done", "error")[-1]["type"] == "transcription.done"
        send(client, final)
        assert receive(client)["code"] == "invalid_audio"
        send(client, append, final, append, final)  # audio after a final commit is the next transcript's
        for _ in range(2):
            assert until(client, "transcription.done", "error")[-1]["type"] == "transcription.done"


def test_vllms_client_must_send_its_model_first(hearing_server: LiveServer) -> None:
    with open_socket(hearing_server, PATH) as client:
        receive(client)
        send(client, {"type": "input_audio_buffer.commit", "final": True})
        refused = receive(client)
        assert (type(refused["error"]), refused["code"]) == (str, "model_not_validated")


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_commit_empty"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "invalid_audio_format"),
        ({"type": "input_audio_buffer.append", "audio": "%"}, "invalid_audio"),
        ({"type": "response.create"}, "not_supported"),
        ({"type": "session.update", "session": {"type": "transcription", "audio": {"input": 5}}}, "invalid_type"),
        (
            {
                "type": "session.update",
                "session": {"type": "transcription", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}},
            },
            "not_supported",
        ),
    ],
)
def test_audio_that_cannot_be_used_is_refused(hearing_server: LiveServer, event: Any, code: str) -> None:
    with open_socket(hearing_server, PATH) as client:
        receive(client)
        send(client, event)
        assert receive(client)["error"]["code"] == code


def test_the_model_in_the_query_is_that_of_the_session(echo_server: LiveServer) -> None:
    with open_socket(echo_server, f"{PATH}?model=model") as client:
        assert receive(client)["session"]["model"] == "model"
        send(client, {"type": "session.update", "session": {"type": "realtime", "instructions": "Be brief."}})
        assert receive(client)["session"]["model"] == "model"
    with open_socket(echo_server, f"{PATH}?model=gpt-realtime") as client:
        error = receive(client)["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(30)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008
