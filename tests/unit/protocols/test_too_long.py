"""A prompt that is too long, alone or together with its answer: one form of error, each dialect's own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from handler.core.errors import AnswerTooLong, PromptTooLong
from handler.protocols.openapi import DESCRIPTIONS
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CONTEXT, EXAMPLES, STREAMED, answer, refused

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
