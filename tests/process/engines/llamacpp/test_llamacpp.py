"""The engine in front of llama-server: its answers are the server's own, and each request ends, and alone."""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy
import pytest

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Extras, Finish, Sampling, StructuredOutput
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.huggingface.files import load_tokenizer
from handler.engines.llamacpp import servers
from handler.engines.llamacpp.engine import LlamaCppEngine
from handler.engines.llamacpp.pieces import Pieces
from handler.engines.openai import engine as openai_engine
from handler.engines.openai.kinds import find_kind
from handler.engines.remote import servers as remote_servers
from tests.checkpoints import byte_gguf
from tests.doubles import llama_server, tiny
from tests.doubles.llama_server import CONTEXT, HANG, LlamaServer, Refusal
from tests.one_test import in_one_test
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.real import RealServer
from tests.process.engines.openai.server import CHUNKED, HEAD, status
from tests.process.engines.openai.test_bad_servers import PATIENCE, Result, Words, failed, run
from tests.servers import wait_for

SAMPLING = Sampling(max_new_tokens=24, logprobs=False)
PROMPT = [201, 202, 203]


REAL = pytest.mark.skipif(real.PROGRAM is None, reason="no llama-server on PATH or in LLAMA_SERVER")
Served = LlamaServer | RealServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


def pieces_of(model: Path) -> Sequence[bytes]:
    vocabulary = load_tokenizer(EngineConfig(model=model)).vocabulary
    assert vocabulary is not None
    return vocabulary.pieces


@pytest.fixture(scope="module")
def pieces(model: Path) -> Sequence[bytes]:
    return pieces_of(model)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.remote.engine._PAUSE", 0.01)
    monkeypatch.setattr(remote_servers, "_PAUSE", 0.01)


@pytest.fixture
def server(pieces: Sequence[bytes]) -> Iterator[LlamaServer]:
    with llama_server.listening(pieces) as found:
        yield found


class Both(NamedTuple):
    """A server, and the directory of its model's tokenizer."""

    server: Served
    model: Path


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    directory = byte_gguf.make(tmp_path_factory.mktemp("bytes"))
    with real.running(directory / "model.gguf", pieces_of(directory)) as found:
        yield Both(found, directory)


@pytest.fixture(params=["double", pytest.param("real", marks=REAL)])
def both(request: pytest.FixtureRequest) -> Both:
    """The double, and the original where it is installed."""
    if request.param == "real":
        return cast(Both, request.getfixturevalue("real_server"))
    return Both(request.getfixturevalue("server"), request.getfixturevalue("model"))


@contextlib.contextmanager
def engine(
    model: Path | None, *servers: Served, timeout: float = PATIENCE, caches: bool | None = None, **options: Any
) -> Iterator[LlamaCppEngine]:
    given = {
        "base_url": tuple(f"{server.url}/v1" for server in servers),
        "base_url_kind": "llamacpp",
        "base_url_connect_timeout": 5.0,
        "base_url_timeout": timeout,
        **options,
    }
    found = openai_engine.load(EngineConfig(Config(enable_prefix_caching=caches, engine_options=given), model=model))
    assert isinstance(found, LlamaCppEngine)
    try:
        yield found
    finally:
        found.close()


