"""openai, langchain_openai, and the chats of huggingface_hub and text_generation, on OpenAI's routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.checks import PARIS, PARIS_IDS, TOO_MANY, UNICODE
from tests.clients.documents import SAYS, example
from tests.clients.driver import Driver, python_client
from tests.servers import LiveServer, options, serve, wait_for

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
CANCELLED = 'lmi_requests_total{outcome="cancelled"}'

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}
CALL = '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_call>'

_both = pytest.mark.parametrize("how", ["generate", "stream"])


@pytest.fixture(scope="session")
def root(echo_url: str) -> str:
    return echo_url.removesuffix("/invocations")


@pytest.fixture(scope="session")
def busy(busy_url: str) -> str:
    return busy_url.removesuffix("/invocations")


def content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """A stream's text of one choice."""
    found = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"]["content"] or "" for choice in found)


# -- openai ------------------------------------------------------------------------------------------------------


def test_a_chat_for_openai(openai: Driver, model_server: LiveServer) -> None:
    found = openai.generate(model_server.url, QUESTION, **GREEDY)
    (choice,) = found["choices"]
    assert choice["message"]["content"] == ANSWER
    assert (choice["message"]["role"], choice["message"]["tool_calls"]) == ("assistant", None)
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert found["id"].startswith("chatcmpl-")
    assert (found["object"], found["model"]) == ("chat.completion", "model")
    assert found["system_fingerprint"].endswith("-openvino")
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (37, 8, 45)


def test_a_chats_stream(openai: Driver, model_server: LiveServer) -> None:
    chunks = openai.stream(model_server.url, QUESTION, **GREEDY, stream_options={"include_usage": True})
    *parts, last = chunks
    assert content(parts) == ANSWER
    assert [part["choices"][0]["delta"]["role"] for part in parts] == ["assistant"] + [None] * 7
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 7 + ["stop"]
    assert len({part["id"] for part in chunks}) == 1
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
    assert all(part["usage"] is None for part in parts)


def test_the_clients_own_gathering_of_a_stream(openai: Driver, model_server: LiveServer) -> None:
    (choice,) = openai.generate(model_server.url, QUESTION, what="gathered", **GREEDY)["choices"]
    assert choice["message"]["content"] == ANSWER
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")


def test_log_probabilities_for_openai(openai: Driver, model_server: LiveServer) -> None:
    options = {**GREEDY, "logprobs": True, "top_logprobs": 1}
    (choice,) = openai.generate(model_server.url, QUESTION, **options)["choices"]
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == ANSWER
    assert tokens[5]["token"] == " Paris"
    assert tokens[5]["logprob"] == pytest.approx(-0.06, abs=0.2)
    assert bytes(tokens[5]["bytes"]).decode() == " Paris"
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in tokens)
    chunks = openai.stream(model_server.url, QUESTION, **options)
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["content"]]
    assert [token["token"] for token in streamed] == [token["token"] for token in tokens]


def test_several_choices(openai: Driver, tgi_server: LiveServer) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "n": 3, "seed": 7}
    choices = openai.generate(tgi_server.url, "Tell me a story.", **options)["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    chunks = openai.stream(tgi_server.url, "Tell me a story.", **options)
    assert [content(chunks, index) for index in range(3)] == texts
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order), "the choices come side by side"


@_both
def test_stop_strings_are_not_in_the_text(openai: Driver, model_server: LiveServer, how: str) -> None:
    for stop in ("France", ["x", "France"]):
        outcome = openai.call(how, model_server.url, QUESTION, **GREEDY, stop=stop)
        if how == "generate":
            (choice,) = outcome.answer["choices"]
            found = choice["message"]["content"], choice["finish_reason"]
        else:
            found = content(outcome.events), outcome.events[-1]["choices"][0]["finish_reason"]
        assert found == ("The capital of ", "stop")


def test_unicode_comes_through(openai: Driver, root: str) -> None:
    words = UNICODE.split()
    options = {"max_tokens": len(words) + 1}
    (choice,) = openai.generate(root, UNICODE, **options)["choices"]
    assert choice["message"]["content"] == " user: " + " ".join(words)
    assert content(openai.stream(root, UNICODE, **options)) == choice["message"]["content"]


