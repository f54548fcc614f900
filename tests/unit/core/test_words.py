"""Words of foreign programs: what a client must not read is not in them, what helps it is, and the work is bounded."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable

import pytest

from deploy.redaction import redact
from handler.config.options.option import redacted
from handler.core.errors import AdapterFailed, GenerationFailed, RefusedByEngine, client_words, log_words
from handler.core.values import Finish
from handler.engines.base import Output, engine_failure, failed
from handler.engines.huggingface.files import hide_secrets
from tests.one_test import in_one_test

SAME = [
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
    "temperature must be non-negative, got -1.0.",
    "the schema's '#/properties/a/b' is wrong and/or bad",
    "it was killed by signal 9",
    "no step for 60 s (option.engine_timeout)",
    "max_tokens:100 is more than 64",
    "Expecting value: line 1 column 1 (char 0)",
    "<think> is not a token; ids are [1, 2]",
]
CHANGED = {
    "RuntimeError: CUDA error at /opt/ml/model/x.py": "CUDA error at [path]",
    "<!DOCTYPE html><html><h1>Bad Gateway</h1>nginx/1.25": "",
    "<p>too <b>hot</b></p>": "too hot",
    "ValueError('no such thing')": "no such thing",
    "Engine core died. vllm.v1.engine.exceptions.EngineDeadError: it ended": "Engine core died. it ended",
    "Traceback (most recent call last):\n  File \"x.py\", line 1\nKeyError: 'a'": "'a'",
    "http://10.0.0.1:8000/v1 refused it": "[address] refused it",
    "[Errno 111] Connect call failed ('127.0.0.1', 8000)": "[Errno 111] Connect call failed ('[address]', 8000)",
    "vllm-0.models.svc.cluster.local:8000 is down": "[address] is down",
    "s3://bucket/key and https://user:word@host/x": "[address] and [address]",
    "no file ~/models/a.bin or ../b/c": "no file [path] or [path]",
    "Incorrect API key provided: sk-proj-abcdefgh12345678.": "Incorrect API key provided: [key].",
    "Authorization: Bearer abcdef0123": "[key]",
    '{"api_key": "abcdef0123"}': '{"[key]"}',
    "<coroutine object f at 0x7f0011223344> was never awaited": "[object] was never awaited",
    "a\r\n\x1b[31mb\x00c": "a [31mb c",
}


@in_one_test("text", SAME)
def test_what_helps_a_client_stays(text: str) -> None:
    assert client_words(text) == log_words(text) == text


@in_one_test(("text", "words"), CHANGED.items())
def test_what_no_client_should_read_goes(text: str, words: str) -> None:
    assert client_words(text) == words


def test_known_keys_go_in_any_form_and_long_words_are_cut() -> None:
    key = "p@ss/word"
    text = f"{key} p%40ss%2Fword " + "long " * 10_000
    for words, most in ((client_words(text, [key, "", "abc"]), 300), (log_words(text, [key]), 1000)):
        assert words.startswith("[key] [key] long")
        assert len(words) == most
        assert words.endswith("…")


@in_one_test(
    "piece",
    [
        "/a",
        "<a ",
        "a.",
        "a-",
        "[:",
        "E",
        "aError(",
        "x://",
        "eyJa.",
        "1.",
        "password ",
        "Error('",
        ":" * 9,
        "a/",
        "<a at",
        "svc.",
    ],
)
def test_the_work_is_bounded(piece: str) -> None:
    """A pattern that begins again at each character would not end within the test's time limit."""
    client_words(piece * 500_000, ["secret"])


@in_one_test("text", ["eyJ-" * 400_000, "AError('" * 40_000 + "'," * 300_000, ".D" * 900_000, "a.A" * 900_000])
@in_one_test("words", [client_words, log_words])
def test_no_pattern_begins_its_search_again_at_each_character(words: Callable[[str], str], text: str) -> None:
    words(text)


def test_a_token_that_was_cut_off_is_a_key() -> None:
    assert client_words("no: eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx, sorry") == "no: [key], sorry"
    assert client_words(r"boom: ValueError('it\'s \"bad\"', 3)!") == r"boom: it\'s \"bad\"!"


def test_an_exception_of_an_engine_is_for_the_log() -> None:
    output = failed(3, RuntimeError("CUDA error at /opt/a/b.cu"))
    assert output == Output(
        3, (), (), Finish.ERROR, error="CUDA error at [path]", detail="RuntimeError: CUDA error at /opt/a/b.cu"
    )
    error = output.failure
    assert error.message == "request failed in the engine: CUDA error at [path]"
    assert "RuntimeError: CUDA error at /opt/a/b.cu" in error.public
    lost = engine_failure(KeyError())
    assert (lost.message, lost.public) == (
        "engine failure: it raised an error",
        "engine failure: it raised an error (KeyError)",
    )
    assert engine_failure("it was killed by signal 9").public == "engine failure: it was killed by signal 9"


def test_a_refusal_in_the_log_does_not_quote_the_client() -> None:
    error = RefusedByEngine("'my secret prompt' is too long", "http://a/v1 refused the request with 400")
    assert error.message == "the engine refused the request: 'my secret prompt' is too long"
    assert error.public == "the engine refused the request (http://a/v1 refused the request with 400)"


@pytest.mark.parametrize(
    "error", [GenerationFailed("a", detail="b"), AdapterFailed("a", detail="b"), GenerationFailed()]
)
def test_errors_cross_a_pipe(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


TOKENS = {
    "Hugging Face": "hf_" + "a1B2" * 8,
    "AWS": "AKIA" + "ABCD1234" * 2,
    "OpenAI": "sk-" + "a1B2" * 8,
    "GitHub": "ghp_" + "a1B2" * 9,
    "GitHub, fine-grained": "github_pat_" + "a1B2" * 9,
    "Slack": "xoxb-" + "1234" * 6,
    "NVIDIA": "nvapi-" + "a1B2" * 8,
    "SageMaker": "sagemaker-api-key-" + "a1B2" * 8,
    "GitLab": "glpat-" + "a1B2" * 5,
    "Google": "AIza" + "a1B2c" * 7,
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln",
}


@pytest.mark.parametrize("name", TOKENS)
def test_every_form_of_token_is_hidden_in_options_and_deployments(name: str) -> None:
    token = TOKENS[name]
    assert token not in redacted(f"option.model_id=see {token} there")
    assert token not in log_words(f"refused: {token} is not known")
    assert token not in redact(f"refused: {token} is not known")


@pytest.mark.parametrize("name", ["Hugging Face", "GitHub", "Slack", "OpenAI"])
def test_nothing_of_a_longer_word_is_left(name: str) -> None:
    text = f"refused: {TOKENS[name]}-tail_secret is not known"
    assert "tail" not in log_words(text)
    if name == "Hugging Face":
        record = logging.LogRecord("a", logging.INFO, "", 1, text.replace("-tail", "_tail"), (), None)
        assert hide_secrets(record)
        assert "tail" not in record.getMessage()
