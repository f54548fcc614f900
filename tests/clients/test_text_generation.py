"""text_generation, TGI's own client: its models refuse an answer in which a field is missing or of another type."""

from __future__ import annotations

import math
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
    check_tokens,
    joined,
    texts,
)
from tests.clients.driver import Driver

pytestmark = pytest.mark.clients

_VALIDATION = "text_generation.errors.ValidationError"
_GENERATION = "text_generation.errors.GenerationError"
_OVERLOADED = "text_generation.errors.OverloadedError"

_both = pytest.mark.parametrize("how", ["generate", "stream"])


# -- whole answers ---------------------------------------------------------------------------------------------------


def test_an_answer_has_all_details_for_text_generation(text_generation: Driver, tgi_url: str) -> None:
    answer = text_generation.generate(tgi_url, PARIS, max_new_tokens=8)
    check_answer(answer, tokens=8)
    assert answer["generated_text"].startswith(" Paris")
    details = answer["details"]
    assert details["tokens"][0] == {
        "id": 7042,
        "text": " Paris",
        "logprob": pytest.approx(-0.55, abs=0.3),
        "special": False,
    }
    assert details["prefill"] == []
    assert details["seed"] is None
    assert details["best_of_sequences"] is None
    assert details["top_tokens"] is None


def test_the_client_asks_for_twenty_tokens_by_default(text_generation: Driver, echo_url: str) -> None:
    check_answer(text_generation.generate(echo_url, "a b"), tokens=20)


def test_echoed_tokens_come_back_exactly(text_generation: Driver, echo_url: str) -> None:
    answer = text_generation.generate(echo_url, "a b c", max_new_tokens=4)
    check_answer(answer, tokens=4)
    assert answer["generated_text"] == " a b c a"
    tokens = answer["details"]["tokens"]
    assert texts(tokens) == [" a", " b", " c", " a"]
    assert [token["logprob"] for token in tokens] == [0.0] * 4
    ids = [token["id"] for token in tokens]
    assert len(set(ids)) == 3
    assert ids[3] == ids[0]


def test_a_named_route_answers_alike(text_generation: Driver, echo_url: str) -> None:
    url = echo_url.replace("/invocations", "/predictions/model")
    answer = text_generation.generate(url, "a b", max_new_tokens=2)
    assert answer["generated_text"] == " a b"


def test_prompt_tokens_come_when_asked_for_by_text_generation(text_generation: Driver, tgi_url: str) -> None:
    answer = text_generation.generate(tgi_url, PARIS, max_new_tokens=3, decoder_input_details=True)
    check_answer(answer, tokens=3)
    check_prefill(answer["details"]["prefill"], PARIS_IDS, PARIS)


def test_truncate_keeps_the_end_of_the_prompt(text_generation: Driver, tgi_url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 2, "truncate": 3, "decoder_input_details": True}
    answer = text_generation.generate(tgi_url, PARIS, **options)
    check_prefill(answer["details"]["prefill"], PARIS_IDS[-3:], " of France is")


def test_the_end_of_sequence_token_counts_but_is_no_text(text_generation: Driver, tgi_url: str) -> None:
    answer = text_generation.generate(tgi_url, CHAT, max_new_tokens=200)
    details = answer["details"]
    check_answer(answer, tokens=details["generated_tokens"], finish="eos_token")
    *before, last = details["tokens"]
    assert last["special"] is True
    assert last["id"] == 2
    assert not any(token["special"] for token in before)
    assert answer["generated_text"] == joined(before)
    assert "Paris" in answer["generated_text"]
    check_stream(text_generation.stream(tgi_url, CHAT, max_new_tokens=200), answer)


# -- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 42, 2**64 - 1])
def test_a_given_seed_is_reported_and_repeats_the_text(text_generation: Driver, tgi_url: str, seed: int) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": seed}
    first = text_generation.generate(tgi_url, PARIS, **options)
    check_answer(first, tokens=len(first["details"]["tokens"]), finish=first["details"]["finish_reason"])
    assert first["details"]["seed"] == seed
    check_stream(text_generation.stream(tgi_url, PARIS, **options), first)


def test_a_drawn_seed_is_reported_and_repeats_the_text(text_generation: Driver, tgi_url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True}
    drawn = [text_generation.generate(tgi_url, PARIS, **options) for _ in range(2)]
    seeds = [answer["details"]["seed"] for answer in drawn]
    assert all(type(seed) is int for seed in seeds)
    assert seeds[0] != seeds[1]
    again = text_generation.generate(tgi_url, PARIS, **options, seed=seeds[0])
    assert again["generated_text"] == drawn[0]["generated_text"]


def test_a_greedy_answer_has_no_seed(text_generation: Driver, tgi_url: str) -> None:
    answer = text_generation.generate(tgi_url, PARIS, max_new_tokens=2, seed=42)
    assert answer["details"]["seed"] is None


