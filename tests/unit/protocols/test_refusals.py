"""Refusals in every dialect's own form."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

from handler.core import errors
from handler.core.errors import (
    AnswerTooLong,
    GenerationFailed,
    InvalidParameter,
    InvalidPayload,
    Overloaded,
    PromptTooLong,
    ServingError,
    TooLong,
)
from handler.core.values import Task
from handler.protocols import registry
from handler.protocols.kernel.errors import FRONT_END, ErrorFormat
from handler.protocols.openai.request import OpenAiDialect
from handler.protocols.openapi import DESCRIPTIONS
from handler.protocols.tgi.native import CHAT_TOKENIZE, TOKENIZE
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CONTEXT, DIALECTS, EXAMPLES, STREAMED, answer, refused

# -- nothing is kept ---------------------------------------------------------------------------------------------------
# A body that says "the rest is on the server" is refused by name in every dialect, never answered without the rest.


NAMES = (
    "cached_content", "container", "context_management", "conversation", "disaggregated_params",
    "file_ids", "kv_transfer_params", "mcp_servers", "previous_message_id", "previous_response_id", "sequence_id",
    "session_params", "thread", "thread_id",
)  # fmt: skip

SEEING = replace(CAPABLE, no_media={"image": "", "audio": ""}, chat_template="{{ messages }}")
PNG = {"type": "input_image", "image_url": "data:image/png;base64,aQ==", "file_id": "file_1"}


def said(dialect: str, body: Any) -> str:
    """The error's text, from a body or from an event."""
    found = answer(dialect, body, context=SEEING)
    assert found.status in ((200, 422, 424) if dialect == "tgi_generate_stream" else (400, 422, 424)), found
    return found.body.decode().replace("\\", "")


@in_one_test(("route", "dialect"), EXAMPLES)
def test_a_part_of_a_request_that_is_elsewhere_is_refused_by_name(route: str, dialect: str) -> None:
    values = ("x_1", 7, {"type": "continue"}, [{"type": "compaction"}], True)
    for name, value in itertools.product(NAMES, values):
        if name == "context_management" and route.startswith("openai_responses"):
            continue  # it says what is to be done with the rest, which is here
        message = said(route, {**DESCRIPTIONS[dialect].example, name: value})
        assert name in message
        assert any(
            words in message for words in ("has invalid type", "is not supported", "must be an object with")
        ) or ("has an unknown name 'type'; the names are edits" in message)


@in_one_test("dialect", ["lmi", "tgi_compat", "dynamic_batch", "tgi_generate", "mindie", "lmi_embedding"])
def test_under_parameters_too_in_refusals(dialect: str) -> None:
    message = said(dialect, {"inputs": "a", "parameters": {"cached_content": "You are"}})
    assert "parameters.cached_content: is not supported: this route does not read what the field refers to" in message


@in_one_test(
    ("dialect", "body", "name"),
    [
        *(
            (dialect, {"inputs": "a"}, "cached_prompt")
            for dialect in ("lmi", "tgi_compat", "dynamic_batch", "lmi_async")
        ),
        ("lmi", {"messages": [{"role": "user", "content": "a"}]}, "cached_prompt"),
        ("lmi", {"inputs": "a", "parameters": {"cached_prompt": "b"}}, "parameters.cached_prompt"),
    ],
)
def test_what_lmi_drops_is_reported(dialect: str, body: dict[str, Any], name: str) -> None:
    """Of LMI's engines the scheduler alone read `cached_prompt`, up to 0.31."""
    given = body if "." in name else {**body, name: "You are"}
    assert name in DIALECTS[dialect].parse(given, CAPABLE).ignored


@in_one_test("value", [None, "", [], {}, 0, False])
def test_a_value_that_asks_for_nothing_is_no_refusal(value: Any) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "kv_transfer_params": value, "cached_content": value}
    assert answer("openai_chat", asked).status == 200
    parsed = DIALECTS["openai_chat"].parse(asked, CAPABLE)
    assert list(parsed.ignored) == ([] if value is None else ["kv_transfer_params", "cached_content"])


def talk(*messages: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, *messages], "max_tokens": 4}


def user(part: Any) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


