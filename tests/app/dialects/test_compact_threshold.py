"""`context_management` of /v1/responses: a conversation whose prompt exceeds a threshold is summarized first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.dialects.test_compaction import ANN, HISTORY, RESPONSES, ask, lines_of, refusal
from tests.app.server import serve
from tests.app.sockets.client import open_socket, send, until
from tests.servers import LiveServer, http, options, wait_for

SUMMARY = "Summary of the earlier conversation, which it replaces:"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server whose engine repeats the prompt until the context is full."""
    with serve("--engine", "echo", *options("option.responses_store=memory", "option.max_model_len=600")) as server:
        yield server


def above(threshold: int | None) -> dict[str, Any]:
    entry = {"type": "compaction", **({} if threshold is None else {"compact_threshold": threshold})}
    return {"context_management": [entry]}


def num_tokens(server: LiveServer, input: Any, **more: Any) -> int:
    """The tokens of an input that is not summarized."""
    number: int = ask(server, input, f"{RESPONSES}/input_tokens", max_output_tokens=None, **more)["input_tokens"]
    return number


def text_of(response: Any) -> str:
    text: str = response["output"][-1]["content"][0]["text"]
    return text


def test_a_conversation_is_summarized_only_above_its_threshold(server: LiveServer) -> None:
    before = num_tokens(server, HISTORY)
    plain = ask(server, HISTORY)
    same = ask(server, HISTORY, **above(before))
    assert [item["type"] for item in same["output"]] == ["message"]
    assert (text_of(same), same["usage"]) == (text_of(plain), plain["usage"])
    response = ask(server, HISTORY, max_output_tokens=40, **above(before - 1))
    assert [item["type"] for item in response["output"]] == ["compaction", "message"]
    text = text_of(response)
    assert text.index("remember 42") < text.index(SUMMARY)
    item = response["output"][0]
    assert item["id"][:4] == "cmp_"
    asked = num_tokens(server, [*HISTORY, {"type": "compaction_trigger"}])
    after = num_tokens(server, [*HISTORY, item])
    usage = response["usage"]
    assert usage["input_tokens"] == asked + after
    assert usage["output_tokens"] == (600 - asked) // 2 + 40
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_the_response_is_that_to_the_summary_in_a_next_request(server: LiveServer) -> None:
    response = ask(server, HISTORY, max_output_tokens=200, **above(5))
    item, message = response["output"]
    assert text_of(ask(server, [*HISTORY, item], max_output_tokens=200)) == text_of(response)
    rest = [item, message, {"role": "user", "content": "next"}]
    whole, cut = ([*HISTORY[:number], *rest] for number in (4, 2))
    assert num_tokens(server, whole) == num_tokens(server, cut), "a client need not drop what the summary stands for"
    assert text_of(ask(server, whole)) == text_of(ask(server, cut))


def test_a_stream_begins_with_the_summary(server: LiveServer) -> None:
    body = {"model": "model", "input": HISTORY, "stream": True, "max_output_tokens": 3, **above(5)}
    events = [json.loads(line[6:]) for line in lines_of(server, body)]
    types = [event["type"].removeprefix("response.") for event in events]
    assert types[:5] == [
        "created", "in_progress", "output_item.added", "compaction.compacting", "output_item.done",
    ]  # fmt: skip
    assert types[5:7] == ["output_item.added", "content_part.added"]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["output_index"] for event in events if "output_index" in event][:3] == [0, 0, 0]
    assert {event["output_index"] for event in events[5:] if "output_index" in event} == {1}
    item = events[4]["item"]
    completed = events[-1]["response"]
    assert [item["type"] for item in completed["output"]] == ["compaction", "message"]
    assert completed["output"][0] == item
    document = ask(server, HISTORY, max_output_tokens=3, **above(5))
    assert completed["usage"] == document["usage"]
    assert text_of(completed) == text_of(document)


def test_a_stored_conversation_goes_on_after_its_summary(server: LiveServer) -> None:
    first = ask(server, HISTORY)
    second = ask(server, "and 43", previous_response_id=first["id"], max_output_tokens=60, **above(5))
    assert [item["type"] for item in second["output"]] == ["compaction", "message"]
    third = ask(server, "go on", previous_response_id=second["id"], max_output_tokens=None)
    before, summary = text_of(third).split(SUMMARY)[:2]
    assert "and 43" in before
    assert "remember 42" not in before, "it is not the newest message of the user"
    assert "tool_response" not in before
    assert "remember 42" in summary
    stored = http.get(f"{server.url}{RESPONSES}/{second['id']}", headers=ANN).json()
    assert stored["output"] == second["output"]


def test_a_conversation_with_an_id_goes_on_after_its_summary(server: LiveServer) -> None:
    id = server.post({}, "/v1/conversations", headers=ANN).json()["id"]
    first = ask(server, HISTORY, conversation=id, max_output_tokens=60, **above(5))
    assert [item["type"] for item in first["output"]] == ["compaction", "message"]
    second = ask(server, "go on", conversation=id)
    items = [*HISTORY[:2], *first["output"], {"role": "user", "content": "go on"}]
    assert second["usage"]["input_tokens"] == num_tokens(server, items)