def test_completions_for_openai(openai: Driver, model_server: LiveServer) -> None:
    found = openai.generate(model_server.url, PARIS, what="completion", temperature=0, max_tokens=3, logprobs=1)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" Paris.\n", "length")
    assert choice["logprobs"]["tokens"] == [" Paris", ".", "\n"]
    assert choice["logprobs"]["text_offset"] == [0, 6, 7]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [[" Paris"], ["."], ["\n"]]
    assert found["object"] == "text_completion"
    assert found["usage"]["prompt_tokens"] == 5
    prompts = [PARIS_IDS, [504, 3575]]
    found = openai.generate(model_server.url, "", what="completion", prompts=prompts, echo=True, max_tokens=1)
    assert [choice["text"][:11] for choice in found["choices"]] == ["The capital"] * 2


def test_a_completions_stream(openai: Driver, model_server: LiveServer) -> None:
    prompts = [PARIS, "The capital of Italy is"]
    chunks = openai.stream(model_server.url, "", what="completion", prompts=prompts, temperature=0, max_tokens=2)
    texts = [
        "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == index)
        for index in range(2)
    ]
    assert texts == [" Paris.", " Rome."]


def test_models(openai: Driver, root: str) -> None:
    assert openai.generate(root, "", what="models") == ["model", "lmi"]
    assert openai.generate(root, "model", what="model")["owned_by"] == "lmi-handler"
    assert openai.call("generate", root, "a/b", what="model").error == "openai.NotFoundError"


def test_tools_that_the_model_calls_by_itself(openai: Driver, root: str) -> None:
    """The echo engine says the last words of the prompt."""
    words = f"So {CALL} end"
    options = {
        "tools": [WEATHER],
        "max_tokens": 20,
        "stop": "end",
        "extra_body": {"truncate_prompt_tokens": len(words.split()) + 1},
    }
    for what in ("chat", "gathered"):
        (choice,) = openai.generate(root, words, what=what, **options)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == " So "
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        assert call["id"].startswith("call_")


def test_tools_that_are_of_no_use(openai: Driver, model_server: LiveServer) -> None:
    (choice,) = openai.generate(model_server.url, QUESTION, **GREEDY, tools=[WEATHER])["choices"]
    assert choice["message"]["tool_calls"] is None
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["message"]["content"]


