"""TGI's clients at TGI's own routes: `/`, `/generate` and `/generate_stream`, in every mode of the server."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tests.servers import ANSWER_LIMIT, LiveServer, ServerProcess, http, serve, wait_for

pytestmark = pytest.mark.clients

_both = pytest.mark.parametrize("how", ["generate", "stream"])
_ERRORS = ("validation", "overloaded", "generation", "incomplete_generation")
_CLASSES = {
    "text_generation.errors": ("ValidationError", "OverloadedError", "GenerationError", "IncompleteGenerationError"),
    "huggingface_hub.errors": ("ValidationError", "OverloadedError", "GenerationError", "IncompleteGenerationError"),
}


def error(module: str, kind: str) -> str:
    return f"{module}.{_CLASSES[module][_ERRORS.index(kind)]}"


@pytest.fixture(scope="module")
def model_url(model_server: LiveServer) -> str:
    """The demo model, in LMI's own mode: the routes are there in any."""
    model_server.wait_ready()
    return model_server.url


@pytest.fixture(scope="module")
def echo(echo_url: str) -> str:
    return echo_url.removesuffix("/invocations")


@pytest.fixture(scope="module")
def busy(busy_url: str) -> str:
    return busy_url.removesuffix("/invocations")


@pytest.fixture
def mortal() -> Iterator[ServerProcess]:
    """A slow server for one test, which may end it or its engine."""
    pace = ("-o", "option.echo_tokens_per_second=20", "-o", "option.engine_isolation=process")
    with serve("--engine", "echo", *pace) as server:
        server.wait_ready()
        yield server


def route(base: str, how: str) -> str:
    """Where a client of `/generate` goes: it has a route for streams."""
    return f"{base}/generate" if how == "generate" else f"{base}/generate_stream"


# -- text_generation: posts to the address itself, which is `/` ------------------------------------------------------


def test_an_answer_has_all_details_for_tgi_native(text_generation: Driver, model_url: str) -> None:
    answer = text_generation.generate(model_url, PARIS, max_new_tokens=8)
    check_answer(answer, tokens=8)
    assert answer["generated_text"].startswith(" Paris")
    details = answer["details"]
    assert details["tokens"][0]["id"] == 7042
    assert (details["prefill"], details["seed"], details["best_of_sequences"]) == ([], None, None)
    events = text_generation.stream(model_url, PARIS, max_new_tokens=8)
    check_stream(events, answer)
    assert events[-1]["details"] == {"finish_reason": "length", "generated_tokens": 8, "seed": None}


def test_the_end_token_shows_and_is_no_text(text_generation: Driver, model_url: str) -> None:
    answer = text_generation.generate(model_url, CHAT, max_new_tokens=200)
    *before, last = answer["details"]["tokens"]
    assert (last["id"], last["text"], last["special"]) == (2, "<|im_end|>", True)
    assert answer["generated_text"] == joined(before)
    assert answer["details"]["finish_reason"] == "eos_token"
    check_tokens(answer["details"]["tokens"])
    check_stream(text_generation.stream(model_url, CHAT, max_new_tokens=200), answer)


def test_prompt_tokens_come_when_asked_for_by_tgi_native(text_generation: Driver, model_url: str) -> None:
    answer = text_generation.generate(model_url, PARIS, max_new_tokens=3, decoder_input_details=True)
    check_prefill(answer["details"]["prefill"], PARIS_IDS, PARIS)


def test_sampling_and_best_of(text_generation: Driver, model_url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.9}
    drawn = text_generation.generate(model_url, PARIS, **options)
    again = text_generation.generate(model_url, PARIS, **options, seed=drawn["details"]["seed"])
    assert again["generated_text"] == drawn["generated_text"]
    answer = text_generation.generate(model_url, PARIS, **options, best_of=2)
    (other,) = answer["details"]["best_of_sequences"]
    means = [
        sum(token["logprob"] for token in found["tokens"]) / len(found["tokens"])
        for found in (answer["details"], other)
    ]
    assert means == sorted(means, reverse=True)
    assert other["seed"] != answer["details"]["seed"]


def test_a_stop_string_ends_the_text_and_stays_in_it_for_tgi_native(text_generation: Driver, echo: str) -> None:
    for stops, text in (([" b c"], " a b c"), (["d", "c"], " a b c"), (["nowhere"], " a b c d a b")):
        options: dict[str, Any] = {"max_new_tokens": 6, "stop_sequences": stops}
        answer = text_generation.generate(echo, "a b c d", **options)
        assert answer["generated_text"] == text == joined(answer["details"]["tokens"])
        assert texts(answer["details"]["tokens"]) == [f" {word}" for word in text.split()]  # none is held back
        check_stream(text_generation.stream(echo, "a b c d", **options), answer)


