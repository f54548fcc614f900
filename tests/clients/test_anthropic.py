"""anthropic, Anthropic's own client, on Anthropic's routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.driver import Driver, python_client
from tests.servers import LiveServer, options, serve

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": CITY}
CALL = '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>'
GOLDEN = Path(__file__).parents[1] / "golden" / "anthropic"

_REFUSED = 'lmi_requests_total{outcome="refused"}'

_both = pytest.mark.parametrize("how", ["generate", "stream"])


@pytest.fixture(scope="session")
def root(echo_url: str) -> str:
    return echo_url.removesuffix("/invocations")


def text(events: list[dict[str, Any]]) -> str:
    """The text of a stream of one block."""
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


def test_a_message(anthropic: Driver, model_server: LiveServer) -> None:
    for what in ("message", "gathered"):
        found = anthropic.generate(model_server.url, QUESTION, what=what, **GREEDY)
        assert [(block["type"], block["text"]) for block in found["content"]] == [("text", ANSWER)]
        assert (found["role"], found["model"], found["stop_reason"]) == ("assistant", "model", "end_turn")
        assert found["id"].startswith("msg_")
        assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (37, 8)


def test_its_models(anthropic: Driver, model_server: LiveServer) -> None:
    assert anthropic.generate(model_server.url, "", what="models") == ["model", "lmi"]


def test_what_its_models_support(anthropic: Driver, model_server: LiveServer) -> None:
    """The client checks each name of its types; the values are those of a small model without reasoning."""
    for found in anthropic.generate(model_server.url, "", what="capabilities"):
        edits = found["context_management"]
        assert [name for name, part in edits.items() if name == "supported" or part["supported"]] == [*edits]
        assert len(edits) == 4
        assert found["compaction"] == {"supported": True, "summarize": {"supported": True}}
        assert found["structured_outputs"]["supported"] is True
        assert found["thinking"]["types"]["disabled"]["supported"] is True
        for name in ("batch", "citations", "code_execution", "effort", "image_input", "pdf_input", "server_tools"):
            assert found[name]["supported"] is False, name
        assert found["thinking"]["supported"] is False


def test_a_messages_stream(anthropic: Driver, model_server: LiveServer) -> None:
    events = anthropic.stream(model_server.url, QUESTION, **GREEDY)
    first, *_, delta, last = events
    assert (first["type"], first["message"]["usage"]["input_tokens"]) == ("message_start", 37)
    assert text(events) == ANSWER
    assert (delta["delta"]["stop_reason"], delta["usage"]["output_tokens"]) == ("end_turn", 8)
    assert last == {"type": "message_stop"}


def test_a_count_of_tokens(anthropic: Driver, model_server: LiveServer) -> None:
    """SmolLM2's template has a system message of its own, which is in the place of none."""
    assert anthropic.generate(model_server.url, QUESTION, what="count")["input_tokens"] == 37
    counted = anthropic.generate(model_server.url, QUESTION, what="count", system="Be brief.", tools=[WEATHER])
    asked = anthropic.generate(model_server.url, QUESTION, system="Be brief.", tools=[WEATHER], max_tokens=1)
    assert counted["input_tokens"] == asked["usage"]["input_tokens"] > 60


# -- context editing and compaction ----------------------------------------------------------------------------------

BETAS = ["context-management-2025-06-27", "compact-2026-01-12", "compact-2026-09-04"]
LONG = "a long result " * 50


def of_calls(*results: str) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for number, content in enumerate(results):
        call = {"type": "tool_use", "id": f"t{number}", "name": "weather", "input": {"city": "Paris"}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": content}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return messages


def editing(*edits: dict[str, Any]) -> dict[str, Any]:
    return {"betas": BETAS, "context_management": {"edits": [*edits]}}


CLEARING = editing(
    {"type": "clear_thinking_20251015"},
    {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 50},
        "keep": {"type": "tool_uses", "value": 1},
    },
)
COMPACTING = editing({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50}})


