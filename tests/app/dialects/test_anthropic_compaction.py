"""Compaction on /v1/messages: `compact_20260112`, `compaction`, and blocks with summaries in later requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.server import BY_KEY, serve
from tests.servers import LiveServer, http, options, wait_for

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SUMMARY = "Summary of the earlier conversation, which it replaces:"
ALONE = {"type": "compaction", "content": "x"}
HISTORY: list[Any] = [
    {"role": "user", "content": "remember 42"},
    {"role": "assistant", "content": "I do."},
    {"role": "user", "content": "go on"},
]
ANN, BOB = {"x-api-key": "ann"}, {"x-api-key": "bob"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server whose engine repeats the prompt until the context is full."""
    with serve(
        "--engine", "echo", *BY_KEY, *options("option.responses_store=memory", "option.max_model_len=600")
    ) as server:
        yield server


def compacting(trigger: int | None = 1, **more: Any) -> dict[str, Any]:
    edit = {"type": "compact_20260112", **more}
    if trigger is not None:
        edit["trigger"] = {"type": "input_tokens", "value": trigger}
    return {"context_management": {"edits": [edit]}}


def ask(server: LiveServer, messages: list[Any], path: str = MESSAGES, **more: Any) -> Any:
    body = {"model": "model", "messages": messages, "system": "Be brief.", "max_tokens": 60, **more}
    if path == COUNT:
        del body["max_tokens"]
    response = server.post(body, path, headers=ANN)
    assert response.status_code == 200, response.text[:2000]
    return response.json()


def refusal(server: LiveServer, messages: list[Any], key: dict[str, str] = ANN, **more: Any) -> Any:
    response = server.post({"model": "model", "messages": messages, "max_tokens": 60, **more}, MESSAGES, headers=key)
    assert response.status_code == 400, response.text[:2000]
    return response.json()["error"]


def events_of(server: LiveServer, messages: list[Any], **more: Any) -> list[Any]:
    body = {"model": "model", "messages": messages, "system": "Be brief.", "max_tokens": 60, "stream": True, **more}
    lines = server.post(body, MESSAGES, headers=ANN).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def num_tokens(server: LiveServer, messages: list[Any]) -> int:
    number: int = ask(server, messages, COUNT)["input_tokens"]
    return number


def test_a_long_conversation_is_summarized_before_the_response(server: LiveServer) -> None:
    before = num_tokens(server, HISTORY)
    plain = ask(server, HISTORY)
    same = ask(server, HISTORY, **compacting(before))
    assert (same["content"], same["usage"], same["stop_reason"]) == (plain["content"], plain["usage"], "max_tokens")
    assert same["context_management"] == {"applied_edits": []}
    message = ask(server, HISTORY, **compacting(before - 1))
    block, text = message["content"]
    assert block.keys() == {"type", "content"}
    assert "remember 42" in block["content"]
    prompt = text["text"]
    assert prompt.index("Be brief.") < prompt.index(SUMMARY), "the summary takes the place of the messages"
    assert "remember" not in prompt[: prompt.index(SUMMARY)]
    summary, response = message["usage"]["iterations"]
    assert (summary["type"], response["type"]) == ("compaction", "message")
    del message["usage"]["iterations"]
    assert response == {"type": "message", **message["usage"]}
    assert summary["input_tokens"] > before
    assert message["usage"]["output_tokens"] == 60
    assert message["context_management"] == {"applied_edits": []}
    assert message["usage"]["input_tokens"] == num_tokens(server, [{"role": "user", "content": [block]}])


def test_a_block_stands_for_all_messages_before_it(server: LiveServer) -> None:
    content = ask(server, HISTORY, **compacting())["content"]
    rest = [{"role": "assistant", "content": content}, {"role": "user", "content": "and then?"}]
    assert num_tokens(server, [*HISTORY, *rest]) == num_tokens(server, rest)
    nothing = [{"role": "assistant", "content": [{"type": "compaction", "content": None}, content[1]]}, rest[1]]
    without = [{"role": "assistant", "content": content[1:]}, rest[1]]
    assert num_tokens(server, [*HISTORY, *nothing]) == num_tokens(server, [*HISTORY, *without])


def test_a_stream_begins_with_the_block(server: LiveServer) -> None:
    events = events_of(server, HISTORY, **compacting())
    start, begin, delta, stop, second = events[:5]
    assert (start["type"], start["message"]["usage"]["input_tokens"]) == ("message_start", 0)
    assert begin["content_block"] == {"type": "compaction", "content": None}
    assert delta["delta"].keys() == {"type", "content", "encrypted_content"}
    assert (stop["type"], stop["index"]) == ("content_block_stop", 0)
    assert (second["content_block"]["type"], second["index"]) == ("text", 1)
    message = ask(server, HISTORY, **compacting())
    assert delta["delta"]["content"] == message["content"][0]["content"]
    assert events[-2]["usage"] == message["usage"]
    assert events[-2]["context_management"] == {"applied_edits": []}