def test_every_script_comes_back_for_tgi_native(text_generation: Driver, echo: str) -> None:
    words = [f" {word}" for word in UNICODE.split()]
    options: dict[str, Any] = {"max_new_tokens": len(words), "return_full_text": True}
    answer = text_generation.generate(echo, UNICODE, **options)
    assert answer["generated_text"] == UNICODE + "".join(words)
    check_stream(text_generation.stream(echo, UNICODE, **options), answer)


def test_characters_made_of_several_tokens_come_whole_for_tgi_native(text_generation: Driver, model_url: str) -> None:
    answer = text_generation.generate(model_url, EMOJI, max_new_tokens=24)
    assert "👩\u200d🚀" in answer["generated_text"]
    check_stream(text_generation.stream(model_url, EMOJI, max_new_tokens=24), answer)


@_both
@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PARIS, {"max_new_tokens": 0}, "Input validation error: `max_new_tokens` must be strictly positive"),
        (PARIS, {"stop_sequences": list("abcde")}, "Input validation error: `stop` supports up to 4 stop sequences."),
        (PARIS, {"watermark": True}, "Input validation error: parameters.watermark=true: is not supported"),
        (PARIS, {"max_new_tokens": 20, "truncate": TOO_MANY}, "Input validation error: `truncate` must be strictly"),
        (
            "hello " * 20_000,
            {"max_new_tokens": 2},
            "Input validation error: `inputs` tokens + `max_new_tokens` must be <=",
        ),
    ],
)
def test_validation_error(
    text_generation: Driver, model_url: str, how: str, prompt: str, options: dict[str, Any], message: str
) -> None:
    outcome = text_generation.call(how, model_url, prompt, **options)
    assert outcome.error == error("text_generation.errors", "validation")
    assert outcome.message.startswith(message)
    assert outcome.events == []


def test_validation_error_of_best_of(text_generation: Driver, model_url: str) -> None:
    outcome = text_generation.call("generate", model_url, PARIS, best_of=3, do_sample=True)
    assert outcome.error == error("text_generation.errors", "validation")
    assert outcome.message == "Input validation error: `best_of` must be > 0 and <= 2. Given: 3"


@_both
def test_overloaded_error(text_generation: Driver, busy: str, how: str) -> None:
    outcome = text_generation.call(how, busy, "a b")
    assert (outcome.error, outcome.message) == (error("text_generation.errors", "overloaded"), "Model is overloaded")


