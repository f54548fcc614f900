"""White space at the ends of text and reasoning, however the answer is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.values import Finish, Token
from handler.protocols.assistant.answer import AnswerForm, AnswerReader, answer_form
from handler.protocols.assistant.events import Event, Reasoning
from handler.protocols.assistant.tools.request import Tools
from tests.unit.protocols.answers import CAPABLE, with_options

THINKING = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
CALL = '<tool_call>{"name": "f", "arguments": {"a": " 1 "}}</tool_call>'


def reader(**options: Any) -> AnswerReader:
    found = answer_form(Tools(), with_options(CAPABLE, trim_answers=True, **options)).reader()
    assert found is not None
    return found


def read(pieces: list[str], **options: Any) -> tuple[str, str]:
    """Return the text and the reasoning of an answer that comes in pieces."""
    answer = reader(**options)
    events: list[Event] = [event for piece in pieces for event in answer.feed(Token(1, piece, 0.0, False))]
    events += answer.flush(Finish.EOS)
    assert all(event != "" for event in events)
    return (
        "".join(event for event in events if isinstance(event, str)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
    )


@pytest.mark.parametrize(
    ("answer", "text", "reasoning"),
    [
        ("<think>\n Well \n now.\n</think>\n\nIt is  \n so.\n", "It is  \n so.", "Well \n now."),
        ("<think> \n</think>\n\n", "", ""),
        ("<think>a</think>b", "b", "a"),
    ],
)
def test_the_ends_of_text_and_reasoning_have_none(answer: str, text: str, reasoning: str) -> None:
    for cut in range(len(answer)):
        assert read([answer[:cut], answer[cut:]], **THINKING) == (text, reasoning)
    assert read(list(answer), **THINKING) == (text, reasoning)


@given(st.lists(st.text(alphabet="a \n\t", max_size=4)))
def test_plain_text_is_trimmed_as_a_whole(pieces: list[str]) -> None:
    assert read(pieces) == ("".join(pieces).strip(), "")


def test_without_the_option_plain_text_has_no_reader() -> None:
    assert AnswerForm().reader() is None
    assert answer_form(Tools(), CAPABLE) == AnswerForm()
