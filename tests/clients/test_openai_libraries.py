"""Libraries that speak to OpenAI's routes: LangChain, litellm, llama_index, pydantic-ai and lm-eval."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest

from handler.config.config import Config
from handler.engines.base import EngineConfig
from handler.engines.openvino.engine import prepare
from tests.clients.checks import CHAT, PARIS, PARIS_IDS, TOO_MANY, UNICODE
from tests.clients.documents import SAYS, example
from tests.clients.driver import Driver, drivers, python_client
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

# -- langchain_huggingface's HuggingFaceEndpoint, which sends sampling values with do_sample=false by default ----------


_both = pytest.mark.parametrize("how", ["generate", "stream"])


def test_a_model_answers_for_openai_libraries(langchain: Driver, tgi_url: str) -> None:
    text = langchain.generate(tgi_url, PARIS, max_new_tokens=8)
    assert text.startswith(" Paris")
    pieces = langchain.stream(tgi_url, PARIS, max_new_tokens=8)
    assert pieces[0] == " Paris"
    assert "".join(pieces) == text


def test_the_end_of_sequence_token_is_no_text_for_openai_libraries(langchain: Driver, tgi_url: str) -> None:
    text = langchain.generate(tgi_url, CHAT, max_new_tokens=200)
    assert "Paris" in text
    assert "<|im_end|>" not in text
    assert "".join(langchain.stream(tgi_url, CHAT, max_new_tokens=200)) == text


def test_the_default_is_512_tokens(langchain: Driver, echo_url: str) -> None:
    assert langchain.generate(echo_url, "a b") == " a b" * 256


def test_echoed_words_come_one_by_one_for_openai_libraries(langchain: Driver, echo_url: str) -> None:
    words = [f" {word}" for word in UNICODE.split()]
    assert langchain.generate(echo_url, UNICODE, max_new_tokens=len(words)) == "".join(words)
    assert [piece for piece in langchain.stream(echo_url, UNICODE, max_new_tokens=len(words)) if piece] == words


@pytest.mark.parametrize(("stop", "text"), [(["c"], " a b "), ([" b c"], " a")])
def test_the_client_takes_the_stop_string_off(langchain: Driver, echo_url: str, stop: list[str], text: str) -> None:
    assert langchain.generate(echo_url, "a b c d", stop=stop) == text


def test_a_stream_ends_before_the_stop_string(langchain: Driver, echo_url: str) -> None:
    assert "".join(langchain.stream(echo_url, "a b c d", stop=["c"])) == " a b "


def test_a_seed_repeats_the_text_for_openai_libraries(langchain: Driver, tgi_url: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 7, "typical_p": None}
    text = langchain.generate(tgi_url, PARIS, **options)
    assert text
    assert "".join(langchain.stream(tgi_url, PARIS, **options)) == text


@_both
def test_a_bad_request_is_a_validation_error_for_openai_libraries(langchain: Driver, tgi_url: str, how: str) -> None:
    outcome = langchain.call(how, tgi_url, PARIS, max_new_tokens=TOO_MANY)
    assert outcome.error == "huggingface_hub.errors.ValidationError"
    assert "max_new_tokens=200000" in outcome.message


def test_a_failed_answer_is_a_generation_error_for_openai_libraries(langchain: Driver, echo_url: str) -> None:
    outcome = langchain.call("generate", echo_url, "a b <raise> c")
    assert outcome.error == "huggingface_hub.errors.GenerationError"
    assert "raised on cue" in outcome.message


def test_langchain_yields_the_tokens_of_a_stream_before_its_error(langchain: Driver, echo_url: str) -> None:
    outcome = langchain.call("stream", echo_url, "a b <raise> c")
    assert [piece for piece in outcome.events if piece] == [" a", " b"]
    assert outcome.error == "huggingface_hub.errors.GenerationError"


@_both
def test_a_full_server_is_overloaded_for_openai_libraries(langchain: Driver, busy_url: str, how: str) -> None:
    outcome = langchain.call(how, busy_url, "a b")
    assert outcome.error == "huggingface_hub.errors.OverloadedError"
    assert "the queue is full" in outcome.message


# -- litellm's provider for Triton: parameters nested, `stream` beside them, the path chosen by it ---------------------


def test_a_model_answers_litellm(litellm: Driver, triton_url: str) -> None:
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


def test_echoed_words_come_to_litellm_one_by_one(litellm: Driver, triton_echo_url: str) -> None:
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


# -- llama_index's OpenAILike, by its three lines in docs/client.md ----------------------------------------------------


llama_index = drivers("llama-index", "drive_llama_index")


@pytest.mark.parametrize(
    ("prompt", "chat", "wanted"),
    [("What is the capital of France?", True, "The capital of France is Paris."), (PARIS, False, " Paris.")],
    ids=["chat", "completion"],
)
def test_a_stream_says_what_the_whole_answer_says_for_openai_libraries(
    llama_index: Driver, model_server: LiveServer, prompt: str, chat: bool, wanted: str
) -> None:
    options = {"chat": chat, "max_tokens": 12, "temperature": 0}
    text = llama_index.generate(model_server.url, prompt, **options)
    assert text.startswith(wanted)
    pieces = llama_index.stream(model_server.url, prompt, **options)
    assert "".join(pieces) == text
    assert len(pieces) > 4


def test_a_refusal_is_the_servers_own_for_openai_libraries(llama_index: Driver, model_server: LiveServer) -> None:
    for how in ("generate", "stream"):
        outcome = llama_index.call(how, model_server.url, PARIS, chat=True, max_tokens=100_000)
        assert outcome.error == "openai.BadRequestError"
        assert "max_tokens" in outcome.message


def test_the_documents_lines_for_openai_libraries(model_server: LiveServer) -> None:
    assert python_client("llama-index", "drive_llama_index").run(example("LlamaIndex", model_server.url)) == SAYS


# -- pydantic-ai's Agent on OpenAI's chat: text, structured answers by a tool that must be called ----------------------


QUESTION = "What is the capital of France?"
agent = drivers("openai", "drive_pydantic_ai")


def test_a_stream_says_to_pydantic_ai_what_the_whole_answer_says(agent: Driver, model_server: LiveServer) -> None:
    answer = agent.generate(model_server.url, QUESTION, max_tokens=12, temperature=0)
    assert answer == {"output": "The capital of France is Paris.", "tools": [], "tokens": 8, "prompt_tokens": 37}
    pieces = agent.stream(model_server.url, QUESTION, max_tokens=12, temperature=0)
    assert "".join(pieces) == answer["output"]
    assert len(pieces) > 4


def test_a_structured_answer_is_a_tool_call(agent: Driver, model_server: LiveServer) -> None:
    answer = agent.generate(model_server.url, "Paris is in France", city=True, temperature=0)
    assert answer["output"].keys() == {"city", "country"}
    assert set(answer["tools"]) == {"final_result"}


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_refusal_is_the_servers_own_in_pydantic_ai(agent: Driver, model_server: LiveServer, how: str) -> None:
    outcome = agent.call(how, model_server.url, QUESTION, max_tokens=-1)
    assert outcome.error == "pydantic_ai.exceptions.ModelRequestRejectedError"
    assert "max_completion_tokens=-1: must be an integer from 1" in outcome.message


# -- lm-eval's `local-completions`: log-likelihoods by /v1/completions, read by its own parser -------------------------


PAIRS = [(PARIS, " Paris"), (PARIS, " Rome"), (PARIS, " Paris."), ("Two words", " and a third\U0001f642")]


@pytest.fixture(scope="module")
def lm_eval() -> Driver:
    return python_client("lm-eval", "drive_lm_eval")


def likelihoods(driver: Driver, url: str, **options: Any) -> list[tuple[float, bool]]:
    return [tuple(found) for found in driver.generate(url, "", pairs=PAIRS, **options)]


def logits(model: Path, ids: list[int]) -> Any:
    """Of the model itself, by OpenVINO alone: rows of what may follow each id."""
    import openvino

    settings = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    compiled = openvino.Core().compile_model(model / "openvino_model.xml", "CPU", settings)
    size = len(ids)
    given = {
        "input_ids": numpy.array([ids]),
        "attention_mask": numpy.ones((1, size), dtype=numpy.int64),
        "position_ids": numpy.arange(size)[None],
        "beam_idx": numpy.zeros(1, dtype=numpy.int32),
    }
    return compiled(given)["logits"][0]


@pytest.mark.nightly
def test_a_log_likelihood_is_the_models(lm_eval: Driver, tgi_server: LiveServer, demo_model: Path) -> None:
    paris, rome, sentence, words = likelihoods(lm_eval, tgi_server.url)
    row = logits(prepare(str(demo_model), EngineConfig(Config(dtype="fp32"))), PARIS_IDS)[-1].astype(numpy.float64)
    ids = [token["id"] for token in tgi_server.post({"inputs": " Paris Rome"}, "/tokenize").json()]
    wanted = row[ids] - math.log(numpy.exp(row - row.max()).sum()) - row.max()
    assert [paris[0], rome[0]] == pytest.approx(wanted.tolist(), abs=1e-3)
    assert row.argmax() == ids[0]
    assert (paris[1], rome[1], words[1]) == (True, False, False)  # what the model would have said itself
    assert sentence[0] < paris[0]
    assert sentence[1]


def test_prompts_together_are_as_alone(lm_eval: Driver, tgi_server: LiveServer) -> None:
    alone = likelihoods(lm_eval, tgi_server.url)
    for options in ({"batch_size": 4}, {"num_concurrent": 4}):
        together = likelihoods(lm_eval, tgi_server.url, **options)
        assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]
        assert [sum for sum, _ in together] == pytest.approx([sum for sum, _ in alone], abs=1e-3)


def test_it_generates_until(lm_eval: Driver, model_server: LiveServer) -> None:
    """Its tasks name what ends an answer."""
    found = lm_eval.generate(model_server.url, "", pairs=[[PARIS], [PARIS]], until=["."], batch_size=2)
    assert found == [" Paris", " Paris"]


def test_a_refusal_is_raised(lm_eval: Driver, model_server: LiveServer) -> None:
    outcome = lm_eval.call("generate", model_server.url, "", pairs=PAIRS[:1], model="nobody")
    assert outcome.error == "requests.exceptions.HTTPError"
    assert "404" in outcome.message
