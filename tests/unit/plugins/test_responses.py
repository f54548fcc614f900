"""Output formatters of LMI's async mode: response objects and chunks, and what becomes of what they return."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from handler.core.errors import FormatterFailed, GenerationFailed
from handler.core.values import Delta, Finish, Token
from handler.formatters import Response
from handler.plugins.custom_messages import with_formatter
from handler.plugins.functions import OutputFormatter, Style
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.registry import INVOCATIONS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CONTEXT

PROMPT = {"inputs": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
STREAM = {"stream": True}


def call(function: Callable[[Any], Any], body: dict[str, Any], style: Style = Style.RESPONSE) -> ParsedRequest:
    plain = INVOCATIONS["lmi"].parse(body, CONTEXT)
    return with_formatter(plain, OutputFormatter("f", function, style), body, None, tgi_compat=False)


def pieces(found: ParsedRequest, texts: str = "ab") -> list[str]:
    found.reply.start(0, 2)
    *before, last = [Delta(1, 0, (Token(7, text, -1.0, False),), None) for text in texts]
    script = [*before, last._replace(finish=Finish.LENGTH)]
    sent = [found.reply.feed(0, delta).decode() for delta in script]
    assert found.reply.finished
    return sent


def whole(function: Callable[[Any], Any], body: dict[str, Any], style: Style = Style.RESPONSE) -> str:
    found = call(function, body, style)
    assert (found.reply.content_type, found.streams) == ("application/json", False)
    return "".join(pieces(found))


# -- whole answers -----------------------------------------------------------------------------------------------


def test_a_prompts_answer_is_a_text_completion_with_attributes() -> None:
    def look(output: Any) -> Any:
        choice = output.choices[0]
        assert (choice.text, choice.finish_reason, output.object) == ("ab", "length", "text_completion")
        assert (output.model, output.usage.completion_tokens) == (CONTEXT.model_names[0], 2)
        assert not hasattr(choice, "message")
        return {"mine": choice.text}

    assert whole(look, PROMPT) == '{"mine": "ab"}\n'


def test_a_chats_answer_is_a_chat_completion_with_attributes() -> None:
    def look(output: Any) -> Any:
        assert (output.object, output.model) == ("chat.completion", CONTEXT.model_names[0])
        message = output.choices[0].message
        message.content = message.content.upper()
        return output

    found = json.loads(whole(look, CHAT))
    assert found["choices"][0]["message"]["content"] == "AB"


def test_attributes_may_be_added_to_an_answer() -> None:
    def sign(output: Any, **kwargs: Any) -> Any:
        if hasattr(output, "model_dump"):
            output.processed_by = "me"
        return output

    for body in (PROMPT, CHAT):
        assert json.loads(whole(sign, body))["processed_by"] == "me"


class Dumped:
    def model_dump(self) -> dict[str, Any]:
        return {"dumped": "é"}


@pytest.mark.parametrize(
    ("result", "sent"),
    [("as it is", "as it is"), ({"a": None}, '{"a": null}'), (Dumped(), '{"dumped": "é"}'), (Response({"a": 1}), None)],
)
def test_text_dicts_and_objects_are_the_whole_body(result: Any, sent: str | None) -> None:
    assert whole(lambda output: result, PROMPT) == (sent or '{"a": 1}') + "\n"


def test_details_and_the_full_text_are_a_completions_own() -> None:
    body = {**PROMPT, "parameters": {"details": True, "return_full_text": True}}
    found = json.loads(whole(lambda output: output, body))
    assert found["choices"][0]["text"] == "hiab"
    assert found["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -1.0]


# -- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [PROMPT, CHAT])
def test_a_stream_gets_each_chunk_as_text_and_the_end(body: dict[str, Any]) -> None:
    seen: list[str] = []

    def keep(chunk: str) -> str:
        seen.append(chunk)
        return chunk

    found = call(keep, {**body, **STREAM})
    assert (found.streams, found.reply.content_type, found.keep_alive) == (True, "application/jsonlines", b"")
    sent = "".join(pieces(found))
    assert sent == "".join(f"{chunk}\n" for chunk in seen) + "\n"
    assert seen[-1] == "data: [DONE]\n\n"
    chunks = [json.loads(chunk.removeprefix("data: ")) for chunk in seen[:-1]]
    assert all(chunk["model"] == CONTEXT.model_names[0] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_chunk_may_become_a_dict() -> None:
    sent = "".join(pieces(call(lambda chunk: {"a": len(chunk) > 20}, {**PROMPT, **STREAM})))
    assert sent == '{"a": true}\n{"a": true}\n{"a": false}\n\n'


@in_one_test("body", [PROMPT, CHAT])
@in_one_test("stream", [{}, STREAM])
@in_one_test("result", [None, 3, object(), {"a": object()}, {"a": float("nan")}, [1], "\ud800"])
def test_nonsense_is_named(body: dict[str, Any], stream: dict[str, Any], result: Any) -> None:
    with pytest.raises(FormatterFailed, match=r"^output formatter 'f' of model\.py (returned|left)"):
        pieces(call(lambda output: result, {**body, **stream}))


def test_a_failure_of_the_engine_never_goes_through_the_function() -> None:
    found = call(lambda output: "fine", {**CHAT, **STREAM})
    assert found.reply.feed(0, Delta(1, 0, (Token(7, "a", -1.0, False),), None))
    failure = found.reply.feed(0, Delta(1, 0, (), Finish.ERROR, GenerationFailed("it died")))
    assert (json.loads(failure)["error"], json.loads(failure)["code"]) == ("it died", 424)
    assert found.reply.finished


@in_one_test("schema", ["lmi", "lmi_async"])
@in_one_test("style", [Style.RESPONSE, Style.VALUE, Style.OUTPUT])
def test_a_stream_that_breaks_off_ends_as_without_a_formatter(schema: str, style: Style) -> None:
    plain = INVOCATIONS[schema].parse({**PROMPT, **STREAM}, CONTEXT)
    formatter = OutputFormatter("f", lambda output: output if style is not Style.OUTPUT else "x", style)
    found = with_formatter(plain, formatter, PROMPT, None, tgi_compat=False)
    failure = Delta(1, 0, (), Finish.ERROR, GenerationFailed("it died"))
    wanted = plain.reply.feed(0, failure)
    assert found.reply is not plain.reply
    assert found.reply.feed(0, Delta(1, 0, (Token(7, "a", -1.0, False),), None))
    assert found.reply.feed(0, failure) == wanted


# -- dicts -------------------------------------------------------------------------------------------------------


def test_formatters_of_dicts_change_chats_too() -> None:
    def sign(response_data: dict[str, Any]) -> dict[str, Any]:
        return {**response_data, "served_by": "me"}

    found = json.loads(whole(sign, CHAT, Style.VALUE))
    assert (found["served_by"], found["choices"][0]["message"]["content"]) == ("me", "ab")
    lines = "".join(pieces(call(sign, {**CHAT, **STREAM}, Style.VALUE))).splitlines()
    assert {json.loads(line)["served_by"] for line in lines} == {"me"}


def test_a_line_without_its_text_yet_comes_without_the_field() -> None:
    def measure(response_data: dict[str, Any]) -> dict[str, Any]:
        if "generated_text" in response_data:
            response_data["length"] = len(response_data["generated_text"])
        return response_data

    plain = INVOCATIONS["lmi_async"].parse({**PROMPT, **STREAM}, CONTEXT)
    formatter = OutputFormatter("f", measure, Style.VALUE)
    lines = "".join(pieces(with_formatter(plain, formatter, PROMPT, None, tgi_compat=False))).split("\n")
    first, last = (json.loads(line) for line in lines[:2])
    assert list(first) == ["index", "token", "generated_text", "details"]
    assert (first["generated_text"], last["length"], lines[2:]) == (None, 2, ["", "", ""])


def test_what_formatters_of_tokens_do_not_get_stays() -> None:
    assert not call(lambda output: "x", CHAT, Style.OUTPUT).formats.title
    named = {**PROMPT, "parameters": {"output_formatter": "json"}}
    assert not call(lambda output: "x", named).formats.title


# -- the object --------------------------------------------------------------------------------------------------


def test_a_response_is_an_object_and_a_dict() -> None:
    response = Response({"a": {"b": [{"c": 1}]}, "none": None})
    response.a.b[0].c += 1
    assert response["a"]["b"][0]["c"] == 2
    assert response.model_dump(mode="json") == {"a": {"b": [{"c": 2}]}, "none": None}
    assert type(response.model_dump()["a"]) is dict
    assert response.model_dump_json(exclude_none=True) == '{"a":{"b":[{"c":2}]}}'
    del response.a
    with pytest.raises(AttributeError, match="no field 'a'"):
        _ = response.a
    with pytest.raises(AttributeError, match="no field 'a'"):
        del response.a
