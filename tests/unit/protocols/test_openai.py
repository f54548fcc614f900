"""OpenAI's dialects: what is read, what is refused and how, which parts of an answer depend on what."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as some

from handler.core.errors import (
    AnswerTooLong,
    GenerationFailed,
    InternalError,
    InvalidParameter,
    MethodNotAllowed,
    Overloaded,
    PromptTooLong,
    ServingError,
    TooLarge,
    TooSlow,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.text import Prompt, SequenceState, Vocabulary
from handler.core.values import (
    Adapter,
    Delta,
    Extras,
    FieldNames,
    Finish,
    Heard,
    Request,
    Sampling,
    StructuredOutput,
    Token,
    Truncation,
)
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai.api import ERRORS
from handler.protocols.openai.audio import TranscriptReply, TranscriptStream, segments
from handler.protocols.openai.request import CHAT as CHAT_TABLE
from handler.protocols.openai.request import COMPLETIONS as COMPLETIONS_TABLE
from handler.protocols.openai.request import HARMLESS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    NAME_IT,
    NAMED,
    TOKENS,
    TOOLS,
    USER,
    answer,
    chat,
    choices,
    completion,
    events,
    saying,
    with_adapters,
    with_options,
)

ONE = Adapter("one", 1, "/one")
WITH_ADAPTERS = with_adapters(NAMED, ONE)


def parse(context: ServerContext = NAMED, /, **body: Any) -> ParsedRequest:
    return CHAT.parse({"messages": [USER], **body}, context)


def complete(context: ServerContext = NAMED, /, **body: Any) -> ParsedRequest:
    return COMPLETIONS.parse({"prompt": "a b", **body}, context)


def sampling(**body: Any) -> Sampling:
    return parse(**body).requests[0].sampling


def error(found: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(found.body)["error"]
    return value


# -- what is read ------------------------------------------------------------------------------------------------


def test_a_chat_fills_the_context_unless_limited() -> None:
    found = parse().requests[0]
    names = FieldNames(
        "messages",
        "max_tokens",
        bad_token_ids="bad_words",
        stop_token_ids="stop_token_ids",
        logit_bias="logit_bias",
        structured_output="response_format",
    )
    wanted = Sampling(max_new_tokens=1 << 30, do_sample=True, logprobs=False)
    assert found == Request("", wanted, messages=(USER,), fill_context=True, names=names)
    limited = parse(max_completion_tokens=5).requests[0]
    assert (limited.fill_context, limited.sampling.max_new_tokens) == (False, 5)
    assert limited.names.max_new_tokens == "max_completion_tokens"


def test_a_completion_has_sixteen_tokens_unless_told() -> None:
    found = complete().requests[0]
    assert (found.prompt, found.sampling.max_new_tokens, found.fill_context) == ("a b", 16, False)
    assert found.names.prompt == "prompt"


def test_null_means_absent_in_a_chat() -> None:
    names = [*CHAT_TABLE.parameters, *HARMLESS, "model", "stream", "stream_options", "tools", "tool_choice"]
    assert [name for name in names if parse(**{name: None}).requests != parse().requests] == []
    assert [name for name in names if parse(**{name: None}).ignored] == []


def test_null_means_absent_in_a_completion() -> None:
    names = [*COMPLETIONS_TABLE.parameters, *HARMLESS, "model", "stream", "stream_options"]
    assert [name for name in names if complete(**{name: None}).requests != complete().requests] == []
    assert [name for name in names if complete(**{name: None}).ignored] == []


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = StructuredOutput("json_schema", json.dumps(SCHEMA))


@in_one_test(
    ("name", "given", "field", "wanted"),
    [
        ("max_tokens", 7, "max_new_tokens", 7),
        ("temperature", 0, "do_sample", False),
        ("temperature", 2, "temperature", 2.0),
        ("temperature", 0.5, "temperature", 0.5),
        ("top_p", 0.5, "top_p", 0.5),
        ("top_k", -1, "top_k", 0),
        ("top_k", 7, "top_k", 7),
        ("min_p", 0.1, "min_p", 0.1),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("presence_penalty", -2, "presence_penalty", -2.0),
        ("frequency_penalty", 2, "frequency_penalty", 2.0),
        ("n", 3, "n", 3),
        ("seed", 5, "seed", 5),
        ("seed", -1, "seed", (1 << 64) - 1),
        ("stop", "a", "stop", ("a",)),
        ("stop", ["a", "b"], "stop", ("a", "b")),
        ("include_stop_str_in_output", True, "include_stop", True),
        ("stop_token_ids", [3], "stop_token_ids", (3,)),
        ("min_tokens", 4, "min_new_tokens", 4),
        ("ignore_eos", True, "ignore_eos", True),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("logit_bias", {"5": 1}, "logit_bias", ((5, 1.0),)),
        ("logit_bias", {}, "logit_bias", ()),
        ("top_logprobs", 0, "top_logprobs", 0),
        ("do_sample", True, "n", 1),
        ("bad_words", ["x"], "bad_sequences", ("x",)),
        ("logprobs", True, "logprobs", True),
        ("response_format", {"type": "text"}, "structured_output", None),
        ("thinking_token_budget", -1, "thinking_token_budget", None),
        ("response_format", {"type": "json_object"}, "structured_output", StructuredOutput("json_object", "")),
        ("response_format", {"type": "json_object", "schema": SCHEMA}, "structured_output", JSON_SCHEMA),
        ("response_format", {"type": "json_schema", "schema": SCHEMA}, "structured_output", JSON_SCHEMA),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "structured_output",
            JSON_SCHEMA,
        ),
        ("response_format", {"type": "json_object", "value": SCHEMA}, "structured_output", JSON_SCHEMA),
        ("response_format", {"type": "json", "value": SCHEMA}, "structured_output", JSON_SCHEMA),
        ("response_format", {"type": "regex", "value": "a+"}, "structured_output", StructuredOutput("regex", "a+")),
        ("guided_json", SCHEMA, "structured_output", JSON_SCHEMA),
        ("guided_regex", "a+", "structured_output", StructuredOutput("regex", "a+")),
        ("structured_outputs", {"json": SCHEMA, "regex": None}, "structured_output", JSON_SCHEMA),
        ("grammar", 'root ::= "a"', "structured_output", StructuredOutput("grammar", 'root ::= "a"')),
        ("grammar", "", "structured_output", None),
        ("structured_outputs", {"choice": ["a", "b"]}, "structured_output", StructuredOutput("choice", '["a", "b"]')),
        ("use_beam_search", False, "num_beams", 1),
        ("prompt_logprobs", [], "prompt_logprobs", False),
        ("modalities", ["text"], "n", 1),
        ("add_generation_prompt", True, "n", 1),
        ("chat_template_kwargs", {}, "n", 1),
    ],
)
def test_a_parameter_sets_its_field_in_openai(name: str, given: Any, field: str, wanted: Any) -> None:
    found = parse(**{name: given})
    assert getattr(found.requests[0].sampling, field) == wanted
    assert not found.ignored


def test_prompt_tokens_may_be_cut() -> None:
    assert parse(truncate_prompt_tokens=5).requests[0].truncation == Truncation(5)
    assert complete(truncate_prompt_tokens=5).requests[0].truncation == Truncation(5)
    assert parse(truncate_prompt_tokens=-1).requests[0].truncation == Truncation(None)
    with pytest.raises(
        InvalidParameter, match="truncate_prompt_tokens=0: must be at least 1, or -1 for the model's limit"
    ):
        parse(truncate_prompt_tokens=0)
    short = replace(NAMED, most_tokens=lambda: 8)
    for read in (parse, complete):
        assert read(short, truncate_prompt_tokens=-1).requests[0].truncation == Truncation(None)
        assert read(short, truncate_prompt_tokens=8).requests[0].truncation == Truncation(8)
        with pytest.raises(InvalidParameter, match="truncate_prompt_tokens=9: must be at most 8, the model's limit"):
            read(short, truncate_prompt_tokens=9)


def calling(arguments: str, count: int) -> dict[str, Any]:
    """A chat in which the model has called a tool so many times."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call] * count}]}