def test_all_sampling_parameters_are_taken(text_generation: Driver, tgi_url: str) -> None:
    answer = text_generation.generate(
        tgi_url, PARIS, max_new_tokens=3, do_sample=True, seed=1, temperature=0.5, top_k=1, top_p=0.9,
        repetition_penalty=1.1, truncate=100,
    )  # fmt: skip
    assert answer["generated_text"].startswith(" Paris")  # top_k=1 leaves nothing to chance
    assert answer["details"]["seed"] == 1


def test_penalties_that_exclude_each_other_are_refused_by_name(text_generation: Driver, tgi_url: str) -> None:
    answer = text_generation.generate(tgi_url, PARIS, max_new_tokens=3, frequency_penalty=0.1)
    assert answer["generated_text"].startswith(" Paris")
    both = {"frequency_penalty": 0.1, "repetition_penalty": 1.1}
    outcome = text_generation.call("generate", tgi_url, PARIS, max_new_tokens=3, **both)
    assert outcome.error == "text_generation.errors.ValidationError"
    assert "cannot be combined with repetition_penalty on OpenVINO" in outcome.message


def test_best_of_brings_the_other_sequences_for_text_generation(text_generation: Driver, tgi_url: str) -> None:
    answer = text_generation.generate(
        tgi_url, PARIS, max_new_tokens=6, do_sample=True, best_of=2, decoder_input_details=True
    )
    details = answer["details"]
    check_prefill(details["prefill"], PARIS_IDS, PARIS)
    (other,) = details["best_of_sequences"]
    for text, found in ((answer["generated_text"], details), (other["generated_text"], other)):
        check_tokens(found["tokens"])
        assert joined(found["tokens"]) == text
        assert found["generated_tokens"] == len(found["tokens"]) <= 6
        assert found["finish_reason"] in ("length", "eos_token")
    assert _logprob(details) >= _logprob(other)


def test_every_sequence_of_best_of_names_its_own_seed(text_generation: Driver, tgi_url: str) -> None:
    """As in TGI, a seed in an answer is one that brings the text beside it back.

    The last digits of logits are others in company. That moves the bounds between the thousands of unlikely tokens, so
    few take part.
    """
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "top_k": 10}
    answer = text_generation.generate(tgi_url, PARIS, **options, best_of=3)
    best, others = answer["details"], answer["details"]["best_of_sequences"]
    assert len(others) == 2
    for seed, text in [(best["seed"], answer["generated_text"])] + [(o["seed"], o["generated_text"]) for o in others]:
        again = text_generation.generate(tgi_url, PARIS, **options, seed=seed)
        assert again["generated_text"] == text


def _logprob(sequence: dict[str, Any]) -> float:
    return math.fsum(token["logprob"] for token in sequence["tokens"])


# -- text ------------------------------------------------------------------------------------------------------------


def test_the_full_text_begins_with_the_prompt_but_the_tokens_do_not(text_generation: Driver, tgi_url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "return_full_text": True}
    answer = text_generation.generate(tgi_url, PARIS, **options)
    assert answer["generated_text"] == PARIS + joined(answer["details"]["tokens"])
    assert joined(answer["details"]["tokens"]).startswith(" Paris")
    check_stream(text_generation.stream(tgi_url, PARIS, **options), answer)


@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [
        (["b"], " a b", 2),
        (["c", "b"], " a b", 2),
        ([" b c"], " a b c", 3),
        (["c d e"], " a b c d e", 5),
        (["nowhere"], " a b c d e a b c", 8),
    ],
)
def test_a_stop_string_ends_the_text_and_stays_in_it_for_text_generation(
    text_generation: Driver, echo_url: str, stops: list[str], text: str, tokens: int
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "stop_sequences": stops}
    answer = text_generation.generate(echo_url, "a b c d e", **options)
    check_answer(answer, tokens=tokens, finish="length" if tokens == 8 else "stop_sequence")
    assert answer["generated_text"] == text
    check_stream(text_generation.stream(echo_url, "a b c d e", **options), answer)


def test_a_model_stops_at_a_stop_string(text_generation: Driver, tgi_url: str) -> None:
    answer = text_generation.generate(tgi_url, PARIS, max_new_tokens=50, stop_sequences=["Par"])
    check_answer(answer, tokens=1, finish="stop_sequence")
    assert answer["generated_text"].startswith(" Par")


def test_every_script_comes_back_for_text_generation(text_generation: Driver, echo_url: str) -> None:
    words = [f" {word}" for word in UNICODE.split()]
    options: dict[str, Any] = {"max_new_tokens": len(words), "return_full_text": True}
    answer = text_generation.generate(echo_url, UNICODE, **options)
    assert texts(answer["details"]["tokens"]) == words
    assert answer["generated_text"] == UNICODE + "".join(words)
    check_stream(text_generation.stream(echo_url, UNICODE, **options), answer)