def test_a_response_may_pause_after_the_block(server: LiveServer) -> None:
    cases: list[dict[str, Any]] = [{}, {"instructions": "  "}, {"instructions": "Say only what to remember."}]
    for instructions in cases:
        asked = compacting(pause_after_compaction=True, **instructions)
        message = ask(server, HISTORY, **asked)
        [block] = message["content"]
        assert message["stop_reason"] == "compaction"
        assert ("Say only what" in block["content"]) is ("Say" in str(instructions))
        assert ("Summarize our" in block["content"]) is ("Say" not in str(instructions))
        [iteration] = message["usage"]["iterations"]
        assert iteration["output_tokens"] > 60
        assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (0, 0)
        events = events_of(server, HISTORY, **asked)
        assert [event["type"] for event in events] == [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
            "message_stop",
        ]  # fmt: skip
        assert events[2]["delta"]["content"] == block["content"]
        assert (events[4]["delta"]["stop_reason"], events[4]["usage"]) == ("compaction", message["usage"])


def test_a_thread_goes_on_after_the_block(server: LiveServer) -> None:
    first = ask(server, HISTORY, thread={"type": "create"}, **compacting())
    following = {"type": "continue", "previous_message_id": first["id"]}
    body = {"model": "model", "max_tokens": 20, "messages": [{"role": "user", "content": "next"}], "thread": following}
    second = server.post(body, MESSAGES, headers=ANN).json()
    messages = [{"role": "assistant", "content": first["content"]}, *body["messages"]]  # type: ignore[misc]
    assert second["usage"]["input_tokens"] == num_tokens(server, messages)


def test_by_default_a_part_of_the_context_triggers_it() -> None:
    with serve("--engine", "echo", *BY_KEY, *options("option.max_model_len=1000")) as server:
        for num_words, types in ((795, ["text"]), (796, ["compaction", "text"])):
            message = ask(server, [{"role": "user", "content": "word " * num_words}], **compacting(None))
            assert [block["type"] for block in message["content"]] == types
        for num_words in (850, 1200):
            too_long = refusal(server, [{"role": "user", "content": "word " * num_words}], **compacting(None))
            assert too_long["message"][:19] == "prompt is too long:"


def test_results_are_cleared_before_it_is_decided(server: LiveServer) -> None:
    call = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "word " * 200}
    messages: list[Any] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    clear = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}}
    clear = {**clear, "trigger": {"type": "input_tokens", "value": 100}, "keep": {"type": "tool_uses", "value": 0}}
    for trigger, types in ((100, ["text"]), (5, ["compaction", "text"])):
        edits = [clear, *compacting(trigger)["context_management"]["edits"]]
        message = ask(server, messages, context_management={"edits": edits})
        assert [block["type"] for block in message["content"]] == types
        [applied] = message["context_management"]["applied_edits"]
        assert applied["cleared_tool_uses"] == 1
    count = ask(server, messages, COUNT, context_management={"edits": edits})
    assert count["input_tokens"] < count["context_management"]["original_input_tokens"]


# -- `compaction`: a response that is a signed block alone -------------------------------------------------------------


SUMMARIZE: dict[str, Any] = {"compaction": {"type": "summarize"}}


def test_a_conversation_is_summarized_on_request(server: LiveServer) -> None:
    message = ask(server, HISTORY, **SUMMARIZE)
    [block] = message["content"]
    assert (message["stop_reason"], block.keys()) == ("compaction", {"type", "content", "signature"})
    assert message["usage"]["output_tokens"] == 60
    events = events_of(server, HISTORY, **SUMMARIZE)
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    started = events[1]["content_block"]
    assert started["content"] is None
    streamed = {**started, "content": events[2]["delta"]["content"]}
    assert streamed["content"] == block["content"]
    assert events[4]["delta"]["stop_reason"] == "compaction"
    for each in (block, streamed):
        rest = [{"role": "user", "content": [each, {"type": "text", "text": "and then?"}]}]
        text = ask(server, rest)["content"][0]["text"]
        assert text.index("Be brief.") < text.index(SUMMARY)
    own = ask(server, HISTORY, compaction={"type": "summarize", "instructions": "Say it."}, max_tokens=200)
    assert "Say it." in own["content"][0]["content"]
    assert "Summarize our" not in own["content"][0]["content"]
    assert num_tokens(server, HISTORY) == ask(server, HISTORY, COUNT, **SUMMARIZE)["input_tokens"]