@pytest.mark.parametrize("what", ["beta", "beta_gathered"])
def test_results_of_tools_are_cleared(anthropic: Driver, root: str, what: str) -> None:
    asked: dict[str, Any] = {"messages": of_calls(LONG, LONG), "tools": [WEATHER], **CLEARING}
    count = anthropic.generate(root, "", what="beta_count", **asked)
    original = count["context_management"]["original_input_tokens"]
    found = anthropic.generate(root, "", what=what, **asked)
    [applied] = found["context_management"]["applied_edits"]
    assert (applied["type"], applied["cleared_tool_uses"]) == ("clear_tool_uses_20250919", 1)
    assert found["usage"]["input_tokens"] == count["input_tokens"] == original - applied["cleared_input_tokens"]


@pytest.mark.parametrize("what", ["beta", "beta_gathered"])
def test_a_conversation_is_compacted_and_goes_on(anthropic: Driver, root: str, what: str) -> None:
    """The echo engine repeats the prompt, in the summary too."""
    messages = of_calls(LONG, "12 °C")
    found = anthropic.generate(root, "", what=what, messages=messages, **COMPACTING)
    block, *rest = found["content"]
    assert (block["type"], LONG.strip() in block["content"]) == ("compaction", True)
    assert [each["type"] for each in found["usage"]["iterations"]] == ["compaction", "message"]
    assert rest
    if what == "beta_gathered":
        assert found["events"].count("compaction") == 1
    after = [*messages, {"role": "assistant", "content": found["content"]}, {"role": "user", "content": "and?"}]
    counts = [
        anthropic.generate(root, "", what="beta_count", messages=sent, betas=BETAS)["input_tokens"]
        for sent in (after, after[-2:])
    ]
    assert counts[0] == counts[1], "the block stands for what was before it"
    edits = COMPACTING["context_management"]["edits"]
    paused = editing({**edits[0], "pause_after_compaction": True})
    found = anthropic.generate(root, "", what=what, messages=messages, **paused)
    assert ([each["type"] for each in found["content"]], found["stop_reason"]) == (["compaction"], "compaction")


@pytest.mark.parametrize("what", ["beta", "beta_gathered"])
def test_a_conversation_is_summarized_on_request(anthropic: Driver, root: str, what: str) -> None:
    summarize = {"betas": BETAS, "compaction": {"type": "summarize"}}
    found = anthropic.generate(root, "", what=what, messages=of_calls("12 °C"), **summarize)
    [block] = found["content"]
    assert (block["type"], found["stop_reason"]) == ("compaction", "compaction")
    assert block["signature"]

    def go_on(block: dict[str, Any]) -> Any:
        sent = [{"role": "user", "content": [block, {"type": "text", "text": "and?"}]}]
        return anthropic.call("generate", root, "", what="beta", messages=sent, betas=BETAS)

    assert go_on(block).answer["content"]
    changed = go_on({**block, "content": "All is well."})
    assert "CompactionContentMismatch" in str(changed.error), changed
    assert "must be the first block" in str(
        anthropic.call(
            "generate", root, "", what="beta", betas=BETAS,
            messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, block]}],
        ).message
    )  # fmt: skip


@_both
def test_a_stop_sequence_is_named(anthropic: Driver, model_server: LiveServer, how: str) -> None:
    outcome = anthropic.call(how, model_server.url, QUESTION, stop_sequences=["x", "France"], **GREEDY)
    end = outcome.answer or outcome.events[-2]["delta"]
    said = outcome.answer["content"][0]["text"] if how == "generate" else text(outcome.events)
    assert (said, end["stop_reason"], end["stop_sequence"]) == ("The capital of ", "stop_sequence", "France")


@pytest.mark.parametrize("what", ["message", "gathered"])
def test_a_tool_and_its_result(anthropic: Driver, root: str, what: str) -> None:
    """The echo engine says the prompt's words; the first cut of them is the call."""
    found = anthropic.generate(root, f"So {CALL}", what=what, tools=[WEATHER], stop_sequences=["assistant:"],
                               system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
                               max_tokens=4000)  # fmt: skip
    calls = [block for block in found["content"] if block["type"] == "tool_use"]
    assert calls[-1]["name"] == "weather"
    assert calls[-1]["input"] == {"city": "Paris"}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": found["content"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "12 °C"}]}
                for call in calls
            ],
        },
    ]
    counted = anthropic.generate(root, "", what="count", messages=turns, tools=[WEATHER])
    assert counted["input_tokens"] > 20