def own(server: Served, prompt: Sequence[int] | dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The server's own answer, which is not a stream."""
    neutral = {"temperature": 0, "samplers": ["penalties", "temperature"], "repeat_last_n": CONTEXT, "n_predict": 24}
    sent = prompt if isinstance(prompt, dict) else [*prompt]
    body = {"prompt": sent, "return_tokens": True, **neutral, **fields}
    kind = {"content-type": "application/json"}  # a form may have only 1 MiB
    request = urllib.request.Request(f"{server.url}/completion", json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def prompts(server: Served, count: int) -> list[list[int]]:
    size = len(server.pieces) - 20
    return [[10 + (71 * number + place * place) % size for place in range(2 + number % 5)] for number in range(count)]


def ask(found: LlamaCppEngine, sampling: Sampling = SAMPLING, prompt: Sequence[int] = PROMPT, key: int = 1) -> Result:
    found.add(EngineRequest(key, prompt, sampling))
    return run(found, key)[key]


def details(found: LlamaCppEngine, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> dict[str, Any]:
    """Everything that comes of a request."""
    found.add(EngineRequest(1, prompt, sampling))
    ids, logprobs, tops, extras = list[int](), list[Any](), list[Any](), None
    while True:
        step = found.step()
        ids += step.ids
        logprobs += step.logprobs
        for output in step.others:
            ids += output.ids
            logprobs += output.logprobs
            tops += output.tops or ()
            extras = output.extras or extras
            if output.finish is not None:
                return {"ids": ids, "logprobs": logprobs, "tops": tops, "extras": extras, "finish": output.finish}


# -- what the server computes -----------------------------------------------------------------------------------------


def margin(
    server: Served, prompt: list[int], first: list[int], second: list[int], biases: Sequence[tuple[int, float]]
) -> float:
    """By how much the server prefers one of two answers where they part, before penalties."""
    place = next(place for place, (one, other) in enumerate(zip(first, second, strict=True)) if one != other)
    before = [*prompt, *first[:place]]
    answer = own(server, before, n_predict=1, n_probs=len(server.pieces), grammar="root ::= [ -~]+")
    best = answer["completion_probabilities"][0]["top_logprobs"]
    values = {top["id"]: top["logprob"] + dict(biases).get(top["id"], 0.0) for top in best}
    assert (first[place] in before) == (second[place] in before), "a penalty parts them"
    return float(abs(values[first[place]] - values[second[place]]))


@pytest.mark.parametrize("at_once", [1, 8])
def test_the_ids_are_the_servers_own(both: Both, at_once: int) -> None:
    server, model = both
    fields: dict[str, Any] = {}
    if isinstance(server, RealServer):  # random weights repeat a letter, and do not end an answer
        letters = [[id, 1.0] for id, piece in enumerate(server.pieces) if piece >= b"\x80"]
        fields = {"repeat_penalty": 3.0, "logit_bias": letters}
    biases = tuple((id, bias) for id, bias in fields.get("logit_bias", ()))
    sampling = SAMPLING._replace(repetition_penalty=fields.get("repeat_penalty", 1.0), logit_bias=biases)
    asked = prompts(server, 40)
    expected = [own(server, prompt, **fields) for prompt in asked]
    finishes, num_ties = Counter[Finish | None](), 0
    with engine(model, server) as found:
        for start in range(0, 40, at_once):
            keys = range(start, start + at_once)
            for key in keys:
                found.add(EngineRequest(key + 1, asked[key], sampling))
            for key, result in run(found, *(key + 1 for key in keys)).items():
                answer = expected[key - 1]
                if result.ids != answer["tokens"]:  # llama.cpp's sums depend on what else is in the batch
                    assert at_once > 1
                    assert margin(server, asked[key - 1], answer["tokens"], result.ids, biases) < 1e-3
                    num_ties += 1
                    continue
                assert result.finish is (Finish.EOS if answer["stop_type"] == "eos" else Finish.LENGTH)
                finishes[result.finish] += 1
    assert num_ties <= (4 if isinstance(server, RealServer) else 0)
    assert len(finishes) == 2 or isinstance(server, RealServer)
    characters = Counter[bool]()  # whether one of several tokens is whole
    for answer in expected:
        incomplete = Pieces(server.pieces).incomplete(answer["tokens"])
        for (first, is_cut), (second, is_still_cut) in pairwise(zip(answer["tokens"], incomplete, strict=True)):
            if is_cut and not is_still_cut:
                text = (server.pieces[first] + server.pieces[second]).decode(errors="ignore")
                characters[any(len(one.encode()) > 1 for one in text)] += 1
    assert min(characters[True], characters[False]) > 5, characters


def test_the_log_probabilities_are_the_servers_own(both: Both) -> None:
    server, model = both
    lead = tuple((id, 6.0) for id, piece in enumerate(server.pieces) if piece[-1:] >= b"\xc0")
    sampling = SAMPLING._replace(logprobs=True, top_logprobs=3, logit_bias=lead, max_new_tokens=8)
    num_unsent = 0
    with engine(model, server) as found:
        for prompt in prompts(server, 8):
            answer = own(server, prompt, n_probs=3, logit_bias=lead, n_predict=8)
            result = details(found, sampling, prompt)
            assert result["ids"] == answer["tokens"]
            scored = zip(result["ids"], result["logprobs"], result["tops"], strict=True)
            reported = iter(answer.get("completion_probabilities", ()))
            incomplete = Pieces(server.pieces).incomplete(result["ids"])
            for (id, logprob, tops), is_unsent in zip(scored, incomplete, strict=True):
                assert len(tops) == 3
                num_unsent += is_unsent
                if is_unsent:
                    assert all(value < 0 for value in (logprob, tops[0][1]))
                    continue
                score = next(reported)
                assert (id, [top for top, _ in tops]) == (score["id"], [top["id"] for top in score["top_logprobs"]])
                assert logprob == pytest.approx(score["logprob"], abs=1e-4)
    assert num_unsent > 5


def test_the_log_probabilities_of_incomplete_characters(server: LlamaServer, model: Path) -> None:
    """The double's own: the original reports none."""
    lead = tuple((id, 1.0) for id, piece in enumerate(server.pieces) if piece[-1:] >= b"\xc0")
    sampling = SAMPLING._replace(logprobs=True, top_logprobs=2, logit_bias=lead)
    with engine(model, server) as found, mock.patch("handler.engines.llamacpp.engine._SCORES", 3):
        result = details(found, sampling)
        for place, id in enumerate(result["ids"]):
            values = server.model.logits([*PROMPT, *result["ids"][:place]])
            values = values - numpy.log(numpy.exp(values).sum())
            assert result["logprobs"][place] == pytest.approx(values[id])
            assert [top for top, _ in result["tops"][place]] == numpy.argsort(-values)[:2].tolist()
    asked = {len(body["prompt"]) - len(PROMPT) for body in server.received if body["n_predict"] == 1}
    incomplete = enumerate(Pieces(server.pieces).incomplete(result["ids"]))
    assert asked == {place for place, is_unsent in incomplete if is_unsent}, "only what is missing is asked for"


def test_a_model_without_files_has_all_ids_too(both: Both) -> None:
    server = both.server
    with engine(None, server) as found:
        for prompt in prompts(server, 12):
            assert ask(found, prompt=prompt).ids == own(server, prompt)["tokens"]


PARAMETERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition penalty": ({"repetition_penalty": 3.0}, {"repeat_penalty": 3.0}),
    "bias": ({"logit_bias": ((200, 30.0),)}, {"logit_bias": [[200, 30.0]]}),
    "forbidden": ({"bad_token_ids": tuple(range(20, 120))}, {"logit_bias": [[id, False] for id in range(20, 120)]}),
    "allowed": (
        {"allowed_token_ids": (200, 201, 202)},
        {"logit_bias": [[id, False] for id in range(1000) if id not in (200, 201, 202)]},
    ),
    "no end": ({"ignore_eos": True, "max_new_tokens": 80}, {"ignore_eos": True, "n_predict": 80}),
}


@in_one_test(("fields", "body"), PARAMETERS.values(), ids=PARAMETERS)
def test_parameters(both: Both, fields: dict[str, Any], body: dict[str, Any]) -> None:
    server, model = both
    with engine(model, server) as found:
        for prompt in prompts(server, 6):
            assert ask(found, SAMPLING._replace(**fields), prompt).ids == own(server, prompt, **body)["tokens"]


PENALTIES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "both": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -0.3},
    "both, at least 7": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "min_new_tokens": 7},
    "frequency, with a bias": {"frequency_penalty": 0.9, "logit_bias": ((200, 3.0), (210, 3.0))},
}


