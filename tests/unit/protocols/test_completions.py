"""What a completion says of its prompt's tokens, and requests for nothing but that."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from handler.core.values import Delta, Finish, Token
from tests.one_test import in_one_test
from tests.unit.protocols.answers import TOKENS
from tests.unit.protocols.openai_requests import COMPLETIONS, NAMED, completion, events

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
    assert refused["message"] == "logprobs=3: the engine able lacks it: no tops"


def test_an_engine_without_a_prompts_alternatives_refuses_by_name() -> None:
    poor = replace(NAMED, unsupported={"prompt_top_logprobs": "it has the tokens' own only"})
    assert completion({**ASK, "logprobs": 0}, ONE_TOKEN, poor).status == 200
    refused = json.loads(completion({**ASK, "logprobs": 1}, context=poor).body)["error"]
    assert refused["message"] == "logprobs=1: with echo the engine able lacks it: it has the tokens' own only"
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
    assert refused["message"] == "max_tokens=0: needs echo=true: there would be no answer"
    assert refused["param"] == "max_tokens"


@pytest.mark.parametrize("other", [{"min_tokens": 1}, {"n": 2}, {"best_of": 2}])
def test_no_new_tokens_have_no_company(other: dict[str, Any]) -> None:
    found = completion({**ASK, "max_tokens": 0, **other})
    assert found.status == 400
    (name,) = other
    assert json.loads(found.body)["error"]["param"] == name
