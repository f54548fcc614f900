"""langchain_huggingface's HuggingFaceEndpoint, which sends sampling values with do_sample=false by default."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.checks import CHAT, PARIS, TOO_MANY, UNICODE
from tests.clients.driver import Driver

pytestmark = pytest.mark.clients

_both = pytest.mark.parametrize("how", ["generate", "stream"])


def test_a_model_answers(langchain: Driver, tgi_url: str) -> None:
    text = langchain.generate(tgi_url, PARIS, max_new_tokens=8)
    assert text.startswith(" Paris")
    pieces = langchain.stream(tgi_url, PARIS, max_new_tokens=8)
    assert pieces[0] == " Paris"
    assert "".join(pieces) == text


def test_the_end_of_sequence_token_is_no_text(langchain: Driver, tgi_url: str) -> None:
    text = langchain.generate(tgi_url, CHAT, max_new_tokens=200)
    assert "Paris" in text
    assert "<|im_end|>" not in text
    assert "".join(langchain.stream(tgi_url, CHAT, max_new_tokens=200)) == text


def test_the_default_is_512_tokens(langchain: Driver, echo_url: str) -> None:
    assert langchain.generate(echo_url, "a b") == " a b" * 256


def test_echoed_words_come_one_by_one(langchain: Driver, echo_url: str) -> None:
    words = [f" {word}" for word in UNICODE.split()]
    assert langchain.generate(echo_url, UNICODE, max_new_tokens=len(words)) == "".join(words)
    assert [piece for piece in langchain.stream(echo_url, UNICODE, max_new_tokens=len(words)) if piece] == words


@pytest.mark.parametrize(("stop", "text"), [(["c"], " a b "), ([" b c"], " a")])
def test_the_client_takes_the_stop_string_off(langchain: Driver, echo_url: str, stop: list[str], text: str) -> None:
    assert langchain.generate(echo_url, "a b c d", stop=stop) == text


def test_a_stream_ends_before_the_stop_string(langchain: Driver, echo_url: str) -> None:
    assert "".join(langchain.stream(echo_url, "a b c d", stop=["c"])) == " a b "


def test_a_seed_repeats_the_text(langchain: Driver, tgi_url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 7, "typical_p": None}
    text = langchain.generate(tgi_url, PARIS, **options)
    assert text
    assert "".join(langchain.stream(tgi_url, PARIS, **options)) == text


@_both
def test_a_bad_request_is_a_validation_error(langchain: Driver, tgi_url: str, how: str) -> None:
    outcome = langchain.call(how, tgi_url, PARIS, max_new_tokens=TOO_MANY)
    assert outcome.error == "huggingface_hub.errors.ValidationError"
    assert "max_new_tokens=200000" in outcome.message


def test_a_failed_answer_is_a_generation_error(langchain: Driver, echo_url: str) -> None:
    outcome = langchain.call("generate", echo_url, "a b <raise> c")
    assert outcome.error == "huggingface_hub.errors.GenerationError"
    assert "raised on cue" in outcome.message


def test_a_stream_that_fails_brings_its_tokens_before_the_error(langchain: Driver, echo_url: str) -> None:
    outcome = langchain.call("stream", echo_url, "a b <raise> c")
    assert [piece for piece in outcome.events if piece] == [" a", " b"]
    assert outcome.error == "huggingface_hub.errors.GenerationError"


@_both
def test_a_full_server_is_overloaded(langchain: Driver, busy_url: str, how: str) -> None:
    outcome = langchain.call(how, busy_url, "a b")
    assert outcome.error == "huggingface_hub.errors.OverloadedError"
    assert "the queue is full" in outcome.message