def penalized(server: Served, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """The greedy response by the definition of the penalties, from the server's log-probabilities of all tokens."""
    ids = list[int]()
    while len(ids) < sampling.max_new_tokens:
        ruled = {"grammar": "root ::= [ -~]+"}  # else it reports none if its own choice ends within a character
        answer = own(server, [*prompt, *ids], n_predict=1, n_probs=len(server.pieces), **ruled)
        values = {top["id"]: top["logprob"] for top in answer["completion_probabilities"][0]["top_logprobs"]}
        for id, bias in sampling.logit_bias:
            values[id] += bias
        for id, count in Counter(ids).items():
            values[id] -= sampling.presence_penalty + count * sampling.frequency_penalty
        for id in server.eog if len(ids) < sampling.min_new_tokens else ():
            del values[id]
        ids.append(max(values, key=lambda id: values[id]))
        if ids[-1] in server.eog:
            break
    return ids


@in_one_test("fields", PENALTIES.values(), ids=PENALTIES)
def test_penalties_count_the_response_and_not_the_prompt(both: Both, fields: dict[str, Any]) -> None:
    server, model = both
    sampling = SAMPLING._replace(max_new_tokens=10, **fields)
    with engine(model, server) as found:
        for prompt in ([*PROMPT, 200, 200, 210, *range(120, 140)], prompts(server, 3)[2]):
            result = ask(found, sampling, prompt)
            assert result.ids == penalized(server, prompt, sampling), fields


def test_a_frequency_penalty_of_a_token_that_fills_the_prompt_keeps_its_precision(both: Both) -> None:
    """32-bit floats would lose the logit in a penalty and a bias of thousands."""
    server, model = both
    sampling = SAMPLING._replace(max_new_tokens=3, frequency_penalty=2.0)
    prompt = [200] * 1200
    with engine(model, server) as found:
        assert ask(found, sampling, prompt).ids == penalized(server, prompt, sampling)


def test_a_presence_penalty_takes_a_completion_for_each_token_and_a_frequency_penalty_one(
    server: LlamaServer, model: Path
) -> None:
    ascii_only = tuple(id for id, piece in enumerate(server.pieces) if not piece.isascii())
    plain = SAMPLING._replace(max_new_tokens=6, bad_token_ids=ascii_only, ignore_eos=True)
    with engine(model, server) as found:
        ask(found, plain._replace(frequency_penalty=0.5))
        assert len(server.received) == 1
        ask(found, plain._replace(presence_penalty=0.5), key=2)
        assert [body["n_predict"] for body in server.received[1:]] == [1] * 6


@pytest.mark.parametrize("streamed", [True, False])
def test_tokens_of_a_draft_have_their_log_probabilities(server: LlamaServer, model: Path, *, streamed: bool) -> None:
    """llama-server reports none of accepted draft tokens, or 0 without alternatives if the response is no stream."""
    sampling = SAMPLING._replace(logprobs=True, top_logprobs=2, max_new_tokens=12)
    if not streamed:
        sampling = sampling._replace(structured_output=RULES["choice"][0])
    with engine(model, server) as found:
        expected = details(found, sampling)
        server.drafts = True
        result = details(found, sampling)
        assert [result[name] for name in ("ids", "tops", "finish")] == [
            expected[name] for name in ("ids", "tops", "finish")
        ]
        assert result["logprobs"] == pytest.approx(expected["logprobs"])
        num_asked = len(server.received)
        assert ask(found, SAMPLING, key=2).ids == own(server, PROMPT)["tokens"]
        assert len(server.received) == num_asked + 2, "a response without log-probabilities takes one completion"


def test_a_reverse_prompt_of_the_server_has_no_effect(server: LlamaServer, model: Path) -> None:
    with engine(model, server) as found:
        expected = ask(found)
        server.stops = [chr(number) for number in range(32, 127)]
        assert ask(found, key=2) == expected


def test_a_server_with_a_grammar_of_its_own_is_refused(server: LlamaServer, model: Path) -> None:
    server.grammar = "root ::= [0-9]+"
    with pytest.raises(ConfigError, match=r"was started with --grammar, .*: start it without"), engine(model, server):
        pass


DRAWN = {
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.5},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
}


