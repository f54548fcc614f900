"""All dialects in front of llama-server: each gets the server's own text, and structured output by its grammars."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from handler.config import gguf
from handler.core.text import Vocabulary
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import load_tokenizer
from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.engines.llamacpp.files import model_directory
from handler.engines.llamacpp.pieces import Pieces
from tests.app.dialects.test_decisions import TYPESAFE, ask
from tests.app.dialects.test_every_dialect import DIALECTS, STREAMS, answered
from tests.app.server import AppServer, serve
from tests.checkpoints import byte_gguf
from tests.doubles import llama_server, tiny
from tests.joints.test_server_flags import ASKED
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.real import RealServer
from tests.process.engines.llamacpp.test_llamacpp import REAL, own
from tests.servers import options

TEXTS = [f"town {number}" for number in range(60)]
GREEDY = {"temperature": 0}
LETTER = "root ::= [A-Z]"  # llama-server reports no log-probabilities of a token that leaves a character incomplete


class Front(NamedTuple):
    """Our server, llama-server behind it, and the tokenizer of both."""

    server: AppServer
    upstream: llama_server.LlamaServer | RealServer
    tokenizer: HfTokenizer

    @property
    def vocabulary(self) -> Vocabulary:
        assert self.tokenizer.vocabulary is not None
        return self.tokenizer.vocabulary

    def answer(self, text: str, count: int) -> list[int]:
        return list(own(self.upstream, self.tokenizer.encode(text).ids, n_predict=count)["tokens"])

    def expected(self, text: str, count: int) -> str:
        return self.vocabulary.decode(self.answer(text, count))


DEMO = pytest.param("demo", marks=[REAL, pytest.mark.model])
PLAIN = options("option.chat_template={{ messages[-1]['content'] }}")
"""All dialects get the same prompt for a text."""


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=REAL), DEMO])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    directory = tmp_path_factory.mktemp("model")
    if request.param == "demo":
        with before_demo(directory, request.getfixturevalue("demo_model")) as found:
            yield found
        return
    is_real = request.param == "real"
    model: Path = byte_gguf.make(directory) if is_real else tiny.make(directory)
    tokenizer = load_tokenizer(EngineConfig(model=model))
    assert tokenizer.vocabulary is not None
    pieces = tokenizer.vocabulary.pieces
    with (
        real.running(model / "model.gguf", pieces) if is_real else llama_server.listening(pieces) as upstream,
        serve(str(model), "--engine", "openai", *options(f"option.base_url={upstream.url}/v1"), *PLAIN) as server,
    ):
        server.wait_ready()
        yield Front(server, upstream, tokenizer)


@contextlib.contextmanager
def before_demo(directory: Path, file: Path) -> Iterator[Front]:
    """The demo model in the engine's own llama-server, and in another one, which answers alone."""
    (directory / "model.gguf").symlink_to(file)
    tokenizer = load_tokenizer(EngineConfig(model=model_directory(file)))
    assert tokenizer.vocabulary is not None
    own_options = options(f"option.llama_server={real.PROGRAM}", "option.llama_server_args=-t 1")
    with (
        real.running(directory / "model.gguf", tokenizer.vocabulary.pieces) as upstream,
        serve(str(file), "--engine", "llamacpp", *own_options, *PLAIN) as server,
    ):
        upstream.eog = gguf.end_ids(file)
        server.wait_ready()
        yield Front(server, upstream, tokenizer)


@pytest.fixture(scope="module")
def text(front: Front) -> str:
    """A prompt whose answer ends with a character, and not with an end token, which some dialects show."""
    pieces = Pieces(front.vocabulary.pieces)
    for text in TEXTS:
        ids = front.answer(text, 16)
        if not front.upstream.eog & {*ids} and not pieces.incomplete(ids)[-1]:
            return text
    raise AssertionError("all answers end otherwise")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_has_the_servers_own_text(front: Front, text: str, name: str, stream: bool) -> None:
    if stream and name not in STREAMS:
        return
    dialect = DIALECTS[name]
    if name in ("openai chat", "openai completions", "anthropic", "lmi chat"):
        dialect = dialect._replace(body=lambda *given: {**DIALECTS[name].body(*given), **GREEDY})
    assert answered(front.server, dialect, text, 16, stream=stream) == front.expected(text, 16)


