"""TGI's clients against DJL with option.tgi_compat=true: the demo model's answers, and what they see of errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.checks import CHAT, EMOJI, PARIS, PARIS_IDS, TOO_MANY, check_answer, check_stream, joined
from tests.clients.driver import HUBS, Driver, drivers, python_client
from tests.djl.servers import djl, newer, versions

pytestmark = [
    *(pytest.mark.djl, pytest.mark.clients, pytest.mark.model, pytest.mark.timeout(600)),
    pytest.mark.nightly,  # test_requests.py has DJL's answers equal to the embedded server's, tests/clients the clients
]


@pytest.fixture(scope="module")
def servers(demo_model: Path) -> Iterator[dict[str, str]]:
    """The addresses of all versions: all are up at once, or each would start anew for each client."""
    options = {
        "option.entryPoint": "handler.entry",
        "option.model_id": str(demo_model),
        "option.dtype": "fp32",  # a sample in company is the same alone only at full precision
        "option.tgi_compat": "true",
    }
    with contextlib.ExitStack() as stack:
        yield {
            version: stack.enter_context(djl(version, {**options, "option.rolling_batch": "auto"})).url
            for version in versions()
        }


@pytest.fixture(params=versions())
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(servers: dict[str, str], version: str) -> str:
    return f"{servers[version]}/invocations"


@pytest.fixture
def typed(version: str) -> bool:
    """Whether errors have our body, with TGI's error_type in it; since 0.29 they have Java's."""
    return not newer(version, "0.29")


text_generation = drivers("text-generation", "drive_text_generation")


@pytest.fixture(scope="module", params=[(hub, mode) for hub in HUBS for mode in ("sync", "async")], ids="-".join)
def hub(request: pytest.FixtureRequest) -> tuple[str, Driver]:
    major, mode = request.param
    return major, python_client(HUBS[major], "drive_huggingface_hub", mode)


langchain = drivers("langchain", "drive_langchain")


openai = drivers("openai", "drive_openai")


triton = drivers("triton", "drive_triton")


# -- text_generation -------------------------------------------------------------------------------------------------


def test_an_answer_and_its_stream_under_djl(text_generation: Driver, url: str) -> None:
    answer = text_generation.generate(url, PARIS, max_new_tokens=8)
    check_answer(answer, tokens=8)
    first = answer["details"]["tokens"][0]
    assert (first["id"], first["text"], first["logprob"]) == (7042, " Paris", pytest.approx(-0.55, abs=0.3))
    check_stream(text_generation.stream(url, PARIS, max_new_tokens=8), answer)


def test_the_end_of_sequence_token_is_told(text_generation: Driver, url: str) -> None:
    answer = text_generation.generate(url, CHAT, max_new_tokens=60)
    check_answer(answer, tokens=answer["details"]["generated_tokens"], finish="eos_token")
    assert "Paris" in answer["generated_text"]
    assert answer["details"]["tokens"][-1]["special"] is True
    check_stream(text_generation.stream(url, CHAT, max_new_tokens=60), answer)


def test_characters_made_of_several_tokens_come_whole_under_djl(text_generation: Driver, url: str) -> None:
    events = text_generation.stream(url, EMOJI, max_new_tokens=16)
    text = joined([event["token"] for event in events])
    assert "👩\u200d🚀" in text
    assert "\ufffd" not in text
    assert events[-1]["generated_text"] == text


def test_seeds_and_several_sequences(text_generation: Driver, url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": True}
    answer = text_generation.generate(url, PARIS, **options, best_of=2)
    (other,) = answer["details"]["best_of_sequences"]
    for seed, text in (
        (answer["details"]["seed"], answer["generated_text"]),
        (other["seed"], other["generated_text"]),
    ):
        again = text_generation.generate(url, PARIS, **options, seed=seed)
        assert (again["generated_text"], again["details"]["seed"]) == (text, seed)


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_refusal_has_its_text_and_before_0_29_its_class(
    text_generation: Driver, url: str, typed: bool, how: str
) -> None:
    outcome = text_generation.call(how, url, PARIS, max_new_tokens=TOO_MANY)
    # Without an error_type the client goes by the status, and takes 424 for a shard that is not ready.
    assert outcome.error == f"text_generation.errors.{'ValidationError' if typed else 'ShardNotReadyError'}"
    assert "max_new_tokens=200000" in outcome.message
    assert outcome.events == []


# -- huggingface_hub -------------------------------------------------------------------------------------------------


def test_hub_answers_and_streams(hub: tuple[str, Driver], url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "details": True}
    answer = hub[1].generate(url, PARIS, **options)
    check_answer(answer, tokens=6)
    assert answer["generated_text"].startswith(" Paris")
    events = hub[1].stream(url, PARIS, **options)
    check_stream(events, answer)
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5, 6]
    assert events[-1]["details"]["input_length"] == len(PARIS_IDS)


def test_hub_gives_text_alone(hub: tuple[str, Driver], url: str) -> None:
    assert hub[1].generate(url, PARIS, max_new_tokens=1) == " Paris"
    assert hub[1].generate(url, PARIS, max_new_tokens=6, stop=["Par"]) == " Par"
    assert hub[1].stream(url, PARIS, max_new_tokens=6, stop=["Par"]) == [" Par"]


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_hub_tells_a_refusal_and_before_0_29_its_class(
    hub: tuple[str, Driver], url: str, typed: bool, how: str
) -> None:
    major, driver = hub
    outcome = driver.call(how, url, PARIS, temperature=-1.0)
    # Before 0.29 an answer of a rolling batch has no Content-Length; without one these do not read an error's body.
    unread = how == "stream" and driver.asynchronous and major != "0.36"
    if typed and not unread:
        assert outcome.error == "huggingface_hub.errors.ValidationError"
    elif major == "0.36" and driver.asynchronous:
        assert outcome.error == "aiohttp.client_exceptions.ClientResponseError"
    else:
        assert str(outcome.error).startswith("huggingface_hub.errors.HfHubHTTPError")
    assert "parameters.temperature=-1.0: must be a number of at least 0" in outcome.message
    assert outcome.events == []


# -- langchain_huggingface -------------------------------------------------------------------------------------------


def test_langchain_gets_text_whole_and_in_pieces(langchain: Driver, url: str) -> None:
    text = langchain.generate(url, PARIS, max_new_tokens=8)
    assert text.startswith(" Paris")
    pieces = langchain.stream(url, PARIS, max_new_tokens=8)
    assert (pieces[0], "".join(pieces)) == (" Paris", text)


# -- openai, at DJL Serving's other name for /invocations ------------------------------------------------------------

_ASK = {"temperature": 0, "max_tokens": 12}
_ROUTE = {"extra_headers": {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/chat/completions"}}


@pytest.mark.parametrize("route", [_ROUTE, {}], ids=["route", "lmi"])
def test_openai_gets_a_chat_whole_and_with_its_route_in_chunks(
    openai: Driver, servers: dict[str, str], version: str, route: dict[str, Any]
) -> None:
    """With the route named the answers are OpenAI's, else LMI's, which it reads if they are whole."""
    answer = openai.generate(servers[version], "Name the capital of France.", **_ASK, **route)
    (choice,) = answer["choices"]
    assert (answer["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == ("stop" if route else "eos_token")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    if not route:  # JSON lines, as in LMI 0.28 with TGI_COMPAT: no client of OpenAI's reads them
        return
    chunks = openai.stream(servers[version], "Name the capital of France.", **_ASK, **route)
    assert "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks) == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


# -- Triton's users: requests with sseclient-py, and aiohttp ---------------------------------------------------------


def test_tritons_body_is_answered_in_its_form(triton: Driver, url: str) -> None:
    model = {"model_name": "model", "model_version": "1"}
    answer = triton.generate(url, PARIS, id="42", max_tokens=8)
    assert answer.pop("text_output").startswith(f"{PARIS} Paris")
    assert answer == {"id": "42", **model}
    events = triton.stream(url, PARIS, max_tokens=8, stream=True)
    assert len(events) == 8
    assert events[0] == {**model, "text_output": " Paris"}


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_refusal_of_tritons_names_the_parameter(triton: Driver, url: str, how: str) -> None:
    outcome = triton.call(how, url, PARIS, max_tokens=100_000_000, stream=how == "stream")
    assert str(outcome.error).endswith("Refused" if outcome.message.startswith("4") else "KeyError")
    assert "max_tokens=100000000: with 5 prompt tokens" in outcome.message
    assert outcome.events == []