@in_one_test("fields", DRAWN.values(), ids=DRAWN)
def test_samples_follow_the_seed_and_the_samplers_in_their_order(both: Both, fields: dict[str, Any]) -> None:
    server, model = both
    order = ["penalties", "temperature", "top_k", "top_p", "min_p", "typ_p"]
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": order}
    with engine(model, server) as found:
        for seed in (1, 2, 1 << 33):
            sampling = Sampling(max_new_tokens=1, logprobs=True, do_sample=True, seed=seed, **fields)
            for prompt in prompts(server, 4):
                expected = own(server, prompt, **{**neutral, **fields}, seed=seed % 0xFFFFFFFF, n_predict=1)["tokens"]
                assert ask(found, sampling, prompt).ids == expected


def test_samples_without_a_seed_differ(server: LlamaServer, model: Path) -> None:
    with engine(model, server) as found:
        sampling = SAMPLING._replace(do_sample=True, temperature=2.0)
        assert len({tuple(ask(found, sampling).ids) for _ in range(4)}) == 4
        assert {body["seed"] for body in server.received} == {0xFFFFFFFF}


def test_a_sample_with_a_seed_can_be_repeated(both: Both) -> None:
    server, model = both
    with engine(model, server) as found:
        for prompt in prompts(server, 8):
            sampling = SAMPLING._replace(do_sample=True, seed=5, max_new_tokens=40)
            first, second = (ask(found, sampling, prompt) for _ in range(2))
            assert first == second
            assert first.finish in (Finish.LENGTH, Finish.EOS)
            assert len(first.ids) == 40 or first.finish is Finish.EOS


def test_the_only_allowed_token_has_its_own_log_probability(both: Both) -> None:
    """Decisions read labels so that are not among the most likely tokens."""
    server, model = both
    everything = own(server, PROMPT, n_predict=1, n_probs=len(server.pieces), grammar="root ::= [ -~]+")
    best = {top["id"]: top["logprob"] for top in everything["completion_probabilities"][0]["top_logprobs"]}
    assert len(best) == len(server.pieces)
    with engine(model, server) as found:
        for id in (20, 70, 150, 201):
            sampling = Sampling(max_new_tokens=1, logprobs=True, allowed_token_ids=(id,))
            result = details(found, sampling)
            assert result["ids"] == [id]
            assert result["logprobs"] == pytest.approx([best[id]], abs=1e-4)


def test_a_minimum_number_of_tokens_holds_back_every_end(both: Both) -> None:
    server, model = both
    stops = tuple(range(200, 240))
    with engine(model, server) as found:
        for prompt in prompts(server, 12):
            result = ask(found, SAMPLING._replace(min_new_tokens=10, stop_token_ids=stops), prompt)
            assert not server.eog & {*result.ids[:10]}
            assert not {*stops} & {*result.ids[:10]}
            assert len(result.ids) > 10
            banned = [[id, False] for id in stops]
            first = own(server, prompt, n_predict=10, ignore_eos=True, logit_bias=banned)["tokens"]
            assert result.ids[:10] == first


def test_a_stop_token_that_the_server_does_not_know_ends_the_answer(both: Both) -> None:
    server, model = both
    with engine(model, server) as found:
        for prompt in prompts(server, 12):
            ids = own(server, prompt)["tokens"]
            stop = ids[min(3, len(ids) - 1)]
            result = ask(found, SAMPLING._replace(stop_token_ids=(stop,)), prompt)
            assert result == (ids[: ids.index(stop) + 1], Finish.STOP, "")
            wait_for(lambda: server.num_busy == 0, 5, "slots are busy")


def test_the_end_has_how_much_of_the_prompt_was_cached(both: Both) -> None:
    server, model = both
    prompt = list(range(200, 220))
    with engine(model, server) as found:
        details(found, SAMPLING, prompt)
        assert details(found, SAMPLING, prompt)["extras"] == Extras(num_cached_tokens=19)
        found.add(EngineRequest(2, prompt, SAMPLING, goes_on=True))
        while not (others := found.step().others):
            pass
        assert others[0].extras is None


@pytest.mark.parametrize("scored", [False, True])
def test_earlier_prompts_are_not_reused_if_the_operator_forbids_it(both: Both, *, scored: bool) -> None:
    prompt = prompts(both.server, 1)[0] * 5
    with engine(both.model, both.server, caches=False) as found:
        for _ in range(2):
            extras = details(found, SAMPLING._replace(logprobs=scored), prompt)["extras"]
            assert extras is None or not extras.num_cached_tokens
    if isinstance(both.server, LlamaServer):
        assert not any(body["cache_prompt"] for body in both.server.received)


# -- structured output ------------------------------------------------------------------------------------------------


RULES = {
    "choice": (StructuredOutput("choice", '["red", "日本"]'), ("red", "日本")),
    "regex": (StructuredOutput("regex", "[0-9]"), tuple("0123456789")),
    "json_schema": (
        StructuredOutput("json_schema", '{"type": "object", "properties": {"a": {"const": "é"}}, "required": ["a"]}'),
        ('{"a":"é"}',),
    ),
    "grammar": (StructuredOutput("grammar", 'root ::= "yes" | "no"'), ("yes", "no")),
}