def test_all_tokens_count_even_if_the_last_character_is_incomplete(front: Front) -> None:
    numbers = []
    for text in TEXTS[:12]:
        answer = front.server.post({"prompt": text, "max_tokens": 9, "ignore_eos": True, **GREEDY}, "/v1/completions")
        numbers.append(answer.json()["usage"]["completion_tokens"])
    assert numbers == [9] * 12


def test_whatever_asks_for_structured_output_gets_it(front: Front) -> None:
    answers = {name: front.server.post(body, path) for name, (path, body) in ASKED.items()}
    refused = {name for name, answer in answers.items() if answer.status_code != 200}
    assert refused == {"tools and a schema"}, "llama.cpp has no structural tags"
    assert "response_format: the engine cannot combine" in answers["tools and a schema"].text
    assert "strict" in answers["a strict tool"].headers["x-lmi-ignored-parameters"]
    choices = {"prompt": "hi", "max_tokens": 16, "structured_outputs": {"choice": ["red", "blue"]}, **GREEDY}
    answer = front.server.post(choices, "/v1/completions")
    assert answer.json()["choices"][0]["text"] in ("red", "blue")
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    asked: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": True}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99, "response_format": asked}
    answer = front.server.post(chat, "/v1/chat/completions")
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": 7}


def test_log_probabilities_and_alternatives_of_a_chat(front: Front) -> None:
    chat = {"messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    answer = front.server.post({**chat, **GREEDY}, "/v1/chat/completions").json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(entry["logprob"] < 0 and len(entry["top_logprobs"]) == 3 for entry in content)


def test_what_llama_server_lacks_is_refused_by_name(front: Front) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "cache_salt": "a"}
    answer = front.server.post(body, "/v1/completions")
    assert answer.status_code == 400
    assert "cache_salt" in answer.text
    assert "llama-server has one prompt cache for all requests" in answer.text
    assert front.server.post({**body, "cache_salt": None}, "/v1/completions").status_code == 200


def test_decisions_are_read_from_its_log_probabilities(front: Front) -> None:
    question = TYPESAFE["questions"]["c"]  # its labels are letters
    found = ask(front.server, "/v1/systemone", {**TYPESAFE, "questions": {"c": question}})
    assert found["answers"]["c"]["choice"] in ("a", "b")


def test_probabilities_of_options_of_several_tokens_are_the_servers_own(front: Front) -> None:
    options = {"a red town": "far away", "a blue village": None, "no town at all": "none"}
    question = {"type": "choice", "instructions": "Which town?", "criteria": options}
    found = ask(front.server, "/v1/systemone", {"state": "It is red.", "questions": {"q": question}})
    prompt = (
        "It is red.\n\nQuestion: Which town?\nA: a red town - far away\nB: a blue village\nC: no town at all - none\n"
        "Answer with the letter of one option only."
    )
    ids = front.tokenizer.encode(prompt).ids
    (entry,) = own(front.upstream, ids, n_predict=1, n_probs=1000, grammar=LETTER)["completion_probabilities"]
    logprobs = {top["id"]: top["logprob"] for top in entry["top_logprobs"]}
    labels = [logprobs[front.tokenizer.encode(f"{prompt}{letter}").ids[-1]] for letter in "ABC"]
    mass = sum(math.exp(logprob) for logprob in labels)
    expected = {name: math.exp(logprob) / mass for name, logprob in zip(options, labels, strict=True)}
    assert found["answers"]["q"]["probabilities"] == pytest.approx(expected, abs=1e-4)
    assert found["diagnostics"]["q"]["label_mass"] == pytest.approx(mass, rel=1e-3)
