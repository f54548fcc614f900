"""Hugging Face's inference clients, of Python and of JavaScript."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.checks import (
    CHAT,
    EMOJI,
    PARIS,
    PARIS_IDS,
    TOO_MANY,
    UNICODE,
    check_answer,
    check_prefill,
    check_stream,
    joined,
    texts,
)
from tests.clients.driver import Driver, driving_node
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

# -- huggingface hub ---------------------------------------------------------------------------------------------------
# huggingface_hub's inference clients: lenient, a missing field becomes None, so values are what counts here.


_VALIDATION = "huggingface_hub.errors.ValidationError"
_GENERATION = "huggingface_hub.errors.GenerationError"
_OVERLOADED = "huggingface_hub.errors.OverloadedError"

_both = pytest.mark.parametrize("how", ["generate", "stream"])


# -- plain text ------------------------------------------------------------------------------------------------------


def test_text_alone(huggingface_hub: Driver, tgi_url: str) -> None:
    text = huggingface_hub.generate(tgi_url, PARIS, max_new_tokens=8)
    assert text.startswith(" Paris")
    pieces = huggingface_hub.stream(tgi_url, PARIS, max_new_tokens=8)
    assert len(pieces) == 8
    assert pieces[0] == " Paris"
    assert "".join(pieces) == text


def test_echoed_words_come_one_by_one_for_huggingface_hub(huggingface_hub: Driver, echo_url: str) -> None:
    assert huggingface_hub.generate(echo_url, "a b c", max_new_tokens=4) == " a b c a"
    assert huggingface_hub.stream(echo_url, "a b c", max_new_tokens=4) == [" a", " b", " c", " a"]


def test_the_end_of_sequence_token_is_no_text_for_huggingface_hub(huggingface_hub: Driver, tgi_url: str) -> None:
    text = huggingface_hub.generate(tgi_url, CHAT, max_new_tokens=200)
    assert "Paris" in text
    assert "<|im_end|>" not in text
    assert "".join(huggingface_hub.stream(tgi_url, CHAT, max_new_tokens=200)) == text


def test_the_full_text_begins_with_the_prompt(huggingface_hub: Driver, echo_url: str) -> None:
    assert huggingface_hub.generate(echo_url, "a b", max_new_tokens=3, return_full_text=True) == "a b a b a"


# -- details ---------------------------------------------------------------------------------------------------------


def test_an_answer_has_all_details_for_huggingface_hub(huggingface_hub: Driver, tgi_url: str) -> None:
    answer = huggingface_hub.generate(tgi_url, PARIS, max_new_tokens=8, details=True)
    check_answer(answer, tokens=8)
    details = answer["details"]
    assert details["tokens"][0]["id"] == 7042
    assert details["tokens"][0]["logprob"] == pytest.approx(-0.55, abs=0.3)
    assert details["prefill"] == []
    assert details["seed"] is None
    assert details["best_of_sequences"] is None


def test_a_stream_has_all_details(huggingface_hub: Driver, tgi_url: str) -> None:
    answer = huggingface_hub.generate(tgi_url, PARIS, max_new_tokens=8, details=True)
    events = huggingface_hub.stream(tgi_url, PARIS, max_new_tokens=8, details=True)
    check_stream(events, answer)
    assert [event["index"] for event in events] == list(range(1, 9))
    assert events[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 8,
        "input_length": len(PARIS_IDS),
        "seed": None,
    }


def test_prompt_tokens_come_when_asked_for_by_huggingface_hub(huggingface_hub: Driver, tgi_url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 3, "details": True, "decoder_input_details": True}
    answer = huggingface_hub.generate(tgi_url, PARIS, **options)
    check_answer(answer, tokens=3)
    check_prefill(answer["details"]["prefill"], PARIS_IDS, PARIS)
    check_stream(huggingface_hub.stream(tgi_url, PARIS, **options), answer)


def test_the_end_of_sequence_token_is_special(huggingface_hub: Driver, tgi_url: str) -> None:
    events = huggingface_hub.stream(tgi_url, CHAT, max_new_tokens=200, details=True)
    assert [event["token"]["special"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["token"]["id"] == 2
    assert events[-1]["details"]["finish_reason"] == "eos_token"
    assert events[-1]["details"]["generated_tokens"] == len(events)


@pytest.mark.parametrize("seed", [0, 42])
def test_a_seed_is_reported_and_repeats_the_text(huggingface_hub: Driver, tgi_url: str, seed: int) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": seed, "details": True}
    answer = huggingface_hub.generate(tgi_url, PARIS, **options)
    assert answer["details"]["seed"] == seed
    check_stream(huggingface_hub.stream(tgi_url, PARIS, **options), answer)


def test_best_of_brings_the_other_sequences_for_huggingface_hub(huggingface_hub: Driver, tgi_url: str) -> None:
    answer = huggingface_hub.generate(tgi_url, PARIS, max_new_tokens=5, do_sample=True, best_of=3, details=True)
    others = answer["details"]["best_of_sequences"]
    assert len(others) == 2
    for other in others:
        assert other["prefill"] == []
        assert type(other["seed"]) is int
        check_answer(
            {"generated_text": other["generated_text"], "details": other},
            tokens=len(other["tokens"]),
            finish=other["finish_reason"],
        )


def test_the_greatest_seed_goes_with_best_of(huggingface_hub: Driver, echo_url: str) -> None:
    """The other sequences have seeds of their own, which must be such as a request may give."""
    options: dict[str, Any] = {"do_sample": True, "best_of": 3, "seed": 2**64 - 1, "details": True}
    answer = huggingface_hub.generate(echo_url, "a b", max_new_tokens=2, **options)
    details = answer["details"]
    assert {sequence["generated_text"] for sequence in (answer, *details["best_of_sequences"])} == {" a b"}
    seeds = [sequence["seed"] for sequence in (details, *details["best_of_sequences"])]
    assert 2**64 - 1 in seeds
    assert len(set(seeds)) == 3
    assert all(type(seed) is int and 0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(("stops", "text"), [(["b"], " a b"), ([" b c"], " a b c")])
def test_a_stop_string_stays_in_the_text(huggingface_hub: Driver, echo_url: str, stops: list[str], text: str) -> None:
    answer = huggingface_hub.generate(echo_url, "a b c d", stop=stops, details=True)
    check_answer(answer, tokens=len(text.split()), finish="stop_sequence")
    assert answer["generated_text"] == text
    check_stream(huggingface_hub.stream(echo_url, "a b c d", stop=stops, details=True), answer)


def test_every_script_comes_back_for_huggingface_hub(huggingface_hub: Driver, echo_url: str) -> None:
    words = [f" {word}" for word in UNICODE.split()]
    options: dict[str, Any] = {"max_new_tokens": len(words), "details": True, "return_full_text": True}
    answer = huggingface_hub.generate(echo_url, UNICODE, **options)
    assert texts(answer["details"]["tokens"]) == words
    assert answer["generated_text"] == UNICODE + "".join(words)
    check_stream(huggingface_hub.stream(echo_url, UNICODE, **options), answer)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\r\n"])
def test_unicode_line_separators_do_not_cut_events(huggingface_hub: Driver, echo_url: str, separator: str) -> None:
    """httpx takes each of these for the end of a line, in a stream of events too; JSON can escape them."""
    prompt = f"one{separator}two"
    options: dict[str, Any] = {"max_new_tokens": 2, "details": True, "return_full_text": True}
    events = huggingface_hub.stream(echo_url, prompt, **options)
    assert [event["generated_text"] for event in events] == [None, prompt + " one two"]


def test_characters_made_of_several_tokens_come_whole_for_huggingface_hub(
    huggingface_hub: Driver, tgi_url: str
) -> None:
    answer = huggingface_hub.generate(tgi_url, EMOJI, max_new_tokens=24, details=True)
    assert "👩\u200d🚀" in answer["generated_text"]
    assert "\ufffd" not in joined(answer["details"]["tokens"])
    check_stream(huggingface_hub.stream(tgi_url, EMOJI, max_new_tokens=24, details=True), answer)


def test_a_long_prompt_can_be_streamed(huggingface_hub: Driver, echo_url: str) -> None:
    """aiohttp, in huggingface_hub 0.36, refuses lines above 512 KiB."""
    prompt = f"{'lorem' * 100} {'ipsum' * 100} " * 700
    pieces = huggingface_hub.stream(echo_url, prompt, max_new_tokens=2)
    assert pieces == [f" {'lorem' * 100}", f" {'ipsum' * 100}"]


# -- errors ----------------------------------------------------------------------------------------------------------


@_both
@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PARIS, {"max_new_tokens": TOO_MANY}, "max_new_tokens=200000"),
        ("hello " * 20_000, {}, "'inputs' has"),
        (PARIS, {"temperature": -1.0}, "temperature=-1.0"),
        (PARIS, {"top_p": 1.5}, "top_p=1.5"),
        (PARIS, {"watermark": True}, "watermark=true"),
        (PARIS, {"adapter_id": "mine"}, 'adapter_id="mine"'),
        ("", {}, "'inputs'"),
    ],
)
def test_a_bad_request_is_a_validation_error_for_huggingface_hub(
    huggingface_hub: Driver, tgi_url: str, how: str, prompt: str, options: dict[str, Any], message: str
) -> None:
    outcome = huggingface_hub.call(how, tgi_url, prompt, **options)
    assert outcome.error == _VALIDATION
    assert message in outcome.message
    assert outcome.events == []


def test_several_sequences_cannot_be_streamed(huggingface_hub: Driver, tgi_url: str) -> None:
    outcome = huggingface_hub.call("stream", tgi_url, PARIS, best_of=2, do_sample=True)
    assert outcome.error == _VALIDATION
    assert "best_of" in outcome.message


@_both
def test_a_failure_before_the_first_token_is_a_generation_error(
    huggingface_hub: Driver, echo_url: str, how: str
) -> None:
    outcome = huggingface_hub.call(how, echo_url, "<raise> a")
    assert outcome.error == _GENERATION
    assert "raised on cue" in outcome.message
    assert outcome.events == []


@pytest.mark.parametrize("details", [True, False])
def test_a_stream_that_fails_brings_its_tokens_before_the_error(
    huggingface_hub: Driver, echo_url: str, details: bool
) -> None:
    outcome = huggingface_hub.call("stream", echo_url, "a b <raise> c", details=details)
    assert [event["token"]["text"] if details else event for event in outcome.events] == [" a", " b"]
    assert outcome.error == _GENERATION
    assert "raised on cue" in outcome.message
    assert huggingface_hub.generate(echo_url, "a b", max_new_tokens=2) == " a b"


@_both
def test_a_full_server_is_overloaded_for_huggingface_hub(huggingface_hub: Driver, busy_url: str, how: str) -> None:
    outcome = huggingface_hub.call(how, busy_url, "a b")
    assert outcome.error == _OVERLOADED
    assert "the queue is full" in outcome.message


# -- @huggingface/inference on an endpoint of one's own, whose address it sends as the model's name --------------------


QUESTION = "What is the capital of France?"
JS_CHAT: dict[str, Any] = {"task": "chat", "max_tokens": 12, "temperature": 0}
TEXT: dict[str, Any] = {"task": "text", "max_new_tokens": 8, "temperature": 0}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


@pytest.fixture(scope="module")
def huggingface() -> Iterator[Driver]:
    with driving_node("drive_huggingface") as driver:
        yield driver


def test_a_chat_for_huggingface_hub(huggingface: Driver, model_server: LiveServer) -> None:
    answer = huggingface.generate(model_server.url, QUESTION, **JS_CHAT)
    assert answer["message"]["content"] == "The capital of France is Paris."
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["model"] == huggingface.generate(model_server.url, QUESTION, **JS_CHAT, model="model")["model"]
    chunks = huggingface.stream(model_server.url, QUESTION, **JS_CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == answer["message"]["content"]
    assert len(chunks) == 8


def test_a_completion(huggingface: Driver, model_server: LiveServer) -> None:
    text = huggingface.generate(model_server.url, PARIS, **TEXT)["generated_text"]
    assert text.startswith(" Paris.")
    chunks = huggingface.stream(model_server.url, PARIS, **TEXT)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_a_tool_call_and_log_probabilities(huggingface: Driver, model_server: LiveServer) -> None:
    answer = huggingface.generate(
        model_server.url, "Weather in Paris?", **{**JS_CHAT, "max_tokens": 60}, tools=TOOLS, tool_choice="required"
    )
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"
    answer = huggingface.generate(model_server.url, QUESTION, **JS_CHAT, logprobs=True)
    assert len(answer["logprobs"]["content"]) == 8


@pytest.mark.parametrize(("task", "name"), [(JS_CHAT, "max_tokens"), (TEXT, "max_new_tokens")], ids=["chat", "text"])
def test_a_refusal_is_in_its_exception(huggingface: Driver, model_server: LiveServer, task: Any, name: str) -> None:
    """Its message has the server's for streams; of whole answers the answer's body lies beside it."""
    for how in ("generate", "stream"):
        outcome = huggingface.call(how, model_server.url, PARIS, **{**task, name: -1})
        assert outcome.error == "ProviderApiError"
        assert "max_tokens=-1: must be an integer from" in outcome.message