def test_a_signed_block_is_read_only_unchanged_and_in_its_place(server: LiveServer) -> None:
    [block] = ask(server, HISTORY, **SUMMARIZE)["content"]
    text = {"type": "text", "text": "so"}

    def code(*contents: Any, key: dict[str, str] = ANN, role: str = "user") -> str:
        messages = [{"role": role if index else "user", "content": each} for index, each in enumerate(contents)]
        error = refusal(server, messages, key)
        assert error["type"] == "invalid_request_error"
        return str(error["details"]["error_code"]).removeprefix("compaction_")

    assert code([block, text], key=BOB) == "signature_invalid"
    assert code([{**block, "signature": block["signature"][:-8] + "AAAAAAA="}, text]) == "signature_invalid"
    assert code([{**block, "signature": 5}, text]) == "signature_invalid"
    assert code([{**block, "content": "All is well."}, text]) == "content_mismatch"
    assert code([{**block, "content": ""}, text]) == "content_mismatch"
    assert code([text, block]) == "block_misplaced"
    assert code([text], [block, text]) == "block_misplaced"
    assert code([text], [ALONE], role="system") == "block_misplaced"
    assert code([block, block, text]) == "block_ambiguous"
    assert code([{**block, "tool_changes": [{"type": "tool_removal"}]}, text]) == "tool_changes_mismatch"


@pytest.mark.parametrize(
    ("messages", "more", "expected"),
    [
        ([{"role": "user", "content": ""}], {}, "compaction_nothing_to_summarize"),
        ([{"role": "user", "content": [ALONE]}], {}, "compaction_nothing_to_summarize"),
        (
            [HISTORY[0], {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "a", "input": {}}]}],
            {},
            "compaction_incomplete_turn",
        ),
        (HISTORY, compacting(), "cannot be combined with context_management"),
        (HISTORY, {"thread": {"type": "create"}}, "cannot be combined with thread"),
        (HISTORY, {"max_tokens": 0}, "compaction: the summary needs tokens"),
        (HISTORY, {"compaction": {"type": "clear"}}, "must be an object with 'type': 'summarize'"),
        (HISTORY, {"compaction": {"type": "summarize", "instruction": "a"}}, "unknown name 'instruction'"),
        (HISTORY, {"compaction": None, **compacting(), "max_tokens": 0}, "max_tokens=0: there is no response"),
        (HISTORY, {"compaction": None, **compacting(pause_after_compaction=1)}, "pause_after_compaction=1: must be"),
        (HISTORY, {"compaction": None, **compacting(instructions=1)}, "instructions=1: must be a string"),
    ],
)  # fmt: skip
def test_what_cannot_be_summarized_is_refused(
    server: LiveServer, messages: list[Any], more: dict[str, Any], expected: str
) -> None:
    error = refusal(server, messages, **{**SUMMARIZE, **more})
    assert expected in (error["message"], error.get("details", {}).get("error_code")) or expected in error["message"]


def test_servers_with_one_key_file_read_each_other_s_signatures(tmp_path: Path, server: LiveServer) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    arguments = ("--engine", "echo", *BY_KEY, *options(f"option.compaction_key_file={key}"))
    with serve(*arguments) as first:
        [block] = ask(first, HISTORY, **SUMMARIZE)["content"]
    rest = [{"role": "user", "content": [block, {"type": "text", "text": "so"}]}]
    with serve(*arguments) as second:
        assert ask(second, rest)["content"]
    assert refusal(server, rest)["details"] == {"error_code": "compaction_signature_invalid"}


def test_lines_of_batches_are_summarized(tmp_path: Path) -> None:
    store = options(f"option.batches_store={tmp_path}", "option.max_model_len=600")
    with serve("--engine", "echo", *BY_KEY, *store) as server:
        params = {"model": "model", "max_tokens": 20, "messages": HISTORY}
        requests = [
            {"custom_id": "edit", "params": {**params, **compacting()}},
            {"custom_id": "alone", "params": {**params, **SUMMARIZE}},
        ]
        batch = http.post(f"{server.url}{MESSAGES}/batches", json={"requests": requests}).json()
        url = f"{server.url}{MESSAGES}/batches/{batch['id']}"
        wait_for(lambda: http.get(url).json()["processing_status"] == "ended", 30, "the batch has not ended")
        lines = map(json.loads, http.get(f"{url}/results").text.splitlines())
        types = {line["custom_id"]: [b["type"] for b in line["result"]["message"]["content"]] for line in lines}
    assert types == {"edit": ["compaction", "text"], "alone": ["compaction"]}
