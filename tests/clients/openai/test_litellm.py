"""litellm's provider for Triton: parameters nested, `stream` beside them, the path chosen by it."""

from __future__ import annotations

import pytest

from tests.clients.checks import PARIS, UNICODE
from tests.clients.driver import Driver

pytestmark = pytest.mark.clients


def test_a_model_answers(litellm: Driver, triton_url: str) -> None:
    text = litellm.generate(triton_url, PARIS, max_tokens=8, exclude_input_in_output=True)
    assert text.startswith(" Paris")
    pieces = litellm.stream(triton_url, PARIS, max_tokens=8)
    assert pieces[0] == " Paris"
    assert "".join(pieces) == text


def test_the_prompt_comes_first_as_from_tensorrt_llm(litellm: Driver, triton_url: str) -> None:
    assert litellm.generate(triton_url, PARIS, max_tokens=1) == f"{PARIS} Paris"


def test_other_parameters_go_through(litellm: Driver, triton_url: str) -> None:
    text = litellm.generate(triton_url, PARIS, max_tokens=8, stop_words=["ris"], exclude_input_in_output=True)
    assert text == " Pa"


def test_echoed_words_come_one_by_one(litellm: Driver, triton_echo_url: str) -> None:
    words = [f" {word}" for word in UNICODE.split()]
    pieces = litellm.stream(triton_echo_url, UNICODE, max_tokens=len(words))
    assert [piece for piece in pieces if piece] == words


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_refusal_is_a_status_and_a_text(litellm: Driver, triton_url: str, how: str) -> None:
    outcome = litellm.call(how, triton_url, PARIS, max_tokens=100_000_000)
    assert "max_tokens=100000000: with 5 prompt tokens" in outcome.message
    assert outcome.error is not None
    assert outcome.error.startswith("litellm.exceptions.")
    assert outcome.events == []