@in_one_test(
    ("dialect", "body", "message"),
    [
        ("openai_chat", talk({"role": "assistant", "audio": {"id": "audio_1"}}), "messages[1].audio is not supported"),
        ("lmi", talk({"role": "assistant", "content": "", "audio": {"id": "a"}}), "messages[1].audio is not supported"),
        ("openai_chat", talk(user({"type": "file", "file": {"file_id": "f"}})),
         "'file' is not supported: the engine reads only text, images and audio clips"),
        ("openai_chat", talk(user({"type": "image_url", "image_url": {"url": "https://x/a.png", "file_id": "f"}})),
         "messages[].content[].image_url.file_id: is not supported"),
        ("openai_chat", talk(user({"type": "image_url", "image_url": None, "uuid": "u"})), "image_url must be a URL"),
        ("openai_responses", {"input": [user(PNG)]}, "input[0].content[0].file_id is not supported"),
        ("openai_responses", {"input": [user({"type": "input_file", "file_id": "f"})]},
         "'input_file' is not supported: the engine reads only text, images and audio clips"),
        ("openai_responses", {"input": [{"type": "item_reference", "id": "m"}]}, "'item_reference' is not supported"),
        ("openai_responses", {"input": [{"id": "m"}]}, "input[0]: 'item_reference' is not supported"),
        ("openai_responses", {"input": [{"id": "m", "type": None}]}, "input[0]: 'item_reference' is not supported"),
        ("openai_responses", {"input": [{"type": "compaction"}]}, "input[0].encrypted_content: cannot be read"),
        ("openai_responses", {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}]},
         "'input' must contain at least one item that is part of the prompt"),
        ("openai_responses", {"input": "a", "prompt": {"id": "pmpt_1"}}, "prompt={\"id\": \"pmpt_1\"}: is not supp"),
        ("openai_responses", {"input": "a", "store": True}, "store=true: is not supported: responses are not stored"),
        ("openai_responses", {"input": "a", "background": True}, "background=true: is not supported"),
        ("anthropic_messages", talk(user({"type": "image", "source": {"type": "file", "file_id": "f"}})),
         "'file' is not supported: files are not stored"),
        ("anthropic_messages", talk(user({"type": "container_upload", "file_id": "f"})), "server has no containers"),
    ],
)  # fmt: skip
def test_parts_of_messages_that_are_elsewhere(dialect: str, body: Any, message: str) -> None:
    assert message in said(dialect, body)


@in_one_test("name", NAMES)
def test_nor_are_the_tokens_of_a_part_counted(name: str) -> None:
    for schema, body in ((TOKENIZE, {"inputs": "a"}), (CHAT_TOKENIZE, talk())):
        found = answer(schema, {**body, name: "x_1"}, context=CAPABLE)
        assert found.status == 422
        assert name in found.body.decode()


def test_a_summary_of_a_thought_that_only_openai_can_read_is_a_thought() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}], "encrypted_content": "x"}
    asked = {"input": [{"role": "user", "content": "a"}, thought]}
    assert answer("openai_responses", json.loads(json.dumps(asked))).status == 200


# -- a dialect's errors: a new class of them needs no line in any dialect ----------------------------------------------


FORMATS: dict[str, ErrorFormat] = {"front end": FRONT_END, **{name: one.errors for name, one in DIALECTS.items()}}
STREAMS = {"tgi", "tgi_generate_stream"}  # whose clients read errors as events, under status 200


@in_one_test("base", [ServingError, InvalidPayload, InvalidParameter, TooLong, GenerationFailed, Overloaded])
def test_a_new_class_of_errors_has_its_own_status_in_every_dialect(base: type[ServingError]) -> None:
    class Teapot(base):  # type: ignore[misc, valid-type]
        status = 418

    class Pot(Teapot):
        pass

    for name, form in FORMATS.items():
        for error in (Teapot("short and stout"), Pot("short and stout")):
            answer = form.whole(error)
            assert form.status(error) == 418, name
            assert answer.status == 418 or (answer.status == 200 and name in STREAMS), name
            assert b"stout" in answer.body or b"Model is overloaded" in answer.body, name
            assert json.loads(json.dumps(form.tail(error))), name