def test_characters_made_of_several_tokens_come_whole_for_text_generation(
    text_generation: Driver, tgi_url: str
) -> None:
    answer = text_generation.generate(tgi_url, EMOJI, max_new_tokens=24)
    check_answer(answer, tokens=24)
    assert "👩\u200d🚀" in answer["generated_text"]
    assert "\ufffd" not in answer["generated_text"]
    assert texts(answer["details"]["tokens"]).count("") > 8  # a character comes with its last token
    check_stream(text_generation.stream(tgi_url, EMOJI, max_new_tokens=24), answer)


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_says_what_the_answer_says(text_generation: Driver, tgi_url: str) -> None:
    answer = text_generation.generate(tgi_url, PARIS, max_new_tokens=8)
    events = text_generation.stream(tgi_url, PARIS, max_new_tokens=8)
    check_stream(events, answer)
    assert joined([event["token"] for event in events]) == answer["generated_text"]
    assert events[-1]["details"] == {"finish_reason": "length", "generated_tokens": 8, "seed": None}


def test_a_stream_of_one_token_is_one_event(text_generation: Driver, echo_url: str) -> None:
    (event,) = text_generation.stream(echo_url, "a b", max_new_tokens=1)
    assert event["token"]["text"] == event["generated_text"] == " a"
    assert event["details"]["generated_tokens"] == 1


def test_the_last_event_of_a_long_prompt_can_be_read(text_generation: Driver, echo_url: str) -> None:
    """aiohttp refuses lines above 512 KiB (older ones 128); TGI sends none, as its events do not repeat the prompt."""
    prompt = f"{'lorem' * 100} {'ipsum' * 100} " * 700
    events = text_generation.stream(echo_url, prompt, max_new_tokens=2)
    assert [event["generated_text"] for event in events] == [None, f" {'lorem' * 100} {'ipsum' * 100}"]


def test_prompts_of_many_tokens_are_answered_one_after_another(text_generation: Driver, fresh_url: str) -> None:
    """The ids alone are more than a socket's buffer holds on their way to the engine."""
    for _ in range(3):
        events = text_generation.stream(fresh_url, "a b " * 60_000, max_new_tokens=2)
        assert texts([event["token"] for event in events]) == [" a", " b"]
    assert text_generation.generate(fresh_url, "a b", max_new_tokens=2)["generated_text"] == " a b"


# -- errors ----------------------------------------------------------------------------------------------------------


@_both
@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PARIS, {"max_new_tokens": TOO_MANY}, "max_new_tokens=200000"),
        (PARIS, {"max_new_tokens": 0}, "max_new_tokens=0"),
        ("hello " * 20_000, {"max_new_tokens": 2}, "'inputs' has"),
        (PARIS, {"watermark": True}, "watermark=true"),
        (PARIS, {"top_n_tokens": 3}, "top_n_tokens=3"),
        (PARIS, {"stop_sequences": [""]}, "stop="),
    ],
)
def test_a_bad_request_is_a_validation_error_for_text_generation(
    text_generation: Driver, tgi_url: str, how: str, prompt: str, options: dict[str, Any], message: str
) -> None:
    outcome = text_generation.call(how, tgi_url, prompt, **options)
    assert outcome.error == _VALIDATION
    assert message in outcome.message
    assert outcome.events == []


@_both
@pytest.mark.parametrize(("prompt", "cause"), [("<raise> a", "raised on cue"), ("a <refuse>", "refused on cue")])
def test_a_failure_before_the_first_token_raises_a_generation_error(
    text_generation: Driver, echo_url: str, how: str, prompt: str, cause: str
) -> None:
    outcome = text_generation.call(how, echo_url, prompt)
    assert outcome.error == _GENERATION
    assert cause in outcome.message
    assert outcome.events == []


def test_a_failed_answer_is_a_generation_error_for_text_generation(text_generation: Driver, echo_url: str) -> None:
    outcome = text_generation.call("generate", echo_url, "a b <raise> c")
    assert outcome.error == _GENERATION
    assert "raised on cue" in outcome.message


def test_text_generation_yields_the_tokens_of_a_stream_before_its_error(text_generation: Driver, echo_url: str) -> None:
    outcome = text_generation.call("stream", echo_url, "a b <raise> c")
    assert texts([event["token"] for event in outcome.events]) == [" a", " b"]
    assert all(event["generated_text"] is None and event["details"] is None for event in outcome.events)
    assert outcome.error == _GENERATION
    assert "raised on cue" in outcome.message
    assert text_generation.generate(echo_url, "a b", max_new_tokens=2)["generated_text"] == " a b"


@_both
def test_a_full_server_is_overloaded_for_text_generation(text_generation: Driver, busy_url: str, how: str) -> None:
    outcome = text_generation.call(how, busy_url, "a b")
    assert outcome.error == _OVERLOADED
    assert "the queue is full" in outcome.message