def content(given: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": given}]}


@in_one_test(
    ("body", "wanted"),
    [
        ({"temperature": 2.1}, "temperature=2.1: must be a number of at least 0 and at most 2"),
        ({"temperature": -0.1}, "temperature=-0.1: must be a number of at least 0"),
        ({"temperature": "hot"}, 'temperature="hot": must be a number'),
        ({"top_p": 1.1}, "top_p=1.1: must be a number"),
        ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1: must be a number of at least -2"),
        ({"presence_penalty": [1]}, "presence_penalty=[1]: must be a number"),
        ({"seed": 1 << 64}, "seed=18446744073709551616: must be an integer from -9223372036854775808"),
        ({"stop": 5}, "stop=5: must be a string or a list"),
        ({"stop": False}, "stop=false: must be a string or a list"),
        ({"ignore_eos": 2}, "ignore_eos=2: must be true or false"),
        ({"top_logprobs": 21}, "top_logprobs=21: must be an integer from 0 to 20"),
        ({"logit_bias": {"5": 101}}, "numbers from -100 to 100"),
        ({"logit_bias": [1]}, "must be an object that maps token ids"),
        ({"response_format": "json"}, 'response_format="json": must be an object'),
        ({"parallel_tool_calls": 2}, "parallel_tool_calls=2: must be true or false"),
        ({"max_new_tokens": 5}, "use max_tokens"),
        ({"stop_sequences": ["a"]}, "use stop"),
        ({"do_sample": False}, "use temperature=0"),
        ({"parameters": {"max_new_tokens": 9}}, "send the parameters at the top level"),
        ({"adapter_id": "mine"}, "send the adapter's name as model"),
        ({"max_tokens": 0}, "max_tokens=0: must be an integer from 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens=0: must be an integer from 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens=4 contradicts max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens=4: must be at most max_tokens=3"),
        ({"top_logprobs": 3}, "top_logprobs=3: needs logprobs=true"),
        ({"logprobs": 3}, "logprobs=3: must be true or false"),
        ({"n": 0}, "n=0: must be an integer from 1"),
        ({"n": 33}, "n=33: must be at most 32"),
        ({"stream": 2}, "stream=2: must be true or false"),
        ({"stream_options": {}}, "stream_options={}: needs stream=true"),
        ({"stream": True, "stream_options": []}, "stream_options=[]: must be an object"),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options={\"x\": true}: has an unknown name 'x'"),
        (
            {"stream": True, "stream_options": {"include_usage": 2}},
            "stream_options={\"include_usage\": 2}: 'include_usage' must be true",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format="),
        ({"response_format": {"type": "json_object", "schema": []}}, "must be a JSON schema object"),
        ({"response_format": {"type": "text", "schema": {}}}, "has an unknown name 'schema'; the names are type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format="),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs="),
        ({"grammar": {"type": "regex", "value": "a"}}, "send TGI's grammars as response_format"),
        ({"grammar": 1}, "grammar=1"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs="),
        ({"use_beam_search": True}, "use_beam_search=true: is not supported"),
        ({"functions": [{}]}, "functions=[{}]: is not supported: use tools"),
        ({"modalities": ["text", "audio"]}, "is not supported: responses are always text"),
        ({"chat_template": "{{}}"}, "is not supported: set option.chat_template"),
        ({"continue_final_message": True}, "continue_final_message: the last message must be an assistant message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "requires add_generation_prompt=false"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs={\"tools\": 1}: must not set 'tools'"),
        ({"documents": [1]}, "documents=[1]: must be a list of objects"),
        ({"reasoning_effort": "much"}, 'reasoning_effort="much": must be one of none, minimal'),
        ({"thinking_token_budget": 9}, "thinking_token_budget=9: requires option.reasoning_parser"),
        ({"thinking_token_budget": -2}, "thinking_token_budget=-2: must be"),
        ({"model": 5}, "model: must be a string"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, 'guided_regex="a" contradicts tool_choice'),
        ({"messages": []}, "'messages' must be a non-empty list"),
        ({"messages": "hi"}, "'messages' must be a non-empty list"),
        ({"messages": ["hi"]}, "messages[0] must be an object"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role must be one of system, user"),
        ({"messages": [USER, {"role": "user\n", "content": "hi"}]}, "messages[1].role must be one of"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role must be one of"),
        ({"messages": [{"role": "tool", "content": 5}]}, "messages[0].content must be a string"),
        ({"messages": [{"role": "assistant", "content": {}}]}, "messages[0].content must be a string"),
        (content(False), "messages[0].content must be a string or a list of parts"),
        (content([5]), "messages[0].content[0] must be a string, or an object"),
        (content([{"type": "text", "text": 5}]), "must have a string 'text'"),
        (content([{"type": ["text"], "text": "a"}]), "an object with a 'type', such as 'text'"),
        (content([{"type": "text", "text": "a"}, {"type": "image_url"}]), "[0].content[1]: 'image_url' is not"),
        (
            {"messages": [{"role": "tool", "content": "", "tool_call_id": 1}]},
            "messages[0].tool_call_id must be a string",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
            "messages[0].tool_calls[0].function.arguments must be the JSON text of an object",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0] must be"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages[0].tool_calls[0] must be"),
        (calling(" " * (1 << 20) + "{}", 1), "the arguments of a call may have at most 1048576 characters"),
        (calling(" " * (1 << 20), 5), "1048576 characters, and all arguments together at most 4194304"),
    ],
)
def test_what_is_wrong_in_a_chat_is_named(body: dict[str, Any], wanted: str) -> None:
    found = chat(body)
    assert found.status == 400
    assert wanted in error(found)["message"]
    assert error(found)["param"].partition("[")[0].partition(".")[0] in body
    assert error(found)["type"] == "invalid_request_error"


@in_one_test(
    ("body", "wanted"),
    [
        ({"prompt": None}, "'prompt' must be a string, a list of strings"),
        ({"prompt": ""}, "'prompt' must not be empty"),
        ({"prompt": ["a", 1]}, "'prompt' must be a string"),
        ({"prompt": [1, "a"]}, "'prompt' must be a string"),
        ({"prompt": [[1], [True]]}, "'prompt' must be a string"),
        ({"prompt": [-1]}, "'prompt' must contain token ids of at least 0"),
        ({"prompt": [6]}, "'prompt' contains ids that are not in the vocabulary of 6 tokens"),
        ({"prompt": ["a"] * 257}, "'prompt' has 257 prompts; the maximum is 256"),
        ({"suffix": "x"}, 'suffix="x": is not supported: the engines only continue a prompt'),
        ({"logprobs": 21}, "logprobs=21: must be an integer from 0 to 20"),
        ({"logprobs": "all"}, 'logprobs="all": must be an integer'),
        ({"best_of": 1, "n": 2}, "best_of=1: must be at least n=2"),
        ({"prompt": ["a"] * 256, "n": 5}, "n=5: must be at most 4 with 256 prompts"),
        ({"prompt": ["a"] * 256, "n": 2, "best_of": 5}, "best_of=5: must be at most 4 with 256 prompts"),
        ({"best_of": 2, "stream": True}, "best_of=2: must be n=1 when streaming"),
        ({"n": 2, "stream": True, "echo": True, "logprobs": 0}, "n=2: must be 1 when streaming with echo"),
        ({"echo": 2}, "echo=2: must be true or false"),
    ],
)
def test_what_is_wrong_in_a_completion_is_named(body: dict[str, Any], wanted: str) -> None:
    found = completion(body)
    assert found.status == 400
    assert wanted in error(found)["message"]
    assert error(found)["param"] in body


def test_what_the_engine_lacks_is_named_in_openai() -> None:
    poor = replace(
        NAMED, unsupported={"structured_output": "no guides", "prompt_logprobs": "no scores", "top_logprobs": "no tops"}
    )
    for body in ({"tool_choice": NAME_IT}, {"tool_choice": "required"}):
        found = chat({"tools": TOOLS, **body}, context=poor)
        assert error(found)["message"].startswith("tool_choice=")
        assert "the engine able does not support it: no guides" in error(found)["message"]
    found = completion({"echo": True, "logprobs": 0}, context=poor)
    assert error(found)["message"] == "echo=true: the engine able does not support it with logprobs: no scores"
    assert error(completion({"logprobs": 2}, context=poor))["message"].startswith(
        "logprobs=2: the engine able does not support it"
    )
    found = chat({"logprobs": True, "top_logprobs": 2}, context=poor)
    assert error(found)["message"].startswith("top_logprobs=2: the engine able does not support it")
    assert complete(poor, logprobs=1).requests[0].sampling.top_logprobs == 0
    assert parse(poor, logprobs=True, top_logprobs=1).requests[0].sampling.top_logprobs == 0


def test_unknown_names_are_reported_and_harmless_ones_too() -> None:
    message = {"role": "user", "content": "hi", "mood": "Ann", "refusal": None}
    body = {"messages": [message], "user": "u", "store": True, "frobnicate": 1, "metadata": {}}
    assert parse(**body).ignored == ["frobnicate", "messages[].mood", "user", "store", "metadata"]
    strict = with_options(NAMED, unknown_parameters="refuse")
    assert "unknown names: frobnicate" in error(chat({"frobnicate": 1}, context=strict))["message"]
    assert parse(strict, user="u").ignored == ["user"]
    assert complete(user="u", frobnicate=1).ignored == ["frobnicate", "user"]


# -- the model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "org/model", "tgi", "dummy"])
def test_the_model_has_several_names(name: str) -> None:
    assert parse(model=name).requests[0].adapter is None
    assert json.loads(chat({"model": name}).body)["model"] == name


@pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": None}])
def test_without_a_name_it_is_the_models_own(body: dict[str, Any]) -> None:
    assert json.loads(chat(body).body)["model"] == json.loads(completion(body).body)["model"] == "model"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080", "https://x.example/v1", "HTTPS://x.example/v1/chat/completions"]
)
def test_an_address_is_the_model(url: str) -> None:
    """Hugging Face's JavaScript client sends its endpoint's where it was told no model."""
    assert json.loads(chat({"model": url}).body)["model"] == "model"
    assert json.loads(completion({"model": url}).body)["model"] == "model"
    assert chat({"model": url}, context=replace(NAMED, model_names=("own", url))).body.count(url.encode()) == 1
    assert completion({"model": f"{url}/{'x' * 250}"}).status == 400


@in_one_test("name", ["httpx", "http:model", "s3://bucket/model", " http://x", "http://"])
def test_other_names_are_no_address(name: str) -> None:
    assert chat({"model": name}).status == 404


def test_chunks_for_tgis_clients_have_a_usage() -> None:
    """TGI's chunks say null, with `include_usage` but in one of their own at the end."""
    body = {"model": "tgi", "stream": True}
    assert [chunk["usage"] for chunk in events(chat(body, saying("ab cd")))] == [None] * 3
    *chunks, last = events(chat({**body, "stream_options": {"include_usage": True}}, saying("ab cd")))
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert last["usage"]["completion_tokens"] == 3
    assert all("usage" not in chunk for chunk in events(chat({"stream": True}, saying("ab cd"))))
    assert all("usage" not in chunk for chunk in events(completion(body, saying("ab cd"))))  # nor have TGI's


def test_an_adapters_name_is_the_adapter() -> None:
    assert parse(WITH_ADAPTERS, model="one").requests[0].adapter == ONE
    assert complete(WITH_ADAPTERS, model="one").requests[0].adapter == ONE
    assert chat({"model": "two"}, context=WITH_ADAPTERS).status == 404


def test_any_name_may_be_let_in() -> None:
    context = replace(WITH_ADAPTERS, model_names=("model", "*"))
    assert json.loads(chat({"model": "my-endpoint"}, context=context).body)["model"] == "my-endpoint"
    assert parse(context, model="one").requests[0].adapter == ONE


# -- messages ----------------------------------------------------------------------------------------------------

TEMPLATE = "{% for tool in tools %}<tool_call>{{ tool_calls }}"


def test_messages_go_to_a_template_that_takes_tools_as_they_are() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    told = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "rain"}], "tool_call_id": "c"},
    ]
    found = parse(replace(NAMED, chat_template=TEMPLATE), messages=told, tools=TOOLS).requests[0]
    read = {**call, "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    assert found.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [read]},
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    )
    assert found.tools == tuple(TOOLS)