@_both
def test_the_tool_runner_sends_everything_where_no_threads_are_kept(
    anthropic: Driver, model_server: LiveServer, how: str
) -> None:
    """The client asks for a thread first. The second request has the first one's call and its result."""
    choice = {"type": "tool", "name": "weather"}
    outcome = anthropic.call(how, model_server.url, QUESTION, what="runner", tool_choice=choice, max_iterations=2,
                             max_tokens=100, **GREEDY)  # fmt: skip
    assert outcome.error is None, outcome.message
    first, second = outcome.answer or outcome.events
    for turn in (first, second):
        (call,), (result,) = turn["message"]["content"], turn["results"]["content"]
        assert (turn["message"]["stop_reason"], call["name"], result["tool_use_id"]) == (
            "tool_use",
            "weather",
            call["id"],
        )
        assert result["content"] == f"12 °C in {call['input']['city']}"
    tokens = [turn["message"]["usage"]["input_tokens"] for turn in (first, second)]
    assert tokens[1] > tokens[0] + 10


@pytest.mark.parametrize("how", ["generate", pytest.param("stream", marks=pytest.mark.nightly)])
def test_the_tool_runner_goes_on_in_a_thread_where_threads_are_kept(
    anthropic: Driver, tgi_server: LiveServer, storing_server: LiveServer, how: str
) -> None:
    """The second request has the results of the first one's calls alone; the prompt has all."""

    def run(server: LiveServer) -> tuple[list[Any], float]:
        before = server.metric(_REFUSED)
        choice = {"type": "tool", "name": "weather"}
        outcome = anthropic.call(how, server.url, QUESTION, what="runner", tool_choice=choice, max_iterations=2,
                                 max_tokens=100, **GREEDY)  # fmt: skip
        assert outcome.error is None, outcome.message
        return outcome.answer or outcome.events, server.metric(_REFUSED) - before

    (whole, refused), (kept, none) = run(tgi_server), run(storing_server)
    assert (refused, none) == (1, 0)
    for one, other in zip(whole, kept, strict=True):
        assert one["message"]["usage"] == other["message"]["usage"]
        assert one["message"]["content"][0]["input"] == other["message"]["content"][0]["input"]


@_both
@pytest.mark.parametrize("where", ["model_server", "storing_server"])
def test_the_tool_runner_calls_a_tool_that_it_was_given_in_between(
    anthropic: Driver, request: pytest.FixtureRequest, where: str, how: str
) -> None:
    """Without threads, the second request repeats the first. In a thread, it has the results and the new tool alone."""
    server: LiveServer = request.getfixturevalue(where)
    choice = {"type": "tool", "name": "weather"}
    outcome = anthropic.call(how, server.url, QUESTION, what="runner", adds=True, tool_choice=choice, max_iterations=2,
                             max_tokens=100, **GREEDY)  # fmt: skip
    assert outcome.error is None, outcome.message
    calls, results = [], []
    for turn in outcome.answer or outcome.events:
        (call,), (result,) = turn["message"]["content"], turn["results"]["content"]
        calls.append(call["name"])
        results.append(result["content"].partition(" in ")[0])
    assert (calls, results) == (["weather", "clock"], ["12 °C", "12:00"])


@_both
def test_the_tool_runner_calls_nothing_with_half_an_input(
    anthropic: Driver, model_server: LiveServer, how: str
) -> None:
    choice = {"type": "tool", "name": "weather"}
    outcome = anthropic.call(
        how, model_server.url, QUESTION, what="runner", tool_choice=choice, max_tokens=19, **GREEDY
    )
    assert outcome.error is None, outcome.message
    (turn,) = outcome.answer or outcome.events
    assert (turn["message"]["stop_reason"], turn["results"]) == ("max_tokens", None)
    (block,) = turn["message"]["content"]
    assert block["type"] == ("text" if how == "generate" else "tool_use")