@in_one_test(("rule", "texts"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("scored", [False, True])
def test_structured_output(both: Both, scored: bool, rule: StructuredOutput, texts: tuple[str, ...]) -> None:
    server, model = both
    with engine(model, server) as found:
        for prompt in prompts(server, 4):
            sampling = Sampling(max_new_tokens=99, structured_output=rule, logprobs=scored)
            result = details(found, sampling, prompt)
            text = b"".join(server.pieces[id] for id in result["ids"] if id not in server.eog).decode()
            text = "".join(text.split())  # a schema allows white space
            assert (text in texts, result["finish"]) == (True, Finish.EOS)
            assert all(isinstance(value, float) is scored for value in result["logprobs"])


def test_a_server_that_does_not_enforce_rules_gets_none(server: LlamaServer, model: Path) -> None:
    server.ruled = False
    rule, _ = RULES["choice"]
    with engine(model, server) as found:
        result = ask(found, SAMPLING._replace(structured_output=rule))
        assert result == failed(
            error="to the client: the llamacpp server does not enforce structured output on this prompt"
        )
        assert ask(found, key=2).finish is not Finish.ERROR


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a keyword": (
        {"structured_output": StructuredOutput("json_schema", '{"properties": {"a": {"multipleOf": 2}}}')},
        "llama-server ignores 'multipleOf' in a JSON schema without 'type': add the type",
    ),
    "a keyword beside another": (
        {"structured_output": StructuredOutput("json_schema", '{"anyOf": [{}], "required": ["a"]}')},
        "llama-server ignores 'required' in a JSON schema with 'anyOf': remove one of them",
    ),
    "a tag": (
        {"structured_output": StructuredOutput("structural_tag", "{}")},
        "llama-server does not support structured output of the kind structural_tag",
    ),
    "a minimum with a rule": (
        {"structured_output": RULES["choice"][0], "min_new_tokens": 2},
        "min_new_tokens cannot be combined with structured output on llama-server",
    ),
    "a presence penalty with a rule": (
        {"structured_output": RULES["choice"][0], "presence_penalty": 0.5},
        "presence_penalty cannot be combined with structured output on llama-server",
    ),
    **{
        f"{name} with another": (
            {name: 0.5, "repetition_penalty": 1.1},
            "presence_penalty and frequency_penalty cannot be combined with repetition_penalty on llama-server",
        )
        for name in ("presence_penalty", "frequency_penalty")
    },
    "only some tokens, with a penalty": (
        {"allowed_token_ids": (5,), "repetition_penalty": 2.0},
        "allowed_token_ids cannot be combined with repetition_penalty on llama-server",
    ),
}