def test_messages_go_to_another_template_as_text() -> None:
    found = parse(replace(NAMED, chat_template="{{ messages }}"), tools=TOOLS).requests[0]
    assert found.tools == ()
    system, user = found.messages
    assert user == USER
    assert '<tools>[{"name": "weather"' in system["content"]


# -- what is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_only_one_call_where_they_may_not_be_parallel(stream: bool) -> None:
    calls = '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]</tool_call>'
    body = {"tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
    found = chat(body, saying(calls))
    if stream:
        deltas = [choice["delta"] for choice in choices(events(found))]
        names = [call["function"].get("name") for delta in deltas for call in delta.get("tool_calls", ())]
    else:
        names = [call["function"]["name"] for call in json.loads(found.body)["choices"][0]["message"]["tool_calls"]]
    assert [name for name in names if name] == ["a"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_that_is_not_allowed_is_text_in_openai(stream: bool) -> None:
    other = {"type": "function", "function": {"name": "time"}}
    said = [{"name": name, "arguments": {"a": 1}} for name in ("time", "weather")]
    body = {"tools": [*TOOLS, other], "stream": stream}

    def ask(text: str, *allowed: Any) -> tuple[str, list[Any], str]:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
        content, calls, finish = _gathered(chat({**body, "tool_choice": choice}, saying(text)), stream=stream)
        return content, [call["name"] for call in calls], finish

    both = f"<tool_call>{json.dumps(said)}</tool_call>"
    assert ask(both, *TOOLS) == ('time {"a": 1}', ["weather"], "tool_calls")
    assert ask(both, other) == ('weather {"a": 1}', ["time"], "tool_calls")
    assert ask(both, *TOOLS, other) == ("", ["time", "weather"], "tool_calls")
    assert ask(f"So <tool_call>{json.dumps(said[1])}</tool_call>", other) == ('So weather {"a": 1}', [], "stop")


def _gathered(found: HttpResponse, *, stream: bool) -> tuple[str, list[Any], str]:
    """Return an answer's content, its functions and why it finished."""
    if not stream:
        (choice,) = json.loads(found.body)["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return message["content"] or "", calls, choice["finish_reason"]
    parts = choices(chunk for chunk in events(found) if chunk["choices"])
    deltas = [part["delta"] for part in parts]
    content = "".join(delta.get("content") or "" for delta in deltas)
    begun = [call["function"] for delta in deltas for call in delta.get("tool_calls") or () if "id" in call]
    return content, begun, parts[-1]["finish_reason"]


def test_required_calls_are_a_list_without_marks() -> None:
    text = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "weather", "arguments": {}}]'
    body = {"tools": TOOLS, "tool_choice": "required"}
    (choice,) = json.loads(chat(body, saying(text)).body)["choices"]
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [
        {"name": "weather", "arguments": '{"city": "Rome"}'},
        {"name": "weather", "arguments": "{}"},
    ]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    ids = {call["id"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 2


def test_special_marks_are_seen_and_other_special_tokens_are_not() -> None:
    call = b'{"name": "f", "arguments": {}}'
    vocabulary = Vocabulary([b"<tool_call>", b"</tool_call>", b"<end>", call], special={0, 1, 2})
    context = replace(NAMED, chat_template=TEMPLATE, vocabulary=vocabulary)
    sampling = parse(context, tools=TOOLS).requests[0].sampling
    state = SequenceState(Prompt("", [], vocabulary), sampling._replace(stop=("</s",)))
    tokens = [state.push(id, -1.0) for id in (0, 3, 1, 2)]
    script = [Delta(1, 0, (token,), Finish.EOS if token is tokens[-1] else None) for token in tokens]
    (choice,) = json.loads(chat({"tools": TOOLS}, script, context).body)["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_log_probabilities_of_held_back_text_come_with_the_next_chunk() -> None:
    found = choices(events(chat({"tools": TOOLS, "stream": True, "logprobs": True}, saying("a <tool no", 3))))
    shown = [[one["token"] for one in choice["logprobs"]["content"]] for choice in found]
    assert shown == [["a <"], ["too", "l n"], ["o"], [""]]
    assert "".join(choice["delta"].get("content") or "" for choice in found) == "a <tool no"


def test_a_step_may_bring_several_tokens() -> None:
    tokens = [Token(id, text, -0.5, False) for id, text in enumerate("abc")]
    script = [Delta(1, 0, tokens[:2]), Delta(1, 0, tokens[2:]), Delta(1, 0, (), Finish.LENGTH)]
    found = choices(events(chat({"stream": True}, script)))
    assert [choice["delta"].get("content") for choice in found] == ["a", "b", "c", None]
    assert found[-1]["delta"] == {}, "openai-go takes a delta without content for the end of the text"
    assert [choice["finish_reason"] for choice in found] == [None, None, None, "length"]


def test_a_streams_text_is_the_whole_answers() -> None:
    text = 'Ünïcode "quoted" \\ 😀 \u2028 end'
    whole = json.loads(chat({}, saying(text, 3)).body)["choices"][0]["message"]["content"]
    found = choices(events(chat({"stream": True}, saying(text, 3))))
    assert "".join(choice["delta"].get("content", "") for choice in found) == whole == text


# -- errors ------------------------------------------------------------------------------------------------------


@in_one_test(
    ("failure", "status", "kind", "code"),
    [
        (InvalidParameter("x=1: no"), 400, "invalid_request_error", None),
        (PromptTooLong("messages", 9, 8), 400, "invalid_request_error", "context_length_exceeded"),
        (AnswerTooLong("max_tokens", 5, 9, 8), 400, "invalid_request_error", "context_length_exceeded"),
        (MethodNotAllowed("no"), 405, "invalid_request_error", None),
        (TooSlow("no"), 408, "invalid_request_error", None),
        (TooLarge("no"), 413, "invalid_request_error", None),
        (UnsupportedMedia("no"), 415, "invalid_request_error", None),
        (Overloaded("full"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (GenerationFailed("no"), 500, "server_error", None),
        (InternalError("no"), 500, "server_error", None),
        (Unavailable("down"), 503, "server_error", None),
    ],
)
def test_errors_have_openais_form_and_status(failure: ServingError, status: int, kind: str, code: str | None) -> None:
    for schema in (CHAT, COMPLETIONS):
        found = schema.errors.whole(failure)
        assert (found.status, found.content_type) == (status, "application/json")
        value = error(found)
        assert value.keys() == {"message", "type", "param", "code"}
        assert (value["message"], value["type"], value["code"]) == (failure.message, kind, code)


def test_only_fields_are_params() -> None:
    for message, param in {
        "the body is not valid JSON: x": None,
        "header x-y: no": None,
        "'messages' must": "messages",
        "messages[0].content[1]: 'image' is not": "messages[0].content[1]",
        "tools[0].function.name: must": "tools[0].function.name",
        "max_tokens=5: no": "max_tokens",
    }.items():
        assert ERRORS.body(InvalidParameter(message))["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"[1]", b'"x"', b"{"])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    for schema in (CHAT, COMPLETIONS):
        found = answer(schema, body, context=CONTEXT)
        assert (found.status, error(found)["param"]) == (400, None)


MARKS = "\0text\0"


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}])
def test_no_name_of_a_clients_takes_the_texts_place(more: dict[str, Any]) -> None:
    any_name = replace(NAMED, model_names=("model", "*"))
    for ask in (chat, completion):
        body = {"model": MARKS, "stream": True, **(more if ask is chat else {})}
        found = events(ask(body, saying("abcdefghijkl"), any_name))
        assert {event["model"] for event in found} == {MARKS}
        texts = [one.get("text", one.get("delta", {}).get("content")) for one in choices(found)]
        assert "".join(text or "" for text in texts) == "abcdefghijkl"


def test_what_comes_with_every_chunk_counts_all_choices() -> None:
    body = {"prompt": ["a", "b"], "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    found = events(completion(body, saying("abcdef")))
    assert [event["usage"]["completion_tokens"] for event in found] == [1, 2, 3, 4, 5, 6, 6]


# -- transcripts -------------------------------------------------------------------------------------------------------
# Segments of transcripts: whatever times a model writes, they go forward within the clip, and no text is lost.


_PIECES = ((0.0, 29.5), (29.5, 40.0))


def _time(seconds: float) -> Token:
    return Token(9, f"<|{seconds:.2f}|>", None, True)


_TOKENS = some.one_of(
    some.floats(0, 30).map(_time),
    some.sampled_from([" a", "b", "\n", "\ufffd<|"]).map(lambda text: Token(1, text, -1, False)),
    some.just(Token(2, "<|nospeech|>", None, True)),
)


@given(some.lists(_TOKENS, max_size=30), some.integers(0, 30))
def test_times_go_forward_and_no_text_is_lost(tokens: list[Token], first: int) -> None:
    first = min(first, len(tokens))
    pieces = [(number, Heard(*place, "en")) for number, place in zip((0, first), _PIECES, strict=True)]
    found = list(segments(tokens, pieces))
    times = [time for segment in found for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert all(0 <= time <= 40 for time in times)
    shown = "".join(token.text for token in tokens if not token.special)
    assert "".join(segment.text for segment in found).split() == shown.split()


@given(some.lists(some.text(" \n\tab", max_size=4), max_size=20))
def test_the_deltas_of_a_stream_are_its_text(texts: list[str]) -> None:
    stream = TranscriptStream(ERRORS)
    tokens = [Token(1, text, None, False) for text in texts]
    data = b"".join(stream.feed(0, Delta(1, 0, (token,))) for token in tokens)
    data += stream.feed(0, Delta(1, 0, (), Finish.EOS))
    reply = TranscriptReply("text", "transcribe", 0)
    whole = reply.feed(0, Delta(1, 0, tokens, Finish.EOS)).decode()
    *events, end = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    assert end == b"[DONE]"
    *deltas, done = map(orjson.loads, events)
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == whole


def test_a_subtitle_is_one_line_whatever_its_text() -> None:
    tokens = [Token(1, " a\n\n1\n00:00:00,000 --> 00:00:01,000\r\nb\u2028", None, False)]
    for form in ("srt", "vtt"):
        reply = TranscriptReply(form, "transcribe", 0)
        text = reply.feed(0, Delta(1, 0, tokens, Finish.EOS, extras=Extras(heard=Heard(0, 3700.5, "en")))).decode()
        assert text.count("-->") == 1
        assert "01:01:40" in text
        assert len(text.strip().split("\n\n")) == (1 if form == "srt" else 2)


PREFILL = (
    Token(504, "What", None, False),
    Token(314, " is", -3.5, False, (Token(7, " are", -0.5, False), Token(314, " is", -3.5, False))),
    Token(9, "?", -0.25, False, (Token(9, "?", -0.25, False),)),
)
"""The second was not the most likely one, the third was."""

ASK = {"prompt": "What is?", "echo": True, "logprobs": 2}
ONE_TOKEN = [Delta(1, 0, TOKENS[:1], Finish.LENGTH, prefill=PREFILL)]
IN_TWO = [Delta(1, 0, TOKENS[:1], prefill=PREFILL), Delta(1, 0, (), Finish.EOS)]


def document(body: dict[str, Any], script: list[Delta]) -> Any:
    found = completion(body, script)
    assert found.status == 200, found.body
    return json.loads(found.body)


def test_the_prompts_tokens_have_alternatives() -> None:
    (choice,) = document(ASK, ONE_TOKEN)["choices"]
    columns = choice["logprobs"]
    assert columns["top_logprobs"] == [None, {" are": -0.5, " is": -3.5}, {"?": -0.25}, {"Deep": -0.05}]
    assert columns["token_logprobs"] == [None, -3.5, -0.25, -0.05]
    (chunk,) = events(completion({**ASK, "stream": True}, ONE_TOKEN))
    assert chunk["choices"][0]["logprobs"] == columns


def test_of_two_alternatives_with_one_text_the_more_likely_stands() -> None:
    """The halves of a character are shown alike; lm-eval takes the highest for what would have been chosen."""
    half, other = Token(2, "\ufffd", -0.25, False), Token(3, "\ufffd", -1.5, False)
    prefill = (PREFILL[0], other._replace(top=(half, other)))
    (choice,) = document(ASK, [Delta(1, 0, TOKENS[:1], Finish.LENGTH, prefill=prefill)])["choices"]
    assert choice["logprobs"]["top_logprobs"][1] == {"\ufffd": -0.25}
    assert choice["logprobs"]["token_logprobs"][1] == -1.5


def test_as_many_are_asked_for_as_the_client_wants() -> None:
    for logprobs in (0, 1, 5):
        (request,) = COMPLETIONS.parse({**ASK, "logprobs": logprobs}, NAMED).requests
        assert (request.sampling.prompt_logprobs, request.sampling.prompt_top_logprobs) == (True, logprobs)
    (request,) = COMPLETIONS.parse({**ASK, "echo": False}, NAMED).requests
    assert (request.sampling.prompt_logprobs, request.sampling.prompt_top_logprobs) == (False, 0)


def test_an_engine_without_the_chosen_tokens_alternatives_has_the_prompts() -> None:
    """OpenVINO: one alternative to a generated token is the token itself."""
    able = replace(NAMED, unsupported={"top_logprobs": "no tops"})
    (request,) = COMPLETIONS.parse({**ASK, "logprobs": 1}, able).requests
    assert (request.sampling.top_logprobs, request.sampling.prompt_top_logprobs) == (0, 1)
    for body in ({**ASK, "logprobs": 3, "max_tokens": 0}, {**ASK, "logprobs": 3, "max_tokens": 0, "stream": True}):
        (request,) = COMPLETIONS.parse(body, able).requests
        assert (request.sampling.top_logprobs, request.sampling.prompt_top_logprobs) == (0, 3)
    refused = json.loads(completion({**ASK, "logprobs": 3}, context=able).body)["error"]
    assert refused["message"] == "logprobs=3: the engine able does not support it: no tops"


def test_an_engine_without_a_prompts_alternatives_refuses_by_name() -> None:
    poor = replace(NAMED, unsupported={"prompt_top_logprobs": "it has the tokens' own only"})
    assert completion({**ASK, "logprobs": 0}, ONE_TOKEN, poor).status == 200
    refused = json.loads(completion({**ASK, "logprobs": 1}, context=poor).body)["error"]
    assert (
        refused["message"] == "logprobs=1: the engine able does not support it with echo: it has the tokens' own only"
    )
    assert refused["param"] == "logprobs"


@in_one_test("script", [ONE_TOKEN, IN_TWO], ids=["one-delta", "two"])
@in_one_test("logprobs", [None, 0, 2])
def test_no_new_tokens_are_the_prompt_alone(script: list[Delta], logprobs: int | None) -> None:
    """The engines generate one at least: it is not shown, nor counted."""
    body = {**ASK, "logprobs": logprobs, "max_tokens": 0}
    found = document(body, script)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("What is?", "length")
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["tokens"] == ["What", " is", "?"]
        assert choice["logprobs"]["token_logprobs"] == [None, -3.5, -0.25]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunk, last = events(completion(streamed, script))
    assert chunk["choices"] == [choice]
    assert last["usage"] == found["usage"]


def test_no_new_tokens_in_several_choices() -> None:
    call = COMPLETIONS.parse({"prompt": ["a", "b"], "echo": True, "max_tokens": 0}, NAMED)
    assert [request.sampling.max_new_tokens for request in call.requests] == [1, 1]
    assert call.reply.feed(1, Delta(2, 0, TOKENS[:1], Finish.LENGTH)) == b""
    found = json.loads(call.reply.feed(0, Delta(1, 0, TOKENS[:1], Finish.EOS)))
    assert [choice["text"] for choice in found["choices"]] == ["a", "b"]
    assert call.reply.finished


@pytest.mark.parametrize("echo", [{}, {"echo": False}, {"echo": None}])
def test_no_new_tokens_and_no_prompt_are_nothing(echo: dict[str, Any]) -> None:
    refused = json.loads(completion({"max_tokens": 0, **echo}).body)["error"]
    assert refused["message"] == "max_tokens=0: needs echo=true, because the response would be empty"
    assert refused["param"] == "max_tokens"


@pytest.mark.parametrize("other", [{"min_tokens": 1}, {"n": 2}, {"best_of": 2}])
def test_no_new_tokens_have_no_company(other: dict[str, Any]) -> None:
    found = completion({**ASK, "max_tokens": 0, **other})
    assert found.status == 400
    (name,) = other
    assert json.loads(found.body)["error"]["param"] == name