@pytest.mark.parametrize("kept", ["conversation", "previous_response_id", "input"])
def test_a_conversation_of_long_messages_never_becomes_too_long(server: LiveServer, kept: str) -> None:
    """All together, the user's messages are longer than the model's context of 600 tokens."""
    items: list[Any] = []
    more: dict[str, Any] = {}
    if kept == "conversation":
        more["conversation"] = server.post({}, "/v1/conversations", headers=ANN).json()["id"]
    num_summaries = 0
    for turn in range(15):
        input = [*items, {"role": "user", "content": f"turn {turn} " + "long " * 60}]
        response = ask(server, input, max_output_tokens=10, **more, **above(300))
        num_summaries += len(response["output"]) == 2
        if kept == "input":
            items = [*input, *response["output"]]
        elif kept == "previous_response_id":
            more[kept] = response["id"]
    assert 1 < num_summaries < 8, "a summary makes room for several turns"


def test_a_session_goes_on_after_its_summary(server: LiveServer) -> None:
    """Over a WebSocket, whose connection remembers the response."""
    with open_socket(server, RESPONSES, additional_headers=ANN) as connection:
        body = {"type": "response.create", "model": "model", "store": False, "max_output_tokens": 60}
        send(connection, {**body, "input": HISTORY, **above(5)})
        events = until(connection, "response.completed", "response.incomplete")
        types = [event["type"] for event in events]
        assert types.index("response.compaction.compacting") < types.index("response.output_text.delta")
        response = events[-1]["response"]
        assert [item["type"] for item in response["output"]] == ["compaction", "message"]
        send(connection, {**body, "input": "go on", "previous_response_id": response["id"]})
        after = until(connection, "response.completed", "response.incomplete")[-1]["response"]
    items = [*HISTORY, *response["output"], {"role": "user", "content": "go on"}]
    assert after["usage"]["input_tokens"] == num_tokens(server, items)


def test_a_line_of_a_batch_is_summarized(tmp_path: Path) -> None:
    with serve(
        "--engine", "echo", *options(f"option.batches_store={tmp_path}", "option.max_model_len=600")
    ) as batching:
        body = {"model": "model", "input": HISTORY, "max_output_tokens": 8, **above(5)}
        line = json.dumps({"custom_id": "a", "method": "POST", "url": RESPONSES, "body": body})
        file = http.post(f"{batching.url}/v1/files", data={"purpose": "batch"}, files={"file": ("a", line)}).json()
        asked = {"input_file_id": file["id"], "endpoint": RESPONSES, "completion_window": "24h"}
        batch = http.post(f"{batching.url}/v1/batches", json=asked).json()
        wait_for(
            lambda: http.get(f"{batching.url}/v1/batches/{batch['id']}").json()["status"] == "completed", 30, "open"
        )
        done = http.get(f"{batching.url}/v1/batches/{batch['id']}").json()
        text = http.get(f"{batching.url}/v1/files/{done['output_file_id']}/content").text
    response = json.loads(text)["response"]["body"]
    assert [item["type"] for item in response["output"]] == ["compaction", "message"]


def test_by_default_the_threshold_is_a_part_of_the_context() -> None:
    with serve("--engine", "echo", *options("option.max_model_len=1000")) as server:
        for num_words, types in ((700, ["message"]), (794, ["message"]), (800, ["compaction", "message"])):
            input = [{"role": "assistant", "content": "word " * num_words}, {"role": "user", "content": "so"}]
            response = ask(server, input, **above(None))
            assert [item["type"] for item in response["output"]] == types
        assert response["usage"]["output_tokens"] < 100 + 24, "the summary leaves room for the response"
        for num_words in (850, 1200):
            input = [{"role": "assistant", "content": "word " * num_words}, {"role": "user", "content": "so"}]
            body = {"model": "model", "input": input, **above(5)}
            refused = server.post(body, RESPONSES)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_response_that_fails_after_its_summary_is_an_error(server: LiveServer) -> None:
    """The parameters of the response are checked against the vocabulary of its prompt."""
    body = {"model": "model", "input": HISTORY, "stop_token_ids": [10**6], **above(5)}
    message = "stop_token_ids: 1000000 is not in the vocabulary"
    assert message in refusal(server, HISTORY, stop_token_ids=[10**6], **above(5))
    last = json.loads(lines_of(server, {**body, "stream": True})[-1].removeprefix("data: "))
    assert last["type"] == "response.failed"
    assert [item["type"] for item in last["response"]["output"]] == ["compaction"]
    assert message in last["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "must be a list of objects"),
        ([5], "must be a list of objects"),
        ([{"type": "clear"}], "must have one object with 'type': 'compaction'"),
        ([{"type": "compaction"}] * 2, "must have one object"),
        ([{"type": "compaction", "compact_threshold": 0}], "must be an integer from 1"),
        ([{"type": "compaction", "threshold": 5}], "has an unknown name 'threshold'"),
    ],
)
def test_what_is_wrong_is_named(server: LiveServer, value: Any, message: str) -> None:
    assert message in refusal(server, HISTORY, context_management=value)


def test_a_long_response_is_cut_to_the_room_after_the_summary(server: LiveServer) -> None:
    response = ask(server, HISTORY, max_output_tokens=580, **above(5))
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_without_a_threshold_nothing_changes(server: LiveServer) -> None:
    values: list[Any] = [None, []]
    for value in values:
        assert text_of(ask(server, HISTORY, context_management=value)) == text_of(ask(server, HISTORY))