@_both
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"temperature": 3}, "openai.BadRequestError", "temperature=3: must be a number"),
        ({"max_tokens": TOO_MANY}, "openai.BadRequestError", "with 37 prompt tokens it must be at most 8155"),
        ({"model": "other"}, "openai.NotFoundError", "Model not found: other"),
        ({"messages": []}, "openai.BadRequestError", "'messages' must be a non-empty list"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals_for_openai(
    openai: Driver, model_server: LiveServer, how: str, options: dict[str, Any], error: str, words: str
) -> None:
    outcome = openai.call(how, model_server.url, QUESTION, **options)
    assert outcome.error == error
    assert words in outcome.message


@_both
def test_a_full_queue_for_openai(openai: Driver, busy: str, how: str) -> None:
    assert openai.call(how, busy, QUESTION).error == "openai.RateLimitError"


@_both
def test_an_engine_that_raises(openai: Driver, fresh_cues: str, how: str) -> None:
    """Words come before the cue's turn, so that a stream has begun."""
    outcome = openai.call(how, fresh_cues, "a b <raise>", max_tokens=20)
    if how == "generate":
        assert outcome.error == "openai.InternalServerError"
        return
    assert outcome.error == "openai.APIError"
    assert "engine failure" in outcome.message
    assert content(outcome.events) == " user: a b"


@pytest.fixture
def fresh_cues() -> Any:
    with serve("--engine", "echo", "-o", "option.echo_cues=true", "-o", "option.echo_tokens_per_second=50") as server:
        server.wait_ready()
        yield server.url


def test_a_client_that_leaves_is_forgotten(model_server: LiveServer) -> None:
    before = model_server.metric(CANCELLED)
    openai = python_client("openai", "drive_openai", "async")
    found = openai.generate(model_server.url, "Write a long story.", what="leave", max_tokens=2000)
    assert all(isinstance(text, str) for text in found)
    wait_for(lambda: model_server.metric(CANCELLED) == before + 1, 5, "it was not cancelled")
    wait_for(lambda: model_server.metric("lmi_active_sequences") == 0, 5, "it still runs")


# -- langchain_openai --------------------------------------------------------------------------------------------


def test_langchain_for_openai(langchain_openai: Driver, model_server: LiveServer) -> None:
    found = langchain_openai.generate(model_server.url, QUESTION, **GREEDY)
    assert found.pop("parts") == [["text", ANSWER, None]]
    end = {"finish_reason": "stop", "tokens": 8, "prompt_tokens": 37}
    assert found == {"content": ANSWER, "tool_calls": [], **end}
    pieces = langchain_openai.stream(model_server.url, QUESTION, **GREEDY, stream_usage=True)
    assert "".join(piece["content"] for piece in pieces) == ANSWER
    assert sum(piece["tokens"] or 0 for piece in pieces) == 8


def test_langchains_lines_in_the_documents(model_server: LiveServer) -> None:
    assert python_client("openai", "drive_langchain_openai").run(example("LangChain", model_server.url)) == SAYS


def test_langchains_tools(langchain_openai: Driver, root: str) -> None:
    words = f"{CALL} end"
    cut = {"truncate_prompt_tokens": len(words.split()) + 1}
    found = langchain_openai.generate(root, words, tools=[WEATHER], max_tokens=20, stop=["end"], extra_body=cut)
    assert found["tool_calls"] == [{"name": "weather", "args": {"city": "Paris"}}]
    assert found["finish_reason"] == "tool_calls"


# -- TGI's clients -----------------------------------------------------------------------------------------------


def test_huggingface_hub_for_openai(chatting_hub: Driver, model_server: LiveServer) -> None:
    found = chatting_hub.generate(model_server.url, QUESTION, **GREEDY)
    (choice,) = found["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")
    assert found["usage"]["total_tokens"] == 45
    assert found["system_fingerprint"].startswith("lmi-")
    chunks = chatting_hub.stream(model_server.url, QUESTION, **GREEDY)
    assert content(chunks) == ANSWER
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_huggingface_hubs_tools(chatting_hub: Driver, root: str) -> None:
    words = f"{CALL} end"
    cut = {"truncate_prompt_tokens": len(words.split()) + 1}
    options = {"tools": [WEATHER], "max_tokens": 20, "stop": ["end"], "extra_body": cut}
    (choice,) = chatting_hub.generate(root, words, **options)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", '{"city": "Paris"}')
    chunks = chatting_hub.stream(root, words, **options)
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"]["tool_calls"] or ()]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"city": "Paris"}'


@_both
def test_huggingface_hubs_errors(chatting_hub: Driver, model_server: LiveServer, how: str) -> None:
    outcome = chatting_hub.call(how, model_server.url, QUESTION, temperature=9)
    assert outcome.error is not None
    if outcome.error == "aiohttp.client_exceptions.ClientResponseError":  # the oldest's, which drops the message
        assert outcome.message.startswith("400,")
    else:
        assert outcome.error == "huggingface_hub.errors.BadRequestError"
        assert "temperature=9" in outcome.message


def test_text_generation(chatting_text_generation: Driver, model_server: LiveServer) -> None:
    found = chatting_text_generation.generate(model_server.url, QUESTION, **GREEDY)
    (choice,) = found["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")
    assert (found["model"], found["usage"]["completion_tokens"]) == ("tgi", 8)
    chunks = chatting_text_generation.stream(model_server.url, QUESTION, **GREEDY)
    assert content(chunks) == ANSWER
    assert {chunk["choices"][0]["delta"]["role"] for chunk in chunks} == {"assistant"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


# -- openai guides -----------------------------------------------------------------------------------------------------
# openai's structured outputs and forced calls of tools, with the demo model: guides make its answers what they are.


ZONE = {"type": "object", "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}}, "required": ["zone"]}
TIME = {"type": "function", "function": {"name": "time", "parameters": ZONE}}
ASK = "What is the weather in Paris?"
TOOLS: dict[str, Any] = {**GREEDY, "max_tokens": 80, "tools": [WEATHER, TIME]}


def message(openai: Driver, server: LiveServer, what: str, **options: Any) -> dict[str, Any]:
    """The one choice, whole or gathered from a stream by the client itself."""
    (choice,) = openai.generate(server.url, ASK, what=what, **options)["choices"]
    return {"finish_reason": choice["finish_reason"], **choice["message"]}


@pytest.mark.parametrize("what", ["chat", "gathered"])
def test_required_calls(openai: Driver, model_server: LiveServer, what: str) -> None:
    found = message(openai, model_server, what, **TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = found["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert (found["content"], found["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize("what", ["chat", "gathered"])
def test_a_named_call_for_openai(openai: Driver, model_server: LiveServer, what: str) -> None:
    choice = {"type": "function", "function": {"name": "time"}}
    found = message(openai, model_server, what, **TOOLS, tool_choice=choice)
    (call,) = found["tool_calls"]
    assert call["function"]["name"] == "time"
    assert json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")
    assert (found["content"], found["finish_reason"]) == (None, "stop")


def test_a_schema_of_pydantics(openai: Driver, model_server: LiveServer) -> None:
    found = openai.generate(model_server.url, "Name the capital of France, in JSON.", what="parse", **GREEDY)
    assert found.keys() == {"country", "city"}
    assert found["city"] == "Paris"


def test_any_object(openai: Driver, model_server: LiveServer) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "response_format": {"type": "json_object"}}
    (choice,) = openai.generate(model_server.url, "Describe Paris as a JSON object.", **options)["choices"]
    assert choice["message"]["content"].lstrip().startswith("{")


def test_huggingface_hubs_schema(chatting_hub: Driver, model_server: LiveServer) -> None:
    """Its newer versions send OpenAI's form as TGI's."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": {**CITY, "additionalProperties": False}}}
    (choice,) = chatting_hub.generate(model_server.url, ASK, **GREEDY, response_format=form)["choices"]
    assert json.loads(choice["message"]["content"]).keys() == {"city"}


def test_langchains_structured_output(langchain_openai: Driver, model_server: LiveServer) -> None:
    found = langchain_openai.generate(model_server.url, ASK, **TOOLS, tool_choice="weather")
    assert found["tool_calls"] == [{"name": "weather", "args": {"city": "Paris"}}]


# -- files and batches -------------------------------------------------------------------------------------------


def test_a_batch_whose_server_is_killed_in_its_middle(tmp_path: Path) -> None:
    client = python_client("openai", "drive_batches")
    paced = options("option.batches_store=batches", "option.echo_tokens_per_second=40", "option.batches_concurrency=2")
    body = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 8}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    ids = [f"line {number}" for number in range(24)]
    text = "\n".join([json.dumps({"custom_id": id, **line}) for id in ids] + ["no request"])
    with serve("--engine", "echo", *paced, directory=tmp_path) as server:
        asked = {"endpoint": line["url"], "completion_window": "24h", "metadata": {"of": "a test"}}
        begun = client.generate(server.url, text, **asked)["batch"]
        output = tmp_path / "batches" / f"file-{begun['id'].removeprefix('batch_')}-output"
        wait_for(lambda: output.stat().st_size > 1000, 30, "a few lines are answered")
        server.process.kill()
    before = output.read_bytes()
    assert 0 < before.count(b"\n") < len(ids)
    with open(output, "ab") as file:
        file.write(before[:40])  # of a line that was being written
    with serve("--engine", "echo", *paced, directory=tmp_path) as server:
        found = client.generate(server.url, "", begun=begun["id"])
    batch = found["batch"]
    assert batch["request_counts"] == {"total": 25, "completed": 24, "failed": 1}
    assert (batch["status"], batch["metadata"]) == ("completed", {"of": "a test"})
    input, answers, errors = found["texts"]
    assert input == text
    assert answers.encode().startswith(before), "what was answered is not answered again"
    assert sorted(json.loads(one)["custom_id"] for one in answers.splitlines()) == sorted(ids)
    assert [json.loads(one)["error"]["code"] for one in errors.splitlines()] == ["invalid_json_line"]
    assert found["deleted"] == [True, True, True]