@in_one_test(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_do_is_refused_before_it_is_sent(
    server: LlamaServer, model: Path, fields: dict[str, Any], words: str
) -> None:
    with engine(model, server) as found:
        with pytest.raises(ValueError, match=words):
            found.add(EngineRequest(1, PROMPT, SAMPLING._replace(**fields)))
        assert not server.received


# -- slots, and the ends of requests ----------------------------------------------------------------------------------


def test_a_cancel_frees_the_slot_at_once(server: LlamaServer, model: Path) -> None:
    server.pace = 0.05
    with engine(model, server) as found:
        for key in range(1, 5):
            found.add(EngineRequest(key, PROMPT, SAMPLING._replace(max_new_tokens=1000, ignore_eos=True)))
        while server.num_busy < 4:
            found.step()
        for key in range(1, 5):
            found.cancel(key)
        wait_for(lambda: server.num_busy == 0, 2, "slots are busy")
        server.pace = 0.0
        assert ask(found, key=5).finish is not Finish.ERROR


def test_requests_beyond_the_slots_wait_here_and_are_not_silent(server: LlamaServer, model: Path) -> None:
    server.pace = 0.1
    sampling = SAMPLING._replace(ignore_eos=True, max_new_tokens=12)
    with engine(model, server, timeout=2.0) as found:
        keys = range(1, 17)
        for key in keys:
            found.add(EngineRequest(key, PROMPT, sampling))
        while server.num_busy < 4:
            found.step()
        assert len(server.received) < 8
        for key in (14, 15):  # they wait
            found.cancel(key)
        results = run(found, *{*keys} - {14, 15})
        assert {result.finish for result in results.values()} == {Finish.LENGTH}, results
    wait_for(lambda: server.num_busy == 0, 5, "slots are busy")


def test_crossed_clients_get_their_own_tokens_and_leave_the_slots_free(both: Both) -> None:
    server, model = both
    asked = prompts(server, 64)
    expected = [own(server, prompt, n_predict=12)["tokens"] for prompt in asked]
    draw, cancelled = random.Random(3), set[int]()
    ids: dict[int, list[int]] = {key: [] for key in range(64)}
    ended: dict[int, Finish | None] = {}
    with engine(model, server) as found:
        for key in draw.sample(range(64), 64):
            found.add(EngineRequest(key, asked[key], SAMPLING._replace(max_new_tokens=12)))
        deadline = time.monotonic() + 3 * PATIENCE
        while len(ended) + len(cancelled) < 64:
            assert time.monotonic() < deadline
            step = found.step()
            for key, id in zip(step.keys, step.ids, strict=True):
                ids[key].append(id)
            for output in step.others:
                ids[output.key] += output.ids
                if output.finish is not None:
                    ended[output.key] = output.finish
            running = [key for key in range(64) if key not in ended and key not in cancelled]
            if running and len(cancelled) < 20 and draw.random() < 0.3:
                key = draw.choice(running)
                found.cancel(key)
                cancelled.add(key)
        different = [key for key in ended if ids[key] != expected[key]]
        for key in different:
            assert isinstance(server, RealServer), (key, ids[key], expected[key])
            assert margin(server, asked[key], expected[key], ids[key], ()) < 1e-3
        assert len(different) < 6
        assert all(ids[key] == expected[key][: len(ids[key])] or isinstance(server, RealServer) for key in cancelled)
        assert len(cancelled) > 5
        wait_for(lambda: server.num_busy == 0, 5, "slots are busy")


@contextlib.contextmanager
def sharing(request: pytest.FixtureRequest, kind: str, context: int) -> Iterator[Both]:
    """A server whose four slots share one cache, as by default."""
    if kind == "double":
        server, model = request.getfixturevalue("server"), request.getfixturevalue("model")
        server.context = server.pool = context
        server.pace = 0.001
        yield Both(server, model)
        return
    model = request.getfixturevalue("real_server").model
    with real.running(model / "model.gguf", pieces_of(model), 4, "-c", str(context), "--kv-unified") as server:
        yield Both(server, model)


@pytest.mark.parametrize("kind", ["double", pytest.param("real", marks=REAL)])
def test_requests_go_on_after_the_cache_was_full(request: pytest.FixtureRequest, kind: str) -> None:
    with sharing(request, kind, 256) as (server, model), engine(model, server) as found:
        sampling = SAMPLING._replace(ignore_eos=True, max_new_tokens=120)
        asked = prompts(server, 8)
        expected = [own(server, prompt, ignore_eos=True, n_predict=120)["tokens"] for prompt in asked]
        for key, prompt in enumerate(asked):
            found.add(EngineRequest(key, prompt, sampling))
        results = run(found, *range(8))
        assert {(result.finish, result.error) for result in results.values()} == {(Finish.LENGTH, "")}
        for key, prompt in enumerate(asked):
            if results[key].ids != expected[key]:
                assert kind == "real"
                assert margin(server, prompt, expected[key], results[key].ids, ()) < 1e-3
        (slots,) = [state.slots for state in found._states.values()]
        while slots.limit < 4:  # the last request leaves its slot after its result; then all may run again
            found._run_once()
        if isinstance(server, LlamaServer):
            assert any(len(body["prompt"]) > 10 and body["stream"] for body in server.received), "none was full"
        wait_for(lambda: server.num_busy == 0, 5, "slots are busy")


def test_with_structured_output_a_full_cache_fails_what_has_begun(server: LlamaServer, model: Path) -> None:
    server.pool = 60
    server.pace = 0.02
    long = StructuredOutput("choice", json.dumps(["a" * 40]))
    with engine(model, server) as found:
        for key in range(4):
            found.add(EngineRequest(key, list(range(20, 40)), SAMPLING._replace(structured_output=long)))
        results = run(found, *range(4))
        assert Finish.ERROR in {result.finish for result in results.values()}
        assert all(result.ids for result in results.values() if result.finish is Finish.ERROR)
        wait_for(lambda: server.num_busy == 0, 5, "slots are busy")
        assert ask(found, key=9).finish is not Finish.ERROR


def test_a_request_that_is_alone_fails_if_others_fill_the_cache(server: LlamaServer, model: Path) -> None:
    server.pool = 20
    with engine(model, server) as found:
        result = ask(found, SAMPLING._replace(ignore_eos=True))
        assert (result.finish, result.error) == (Finish.ERROR, "the llamacpp server answered 500")
        assert len(result.ids) > 10


def error(message: str = "no such thing", code: int = 400) -> dict[str, Any]:
    return {"error": Refusal(message, code=code).error}


def event(*ids: int, count: Any, content: Any = "x", **more: Any) -> bytes:
    body = {"index": 0, "content": content, "tokens": ids, "stop": False, "tokens_predicted": count, **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def end(reason: Any = "limit", count: int = 2, **more: Any) -> bytes:
    return event(count=count, stop=True, stop_type=reason, **more)


FIVE, SIX = event(5, count=1), event(6, count=2)
TWO = SAMPLING._replace(max_new_tokens=2)
UNREADABLE = "sent an event that cannot be read"
DOWN, NO = error("Compute error.", 500), error()
SERVER = "the llamacpp server"


def whole(*ids: int, finish: Finish = Finish.LENGTH) -> Result:
    return Result([*ids], finish, Words(""))


def told(body: Any) -> bytes:
    """An error in a stream."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


SCRIPTS: dict[str, tuple[Sequence[bytes], Result]] = {
    "events in pieces": ((HEAD, FIVE[:9], FIVE[9:] + SIX[:5], SIX[5:] + end()[:30], end()[30:]), whole(5, 6)),
    "events at once": ((HEAD, FIVE + SIX + end()), whole(5, 6)),
    "pings": ((HEAD, b":\n\n", FIVE, b":\n\n", SIX, b":\n\n", end()), whole(5, 6)),
    "an early end": ((HEAD, FIVE, end("limit", 1, truncated=True)), whole(5)),
    "a stop string of the server": ((HEAD, FIVE, end("word", 1)), whole(5, finish=Finish.EOS)),
    "no timings": ((HEAD, FIVE, SIX, end(timings=None)), whole(5, 6)),
    "a refusal": ((status(400, NO),), failed(error="to the client: no such thing")),
    "what it does not support": ((status(501, error(code=501)),), failed(error=f"{SERVER} answered 501")),
    "a refusal in it": ((HEAD, FIVE, told(NO)), failed(5, error=f"{SERVER} refused the request with 400")),
    "an error in it": ((HEAD, FIVE, told(DOWN)), failed(5, error=f"{SERVER} answered 500")),
    "no end": ((HEAD, FIVE), failed(5, error=f"{SERVER} sent an incomplete response")),
    "an unknown end": (
        (HEAD, FIVE, end("none", 1)),
        failed(5, error=f"{SERVER} ended the request for an unknown reason"),
    ),
    "no tokens": ((HEAD, end("limit", 0)), failed(error=f"{SERVER} ended its response without a token")),
    "too many": ((HEAD, event(5, 6, 7, count=3)), failed(error=f"{SERVER} sent more tokens than max_tokens=2")),
    "a negative id": ((HEAD, FIVE, event(-1, count=2)), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "no count": ((HEAD, FIVE, b'data: {"tokens": [6]}\n\n'), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "a count as text": ((HEAD, FIVE, event(6, count="2")), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "a negative count": ((HEAD, FIVE, event(6, count=-2)), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "a number as ids": ((HEAD, FIVE, event(count=2, tokens=7)), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "texts as ids": ((HEAD, FIVE, event(count=2, tokens=["6"])), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "an id of 64 bits": ((HEAD, FIVE, event(1 << 63, count=2)), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "a list as text": ((HEAD, FIVE, event(6, count=4, content=["x"])), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "a list as times": ((HEAD, FIVE, end(timings=[1])), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "a list": ((HEAD, FIVE, b"data: []\n\n"), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "no JSON": ((HEAD, FIVE, b"data: {\n\n"), failed(5, error=f"{SERVER} {UNREADABLE}")),
    "a broken chunk": ((CHUNKED + b"zz\r\n",), failed(error=f"{SERVER} closed the connection")),
}  # fmt: skip


@in_one_test(("script", "expected"), SCRIPTS.values(), ids=SCRIPTS)
def test_events_are_read_as_they_come_and_errors_are_told(
    server: LlamaServer, script: Sequence[bytes], expected: Result
) -> None:
    server.scripts = [script] * 8
    with engine(None, server) as found:
        assert ask(found, TWO) == expected
        server.scripts = []
        assert ask(found, TWO, key=2).ids == own(server, PROMPT, n_predict=2)["tokens"]


@pytest.mark.parametrize("has_ids", [False, True])
def test_tokens_that_never_come_are_not_asked_for_again_and_again(
    server: LlamaServer, model: Path, has_ids: bool
) -> None:
    answer = json.dumps({"tokens": [5] * has_ids, "tokens_predicted": 9, "stop": True, "stop_type": "limit"}).encode()
    length = b"content-length: %d\r\n\r\n" % len(answer)
    whole_answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + length + answer
    server.scripts = [(HEAD, event(count=9, stop=True, stop_type="limit"))] + [(whole_answer,)] * 1000
    with engine(model, server) as found:
        result = ask(found, SAMPLING._replace(max_new_tokens=20))
        reason = "sent more tokens than max_tokens=20" if has_ids else "ended its response without a token"
        assert result == failed(*[5] * (20 * has_ids), error=f"{SERVER} {reason}")
        assert len(server.received) < 30
        server.scripts = []
        assert ask(found, TWO, key=2).ids == own(server, PROMPT, n_predict=2)["tokens"]


def test_log_probabilities_of_other_tokens_are_not_taken(server: LlamaServer) -> None:
    score = {"id": 6, "logprob": -1.0, "top_logprobs": []}
    for wrong in ([score], [{**score, "id": 5, "logprob": math.inf}], [{"id": 5}], 7):
        server.scripts = [(HEAD, event(5, count=1, completion_probabilities=wrong), end(count=1))] * 8
        with engine(None, server) as found:
            result = ask(found, TWO._replace(logprobs=True))
            assert result == failed(error=f"the llamacpp server {UNREADABLE}"), wrong


def long_prompt(server: Served) -> list[int]:
    return [10 + 71 * number % (len(server.pieces) - 20) for number in range(1500)]


def test_a_long_prompt_is_not_silence_while_it_is_computed(server: LlamaServer, model: Path) -> None:
    server.prompt_pace = 0.4
    with engine(model, server, timeout=1.0) as found:
        assert ask(found, prompt=long_prompt(server)).ids == own(server, long_prompt(server))["tokens"]


def test_a_long_prompt_has_the_servers_own_answer(both: Both) -> None:
    prompt = long_prompt(both.server)
    with engine(both.model, both.server) as found:
        assert ask(found, prompt=prompt).ids == own(both.server, prompt)["tokens"]


@pytest.mark.parametrize("tells", [True, False], ids=["slots", "no slots"])
def test_a_whole_response_is_not_silence_while_it_is_computed(server: LlamaServer, model: Path, *, tells: bool) -> None:
    server.pace, server.tells_slots = 0.1, tells
    text = "ab" * 30
    rule = StructuredOutput("choice", json.dumps([text]))
    sampling = SAMPLING._replace(max_new_tokens=60, logprobs=True, structured_output=rule)
    with engine(model, server, timeout=2.0) as found:
        result = ask(found, sampling)
        assert server.received[-1]["stream"] is False or server.received[-1]["n_predict"] == 1
        if tells:
            assert b"".join(server.pieces[id] for id in result.ids) == text.encode()
        else:
            assert "sent no token for 2 s" in result.error


def test_a_whole_response_of_a_server_whose_slots_stand_still_is_silence(server: LlamaServer, model: Path) -> None:
    server.pace = 0.01
    sampling = SAMPLING._replace(logprobs=True, structured_output=StructuredOutput("choice", '["ab"]'))
    with engine(model, server, timeout=1.0) as found:
        assert ask(found, sampling).finish is Finish.EOS
        server.scripts = [[HANG]]
        asked = server.asked["/slots"]
        assert "sent no token for 1 s" in ask(found, sampling, key=2).error
        assert server.asked["/slots"] > asked + 1


def test_a_silent_server_fails_the_request(server: LlamaServer) -> None:
    server.scripts = [(HEAD, FIVE, HANG)]
    with engine(None, server, timeout=0.5) as found:
        result = ask(found, TWO)
        assert result == failed(5, error="the llamacpp server sent no token for 0.5 s (option.base_url_timeout)")
        assert server.left.acquire(timeout=5)
        assert ask(found, TWO, key=2).finish is Finish.LENGTH


# -- the server's own flags, and its start ----------------------------------------------------------------------------


def test_a_key_is_sent_and_a_wrong_one_is_the_operators(server: LlamaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "secret"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with engine(None, server) as found:
        assert ask(found).finish is not Finish.ERROR
        server.key = "another"
        result = ask(found, key=2)
        assert result == failed(error="the llamacpp server answered 401")
        assert "OPENAI_API_KEY" in result.error.log


def test_it_waits_until_the_model_is_loaded(
    server: LlamaServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("handler.engines.remote.servers._LOG_INTERVAL", 0.0)
    server.is_loading = True
    threading.Timer(1.0, lambda: setattr(server, "is_loading", False)).start()
    began = time.monotonic()
    with engine(None, server) as found:
        assert time.monotonic() - began >= 0.9
        assert ask(found).finish is not Finish.ERROR
        lines = set(capfd.readouterr().err.splitlines())
        assert lines == {f"waiting for a model: option.base_url={server.url}/v1: is loading its model"}


def test_a_restarted_server_that_loads_its_model_is_busy(server: LlamaServer) -> None:
    with engine(None, server) as found:
        assert ask(found).finish is not Finish.ERROR
        server.is_loading = True
        result = ask(found, key=2)
        assert result == failed(error="the llamacpp server is busy: it is loading its model")
        server.is_loading = False
        assert ask(found, key=3).finish is not Finish.ERROR


@in_one_test("limit", [0, -1, "8", True, None])
def test_a_context_that_is_no_number_of_tokens_is_unknown(limit: object) -> None:
    props = json.dumps({"default_generation_settings": {"n_ctx": limit}})
    assert servers._described("model", props.encode()).max_tokens is None


def test_what_the_server_says_of_itself(server: LlamaServer, pieces: Sequence[bytes]) -> None:
    server.context = 512
    with engine(None, server) as found:
        assert found.info.max_total_tokens == 512
        assert found.info.version == "llamacpp"
    server.lacks = frozenset({"total_slots", "default_generation_settings"})
    with pytest.raises(ConfigError, match=r"set option\.max_model_len"), engine(None, server):
        pass
    given = {"base_url": (server.url,), "base_url_kind": "llamacpp", "base_url_connect_timeout": 5.0}
    options = Config(engine_options={**given, "base_url_timeout": PATIENCE}, max_model_len=100)
    found = LlamaCppEngine(EngineConfig(options))
    try:
        assert found.info.max_total_tokens == 100
        assert ask(found).finish is not Finish.ERROR
    finally:
        found.close()


def test_a_server_that_was_restarted_with_another_model_gets_no_requests(server: LlamaServer) -> None:
    letters = tuple(id for id, piece in enumerate(server.pieces) if not piece.isascii())
    sampling = SAMPLING._replace(bad_token_ids=letters)  # a character of several tokens may close a connection
    with engine(None, server) as found:
        expected = own(server, PROMPT, logit_bias=[[id, False] for id in letters])["tokens"]
        assert ask(found, sampling).ids == expected
        for key in range(2, 8):
            assert ask(found, sampling, key=key).ids == expected
        num_asked, num_connections = server.asked["/props"], found._client.num_connections
        for key in range(8, 16):
            assert ask(found, sampling, key=key).ids == expected
        # The end of a response may arrive after its last token. Then the next request opens a connection.
        num_new = found._client.num_connections - num_connections
        assert num_new < 8, "connections are kept"
        assert server.asked["/props"] - num_asked <= num_new, "kept connections need no question"
        server.restart("another.gguf")
        result = ask(found, sampling, key=16)
        assert result == failed(error="the llamacpp server serves another model")
        assert "'another.gguf' instead of 'tiny.gguf'" in result.error.log
        server.restart("tiny.gguf")
        assert ask(found, sampling, key=17).ids == expected


def test_the_kind_is_found_by_asking(server: LlamaServer) -> None:
    for url in (server.url, f"{server.url}/v1"):
        assert find_kind((url,)) == "llamacpp"


def test_two_servers_share_the_requests(pieces: Sequence[bytes], model: Path) -> None:
    with (
        llama_server.listening(pieces, 1) as first,
        llama_server.listening(pieces, 1) as second,
        engine(model, first, second) as found,
    ):
        expected = [own(first, prompt)["tokens"] for prompt in prompts(first, 20)]
        first.received.clear()
        for key, prompt in enumerate(prompts(first, 20), 1):
            found.add(EngineRequest(key, prompt, SAMPLING))
        results = run(found, *range(1, 21))
        assert [results[key].ids for key in range(1, 21)] == expected
        assert len(first.received) > 2
        assert len(second.received) > 2