@_both
def test_generation_error_of_a_killed_engine(text_generation: Driver, mortal: ServerProcess, how: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(text_generation.call, how, mortal.url, "a b", max_new_tokens=1000)
        wait_for(lambda: mortal.metric("lmi_active_sequences") == 1, 10, "it does not run")
        time.sleep(0.3)
        subprocess.run(["kill", "-9", str(mortal.engine_pid())], check=True)
        outcome = future.result()
    assert outcome.error == error("text_generation.errors", "generation")
    assert outcome.message.startswith("Request failed during generation: engine failure: ")
    assert texts([event["token"] for event in outcome.events]) == ([" a", " b"] * 500)[: len(outcome.events)]
    assert bool(outcome.events) is (how == "stream")


@_both
def test_incomplete_generation_error_of_a_stopped_server(
    text_generation: Driver, mortal: ServerProcess, how: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(text_generation.call, how, mortal.url, "a b", max_new_tokens=1000)
        wait_for(lambda: mortal.metric("lmi_active_sequences") == 1, 10, "it does not run")
        for _ in range(2):  # the first lets it end, the second does not
            time.sleep(0.3)
            mortal.process.send_signal(signal.SIGTERM)
        outcome = future.result()
    assert outcome.error == error("text_generation.errors", "incomplete_generation")
    assert outcome.message == "Incomplete generation"
    assert bool(outcome.events) is (how == "stream")


# -- huggingface_hub: any of the routes --------------------------------------------------------------------------------


def test_the_hubs_client_at_every_route(huggingface_hub: Driver, model_url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "details": True, "return_full_text": False}
    whole = [huggingface_hub.generate(url, PARIS, **options) for url in (model_url, route(model_url, "generate"))]
    for answer in whole:
        check_answer(answer, tokens=8)
        assert answer["generated_text"].startswith(" Paris")
        assert (answer["details"]["seed"], answer["details"]["prefill"]) == (None, [])
    for url in (model_url, route(model_url, "stream")):
        events = huggingface_hub.stream(url, PARIS, **options)
        check_stream(events, whole[0])
        assert [event["index"] for event in events] == list(range(1, 9))
        assert events[-1]["details"] == {
            "finish_reason": "length", "generated_tokens": 8, "input_length": len(PARIS_IDS), "seed": None,
        }  # fmt: skip


def test_the_full_text_is_the_default_at_the_root_alone(huggingface_hub: Driver, echo: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
    assert huggingface_hub.generate(echo, "a b", **options) == "a b a b"
    assert huggingface_hub.generate(f"{echo}/generate", "a b", **options) == " a b"
    assert huggingface_hub.stream(f"{echo}/generate_stream", "a b", **options) == [" a", " b"]


def test_the_end_token_is_special_for_the_hubs_client(huggingface_hub: Driver, model_url: str) -> None:
    events = huggingface_hub.stream(route(model_url, "stream"), CHAT, max_new_tokens=200, details=True)
    assert [event["token"]["special"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["token"]["text"] == "<|im_end|>"
    assert "<|im_end|>" not in events[-1]["generated_text"]
    assert "Paris" in events[-1]["generated_text"]


@_both
@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PARIS, {"temperature": -1.0}, "`temperature` must be strictly positive"),
        (PARIS, {"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        (PARIS, {"adapter_id": "mine"}, 'parameters.adapter_id="mine"'),
        (PARIS, {"typical_p": 0.5, "do_sample": True}, "the engine openvino does not support it"),
        ("", {}, "`inputs` cannot be empty"),
    ],
)
def test_validation_error_of_the_hubs_client(
    huggingface_hub: Driver, model_url: str, how: str, prompt: str, options: dict[str, Any], message: str
) -> None:
    for url in (model_url, route(model_url, how)):
        outcome = huggingface_hub.call(how, url, prompt, **options)
        assert outcome.error == error("huggingface_hub.errors", "validation")
        assert message in outcome.message
        assert outcome.events == []


@_both
def test_other_errors_of_the_hubs_client(huggingface_hub: Driver, echo: str, busy: str, how: str) -> None:
    for url in (busy, route(busy, how)):
        outcome = huggingface_hub.call(how, url, "a b", max_new_tokens=2)
        assert outcome.error == error("huggingface_hub.errors", "overloaded")
    outcome = huggingface_hub.call(how, route(echo, how), "a b <raise> c", max_new_tokens=9)
    assert outcome.error == error("huggingface_hub.errors", "generation")
    assert "raised on cue" in outcome.message
    assert outcome.events == ([] if how == "generate" else [" a", " b"])


# -- langchain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "text", "streamed"),
    [(["c"], " a b ", " a b "), ([" b c"], " a", " a b c"), (["z"], " a b c d a b", " a b c d a b")],
)
def test_langchain_with_stop(langchain: Driver, echo: str, stop: list[str], text: str, streamed: str) -> None:
    """Of a stream it takes off what stands in one token: as with TGI itself."""
    assert langchain.generate(echo, "a b c d", stop=stop, max_new_tokens=6) == text
    assert "".join(langchain.stream(echo, "a b c d", stop=stop, max_new_tokens=6)) == streamed


def test_langchain_with_a_model(langchain: Driver, model_url: str) -> None:
    """It sends a temperature of 0.8 unasked, with which TGI samples; the likeliest token alone leaves no choice."""
    text = langchain.generate(model_url, PARIS, max_new_tokens=8, top_k=1)
    assert text.startswith(" Paris")
    assert "".join(langchain.stream(model_url, PARIS, max_new_tokens=8, top_k=1)) == text
    outcome = langchain.call("generate", model_url, PARIS, max_new_tokens=0)
    assert outcome.error == "huggingface_hub.errors.ValidationError"


# -- vLLM's benchmark ------------------------------------------------------------------------------------------------


def test_what_vllms_benchmark_sends_and_reads(model_url: str) -> None:
    """Its `--backend tgi`: the lines of a stream that are no comments; the text is the last one's."""
    parameters = {
        "best_of": 1, "max_new_tokens": 8, "do_sample": True, "temperature": 0.01, "top_p": 0.99,
        "truncate": len(PARIS_IDS), "ignore_eos_token": False,
    }  # fmt: skip
    body = {"inputs": PARIS, "parameters": parameters}
    data: dict[str, Any] = {}
    pieces = []
    with http.stream("POST", route(model_url, "stream"), json=body, timeout=ANSWER_LIMIT) as found:
        assert found.status_code == 200
        for line in found.iter_lines():
            if line and not line.startswith(":"):
                data = json.loads(line.removeprefix("data:"))
                pieces.append(data["token"]["text"])
    assert data["generated_text"] == "".join(pieces)
    assert data["generated_text"].startswith(" Paris")
    assert len(pieces) == 8