@in_one_test("name", FORMATS)
def test_an_error_without_a_status_of_its_own_has_that_of_the_class_above(name: str) -> None:
    class Wrong(InvalidPayload):
        pass

    assert FORMATS[name].status(Wrong("x")) == FORMATS[name].status(InvalidPayload("x"))


def test_every_route_and_path_has_errors() -> None:
    for path in ("/v1/nothing", "/v2/nothing", "/embed_all", "/v2/rerank/x", "/v1/messages/x", "/v1/chat/completions"):
        answer = registry.refuse_path(path, Task.EMBEDDING)
        assert answer is not None
        assert answer.status == errors.NotFound.status, path


# -- a prompt that is too long, alone or together with its answer: one form of error, each dialect's own ---------------


PROMPT = PromptTooLong("inputs", 9000, 8191)
ANSWER = AnswerTooLong("max_new_tokens", 9, 8184, 8192)


def form(value: Any) -> Any:
    """A body without what its messages say, which are the texts of several words."""
    if not isinstance(value, dict):
        return value
    return {
        key: "" if isinstance(part, str) and (key == "param" or " " in part) else form(part)
        for key, part in value.items()
    }


HEARING = replace(CONTEXT, no_media={"audio": ""})


@in_one_test("stream", [False, True])
@in_one_test(("route", "dialect"), EXAMPLES)
def test_both_have_one_form(route: str, dialect: str, stream: bool) -> None:
    example = DESCRIPTIONS[dialect].example
    body = {**example, "stream": True} if stream and dialect in STREAMED else example
    alone, together = (answer(route, body, refused(error), HEARING) for error in (PROMPT, ANSWER))
    assert (alone.status, alone.content_type) == (together.status, together.content_type)
    assert alone.status >= 400 or alone.content_type.startswith("text/event-stream")
    values = [json.loads(one.body.removeprefix(b"data:")) for one in (alone, together)]
    assert values[0] != values[1]
    assert form(values[0]) == form(values[1])


# -- a refusal quotes the value as the client sent it, and names fields as the client's API does -----------------------


WORDS = (
    "reasoning_effort", "thinking_token_budget", "messages[].reasoning", "a].function.b", "tools[0].function.strict",
    "input[].a", "chat_template_kwargs with enable_thinking false", 'tool_choice="required"',
)  # fmt: skip


@in_one_test("dialect", ["openai_chat", "openai_responses", "openai_responses_count", "anthropic_messages"])
def test_a_refusal_quotes_the_value_that_was_sent(dialect: str) -> None:
    refusals, reader = 0, DIALECTS[dialect]
    assert isinstance(reader, OpenAiDialect)
    for name, word in itertools.product(reader.table.parameters, WORDS):
        found = answer(dialect, {**DESCRIPTIONS[dialect].example, name: word}, context=SEEING)
        text = json.loads(found.body)["error"]["message"] if found.status == 400 else ""
        if text.startswith(f"{name}="):
            assert text.startswith(f"{name}={json.dumps(word)}"), text
            refusals += 1
    assert refusals > 80


TOOL = {"description": 5, "strict": "no"}


@in_one_test(
    ("dialect", "body", "path"),
    [
        ("openai_chat", {"tools": [{"type": "function", "function": {"name": "a", **TOOL}}]}, "tools[0].function."),
        ("openai_responses", {"tools": [{"type": "function", "name": "a", **TOOL}]}, "tools[0]."),
        ("openai_responses", {"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools[0].parameters"),
        ("anthropic_messages", {"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema"),
    ],
)
def test_a_refusal_names_the_fields_of_the_clients_api(dialect: str, body: dict[str, Any], path: str) -> None:
    said_text = said(dialect, {**DESCRIPTIONS[dialect].example, **body})
    assert path in said_text
    assert path.endswith("function.") or ".function" not in said_text


def test_an_output_format_is_refused_by_its_own_shape() -> None:
    for value in ({"type": "text"}, 5):
        own = said("anthropic_messages", {**DESCRIPTIONS["anthropic_messages"].example, "output_format": value})
        assert "must be an object with 'type': 'json_schema' and 'schema'" in own
        nested = {**DESCRIPTIONS["anthropic_messages"].example, "output_config": {"format": value}}
        assert "has a 'format' that must be an object" in said("anthropic_messages", nested)