@_both
def test_the_tool_runner_ends_with_an_answer(anthropic: Driver, model_server: LiveServer, how: str) -> None:
    outcome = anthropic.call(how, model_server.url, QUESTION, what="runner", **GREEDY)
    assert outcome.error is None, outcome.message
    (turn,) = outcome.answer or outcome.events
    assert turn["message"]["stop_reason"] in ("end_turn", "max_tokens")
    assert [block["type"] for block in turn["message"]["content"]] == ["text"]


@_both
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"extra_body": {"temperature": 3}}, "BadRequestError", "temperature=3: must be a number"),
        ({"model": "other"}, "NotFoundError", "model: other"),
        ({"messages": []}, "BadRequestError", "'messages' must be a non-empty list"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "BadRequestError",
            "server tools only run",
        ),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "BadRequestError", "prompt is too long: "),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals_for_anthropic(
    anthropic: Driver, model_server: LiveServer, how: str, options: dict[str, Any], error: str, words: str
) -> None:
    outcome = anthropic.call(how, model_server.url, QUESTION, **options)
    assert (outcome.error or "").split(".")[-1] == error
    assert words in outcome.message


@_both
def test_a_full_queue_for_anthropic(anthropic: Driver, busy_url: str, how: str) -> None:
    outcome = anthropic.call(how, busy_url.removesuffix("/invocations"), QUESTION)
    assert (outcome.error or "").split(".")[-1] == "OverloadedError"


def test_an_engine_that_raises_amid_a_stream(anthropic: Driver, root: str) -> None:
    outcome = anthropic.call("stream", root, "a b <raise>", max_tokens=20)
    assert (outcome.error or "").split(".")[-1] == "APIStatusError"
    assert "engine failure" in outcome.message
    assert text(outcome.events).startswith(" user: a b")


def test_golden_files_fit_the_clients_types_for_anthropic(anthropic: Driver) -> None:
    values = []
    for path in sorted(GOLDEN.glob("*.txt")):
        _, _, answered = path.read_text().partition("\n< ")
        lines = answered.partition("\n")[2].splitlines()
        values += [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.startswith("event: ")]
    kinds = anthropic.generate("", "", what="check", values=values)
    assert set(kinds) == {
        "Message", "MessageTokensCount", "ErrorResponse", "RawMessageStartEvent", "RawContentBlockStartEvent",
        "RawContentBlockDeltaEvent", "RawContentBlockStopEvent", "RawMessageDeltaEvent", "RawMessageStopEvent",
    }  # fmt: skip


@pytest.mark.parametrize("beta", [False, True])
def test_a_message_batch(tmp_path: Path, *, beta: bool) -> None:
    client, store = python_client("openai", "drive_message_batches"), options(f"option.batches_store={tmp_path}")
    body = {"model": "model", "max_tokens": 8, "messages": [{"role": "user", "content": "one two"}]}
    bodies = {"a": body, "b": {**body, "temperature": 9}, "c": {**body, "stream": True}}
    requests = [{"custom_id": id, "params": params} for id, params in bodies.items()]
    with serve("--engine", "echo", *store) as server:
        states = client.generate(server.url, "", requests=requests, beta=beta)
        cancelled = client.generate(server.url, "", requests=requests, beta=beta, cancels=True)
    assert states["created"]["request_counts"]["processing"] == 3
    assert states["batch"]["request_counts"]["errored"] == 2
    results = states["results"]
    assert [results[id]["type"] for id in bodies] == ["succeeded", "errored", "errored"]
    assert "two" in results["a"]["message"]["content"][0]["text"]
    assert results["b"]["error"]["error"]["type"] == "invalid_request_error"
    assert set(cancelled["results"]) == set(bodies)
    assert sum(cancelled["batch"]["request_counts"].values()) == 3
