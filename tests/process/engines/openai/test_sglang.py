"""The engine openai in front of SGLang's own API: every version, flag and end of a response."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from handler.core.errors import ConfigError
from handler.core.values import Extras, Finish, Pooling, Sampling, StructuredOutput
from handler.engines.base import EngineRequest, Output
from handler.engines.openai.kinds import find_kind
from handler.engines.openai.sglang import api as sglang
from handler.engines.openai.sglang.engine import SglangEngine
from handler.engines.remote.servers import Failed
from handler.engines.remote.sglang import guide
from tests.doubles.sglang_server import DONE, HANG, NEVER, SglangServer, best, event, listening, score
from tests.one_test import in_one_test
from tests.process.engines.openai import test_bad_servers
from tests.process.engines.openai.test_bad_servers import PATIENCE, Result, failed, run
from tests.servers import wait_for

SAMPLING = Sampling(max_new_tokens=6, logprobs=False)
PROMPT = [5, 6, 7]
WHOLE = ([5, 6, 7, 5, 6, 7], Finish.LENGTH, "")
VERSIONS = {
    "0.5.23": {},
    "0.5.23, incremental": {"incremental": True},
    "0.5.23, every fourth": {"incremental": True, "stream_interval": 4},
    "0.5.6": {"version": "0.5.6"},
    "0.5.6, incremental": {"version": "0.5.6", "incremental": True},
    "0.5.4, which is always incremental": {"version": "0.5.4"},
    "0.5.2, without a tokenizer": {"version": "0.5.2", "tokenizes": False},
    "0.5.2, which repeats the end of the prompt": {"version": "0.5.2"},
}
DRAWN = Sampling(max_new_tokens=20, do_sample=True, logprobs=False)


@contextlib.contextmanager
def engine(*servers: SglangServer, **options: Any) -> Iterator[SglangEngine]:
    with test_bad_servers.engine(*servers, base_url_kind="sglang", **options) as found:
        assert isinstance(found, SglangEngine)
        yield found


def ask(
    found: SglangEngine, sampling: Sampling = SAMPLING, ids: Sequence[int] = PROMPT, key: int = 1, **more: Any
) -> Result:
    found.add(EngineRequest(key, ids, sampling, **more))
    return run(found, key)[key]


def outputs(found: SglangEngine, sampling: Sampling, ids: Sequence[int] = PROMPT) -> list[Output]:
    """The outputs of a request, with those that hold a single token."""
    found.add(EngineRequest(1, ids, sampling))
    whole: list[Output] = []
    deadline = time.monotonic() + PATIENCE
    while not (whole and whole[-1].finish):
        assert time.monotonic() < deadline
        step = found.step()
        whole += [Output(1, [id], [logprob]) for id, logprob in zip(step.ids, step.logprobs, strict=True)]
        whole += step.others
    return whole


# -- responses ---------------------------------------------------------------------------------------------------------


@in_one_test("settings", VERSIONS.values(), ids=VERSIONS)
def test_every_version_sends_all_tokens_once(settings: dict[str, Any]) -> None:
    with listening(**settings) as server, engine(server) as found:
        assert found.info.max_total_tokens == server.context - 6
        for key in range(1, 4):
            assert ask(found, key=key) == WHOLE
        assert ask(found, ids=[5, 2, 9], key=9) == ([5, 2], Finish.EOS, "")
        assert ask(found, SAMPLING._replace(stop_token_ids=(7,)), key=10) == ([5, 6, 7], Finish.STOP, "")


@in_one_test("settings", VERSIONS.values(), ids=VERSIONS)
def test_every_version_sends_log_probabilities_beside_their_tokens(settings: dict[str, Any]) -> None:
    sampling = SAMPLING._replace(logprobs=True, top_logprobs=2)
    with listening(**settings) as server, engine(server) as found:
        parts = outputs(found, sampling)
    ids = [id for part in parts for id in part.ids]
    assert ids == WHOLE[0]
    assert [logprob for part in parts for logprob in part.logprobs] == [score(id) for id in ids]
    assert [tuple(map(tuple, top)) for part in parts for top in part.tops or ()] == [tuple(best(id, 2)) for id in ids]


@in_one_test("settings", VERSIONS.values(), ids=VERSIONS)
def test_a_prompt_is_scored_once(settings: dict[str, Any]) -> None:
    sampling = SAMPLING._replace(logprobs=True, prompt_logprobs=True, prompt_top_logprobs=3)
    with listening(**settings) as server, engine(server) as found:
        first, *others = outputs(found, sampling)
    assert first.prompt_logprobs == [None, score(6), score(7)]
    assert [tuple(tops) for tops in first.prompt_tops or ()] == [(), tuple(best(6, 3)), tuple(best(7, 3))]
    assert not first.tops
    assert all(other.prompt_logprobs is None for other in others)


def test_cached_tokens_arrive_with_the_first_token() -> None:
    with listening(cached=2) as server, engine(server) as found:
        parts = outputs(found, SAMPLING)
        assert [part.extras for part in parts] == [Extras(num_cached_tokens=2), *[None] * (len(parts) - 1)]
        assert ask(found, goes_on=True, key=2) == WHOLE


def test_tokens_that_a_grammar_forbids_have_no_number() -> None:
    row = [[-0.5, 5, None], [None, 6, None], [-0.25, 8, None]]
    meta = {
        "finish_reason": {"type": "length", "length": 1},
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 5, None]],
        "output_top_logprobs": [row],
    }
    with listening((event({"output_ids": [5], "meta_info": meta}), DONE)) as server, engine(server) as found:
        (part,) = outputs(found, SAMPLING._replace(top_logprobs=3))
    assert part.tops == [[(8, -0.25), (5, -0.5)]]


@in_one_test("ids", [[4, 6, 7, 5], [6, 7, 5], [0, 5, 6, 7, 5]])
def test_ids_that_the_prompt_does_not_end_with_are_an_error(ids: list[int]) -> None:
    first = event({"output_ids": ids, "meta_info": {"finish_reason": None, "completion_tokens": 1}})
    with listening(*[(first, DONE)] * 3) as server, engine(server) as found:
        result = ask(found)
    assert result.error == "the sglang server sent an event that cannot be read"
    assert "more token ids than it reports as its number of tokens" in result.error.log


def test_stop_tokens_count_although_ignore_eos_makes_sglang_forget_them() -> None:
    sampling = Sampling(max_new_tokens=50, logprobs=False, ignore_eos=True, stop_token_ids=(7,))
    with listening(pace=0.01, disconnect_seconds=NEVER) as server, engine(server) as found:
        assert ask(found, sampling, ids=[5, 2, 7]) == ([5, 2, 7], Finish.STOP, "")
        wait_for(lambda: not server.running, 5, "it goes on although nobody listens")
        assert server.aborted == [server.received[0].body["rid"]]
        late = sampling._replace(min_new_tokens=4)
        assert ask(found, late, key=2) == ([5, 6, 8, 5, 6, 7], Finish.STOP, "")


@in_one_test("incremental", [False, True])
def test_what_follows_a_missed_stop_token_in_its_event_is_dropped(incremental: bool) -> None:
    sampling = Sampling(max_new_tokens=50, top_logprobs=2, ignore_eos=True, stop_token_ids=(9,))
    settings = {"incremental": incremental, "stream_interval": 5, "disconnect_seconds": NEVER}
    with listening(**settings) as server, engine(server) as found:
        parts = outputs(found, sampling, [5, 6, 9, 7])
    ids = [id for part in parts for id in part.ids]
    assert ids == [5, 6, 9]
    assert [logprob for part in parts for logprob in part.logprobs] == [score(id) for id in ids]
    assert sum(len(part.tops or ()) for part in parts) == 3


def test_an_answer_may_end_at_one_of_several_ids_without_naming_it() -> None:
    for matched in ([8, 9], None):
        script = (token(9, count=1, finish_reason={"type": "stop", "matched": matched}), DONE)
        with listening(script) as server, engine(server) as found:
            assert ask(found, SAMPLING._replace(stop_token_ids=(9,))) == ([9], Finish.STOP, "")


def test_alternatives_to_the_prompt_that_are_missing_are_an_error() -> None:
    entries = [[None, 5, None], [-1.0, 6, None], [-1.0, 7, None]]
    cases: list[tuple[list[Any], list[Any]]] = [(entries, [None, []]), (entries[:2], [None, [], []])]
    for prompt, rows in cases:
        meta = {"input_token_logprobs": prompt, "input_top_logprobs": rows, "output_token_logprobs": [[-1.0, 5, None]]}
        with listening() as server, engine(server) as found:
            server.scripts = [(token(5, count=1, **meta), DONE)] * 3
            sampling = SAMPLING._replace(prompt_logprobs=True, prompt_top_logprobs=1)
            assert ask(found, sampling).error == "the sglang server sent an event that cannot be read"


def test_a_log_probability_of_another_token_is_an_error() -> None:
    meta = {"finish_reason": None, "completion_tokens": 1, "output_token_logprobs": [[-0.5, 6, None]]}
    script = (event({"output_ids": [5], "meta_info": meta}), DONE)
    with listening(script, script, script) as server, engine(server) as found:
        result = ask(found, SAMPLING._replace(logprobs=True))
        assert result == failed(error="the sglang server sent an event that cannot be read")
        assert "do not match the tokens" in result.error.log


# -- what a request says -----------------------------------------------------------------------------------------------


def test_a_request_says_all_neutral_values() -> None:
    with listening() as server, engine(server) as found:
        assert ask(found) == WHOLE
    (received,) = server.received
    assert received.path == "/generate"
    parameters = received.body["sampling_params"]
    assert isinstance(parameters.pop("sampling_seed"), int)
    assert parameters == {
        "n": 1, "max_new_tokens": 6, "min_new_tokens": 0, "temperature": 0.0, "top_p": 1.0, "top_k": -1,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": False,
    }  # fmt: skip


def test_preferred_parameters_of_the_server_do_not_apply() -> None:
    preferred = {"regex": "b|c", "min_p": 0.5, "stop": ["x"], "temperature": 0.7, "stop_token_ids": [5]}
    for version in ("0.5.23", "0.5.2"):
        with listening(version=version, preferred=preferred) as server, engine(server) as found:
            assert ask(found) == WHOLE


def test_a_seed_needs_deterministic_inference() -> None:
    seeded = DRAWN._replace(seed=(1 << 64) - 3)
    for version in ("0.5.23", "0.5.2"):
        with listening(version=version) as server, engine(server) as found:
            result = ask(found, seeded)
            assert result.error.startswith("to the client: seed: the SGLang server was started without --enable-det")
            assert ask(found, SAMPLING._replace(seed=3), key=2) == WHOLE, "greedy decoding needs no seed"
            assert ask(found, DRAWN, key=3).finish is Finish.LENGTH
            assert len(server.received) == 2
    with listening(deterministic=True) as server, engine(server) as found:
        first, second = ask(found, seeded), ask(found, seeded, key=2)
        assert first == second
        assert server.received[0].body["sampling_params"]["sampling_seed"] == -3
        drawn = {tuple(ask(found, DRAWN, key=key).ids) for key in range(3, 13)}
        assert len(drawn) == 10, "without a seed, SGLang would draw the same for all"


def test_flags_that_changed_are_asked_before_a_seed_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.openai.sglang.engine.TRUST", 0.0)
    monkeypatch.setattr("handler.engines.remote.engine._ASK_AGAIN", 0.0)
    seeded = DRAWN._replace(seed=1)
    with listening(deterministic=True) as server, engine(server) as found:
        assert ask(found, seeded).finish is Finish.LENGTH
        server.deterministic = False
        assert "--enable-deterministic-inference" in ask(found, seeded, key=2).error


def test_a_cache_salt_needs_a_version_that_has_it() -> None:
    salted = SAMPLING._replace(cache_salt="tenant")
    with listening() as server, engine(server) as found:
        assert ask(found, salted) == WHOLE
        assert server.received[0].body["extra_key"] == "tenant"
    with listening(version="0.5.2") as server, engine(server) as found:
        assert "does not separate its prefix cache" in ask(found, salted).error
        assert not server.received


@in_one_test("version", ["0.5.23", "0.5.10", "0.5.2"])
def test_a_server_without_a_tokenizer_sends_ids_alone(version: str) -> None:
    """--skip-tokenizer-init: before 0.5.20, `min_new_tokens` ends its scheduler."""
    with listening(tokenizes=False, version=version) as server, engine(server) as found:
        assert ask(found) == WHOLE
        assert ask(found, SAMPLING._replace(stop_token_ids=(6,)), key=2) == ([5, 6], Finish.STOP, "")
        assert ask(found, ids=[5, 2], key=3) == ([5, 2], Finish.EOS, "")
        least = ask(found, SAMPLING._replace(min_new_tokens=2), key=4)
        assert least.error.startswith("to the client: min_tokens: the SGLang server was started with --skip-tokenizer-")
        ruled = ask(found, CHOICE, key=5)
        assert ruled.error.startswith("to the client: structured output: the SGLang server was started with --skip-tok")
        assert len(server.received) == 3, "neither was sent"


@in_one_test(("settings", "words"), [
    ({"speculative": "EAGLE3"}, ""),
    ({"speculative": "EAGLE3", "version": "0.5.13"}, "with --speculative-algorithm EAGLE3, and then ignores it"),
    ({"speculative": "DFLASH"}, "with --speculative-algorithm DFLASH, and then ignores it"),
])  # fmt: skip
def test_speculative_decoding_ignores_some_parameters(settings: dict[str, Any], words: str) -> None:
    with listening(deterministic=True, **settings) as server, engine(server) as found:
        result = ask(found, DRAWN._replace(min_p=0.5))
        assert result.error.startswith("to the client: min_p: the SGLang server was started with --speculative-algor")
        assert ask(found, SAMPLING._replace(min_p=0.5), key=2) == WHOLE, "greedy decoding needs no min_p"
        assert words in ask(found, DRAWN._replace(seed=3), key=3).error
        assert len(server.received) == 2 - bool(words)


TAG = StructuredOutput("structural_tag", '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}')


def test_a_structural_tag_needs_a_version_that_reads_it() -> None:
    """Versions before 0.5.4 would end."""
    for version in ("0.5.2", "0.5.3.post3"):
        with listening(version="0.5.2", info={"version": version}) as server, engine(server) as found:
            result = ask(found, SAMPLING._replace(structured_output=TAG))
            assert result.error.startswith("to the client: structured output: SGLang before 0.5.4 does not support")
            assert not any("structural_tag" in received.body["sampling_params"] for received in server.received)
    for version in ("0.5.4", "0.5.4.post1", "0.0.0.dev1+gabc", "unknown"):
        with listening(version="0.5.4", info={"version": version}) as server, engine(server) as found:
            ask(found, SAMPLING._replace(structured_output=TAG))
            assert server.received[-1].body["sampling_params"]["structural_tag"] == TAG.value


def test_a_repetition_penalty_needs_a_version_that_applies_it() -> None:
    penalized = SAMPLING._replace(repetition_penalty=1.5)
    for version in ("0.5.23", "0.5.10", "0.5.10.post1"):
        with listening(version="0.5.10", info={"version": version}) as server, engine(server) as found:
            assert ask(found, penalized) == WHOLE
    with listening(version="0.5.9") as server, engine(server) as found:
        assert ask(found, penalized).error == "to the client: repetition_penalty: SGLang before 0.5.10 ignores it"
        assert not server.received


def test_an_escape_of_a_regular_expression_is_no_nul_character() -> None:
    for kind, text in (("json_schema", '{"pattern": "\\\\u0000"}'), ("regex", r"\u0000")):
        assert guide(Sampling(structured_output=StructuredOutput(kind, text)), "ebnf") == {kind: text}


def test_words_of_xgrammar_come_without_their_source() -> None:
    words = "Failed to compile regex grammar: [09:25:29] /project/cpp/regex.cc:83: Unclosed '['"
    meta = {"finish_reason": {"type": "abort", "message": words, "status_code": 400}, "completion_tokens": 0}
    with listening((event({"output_ids": [], "meta_info": meta}), DONE)) as server, engine(server) as found:
        assert ask(found) == failed(error="to the client: Failed to compile regex grammar: Unclosed '['")


def test_flags_that_need_nothing_change_nothing() -> None:
    """They are reported, and change no response: the double would fail if the engine sent anything else for them."""
    flags = {"disable_radix_cache": True, "enable_custom_logit_processor": True, "enable_cache_report": True}
    with listening(info=flags, dp_size=2, workers=4, name="x/y") as server, engine(server) as found:
        assert ask(found) == WHOLE
        assert ask(found, SAMPLING._replace(cache_salt="a"), key=2) == WHOLE
        assert ask(found, CHOICE, key=3) == ([ord("a"), ord("b")], Finish.EOS, "")


def test_forbidden_ids_are_biased() -> None:
    with listening() as server, engine(server) as found:
        assert ask(found, SAMPLING._replace(bad_token_ids=(6,))).ids == [5, 8, 7, 5, 8, 7]
        assert "logit_bias must has keys" in ask(found, SAMPLING._replace(logit_bias=((900, 1.0),)), key=2).error


CHOICE = Sampling(max_new_tokens=2, logprobs=False, structured_output=StructuredOutput("choice", '["ab"]'))


def test_structured_output_is_tested_first() -> None:
    with listening() as server, engine(server) as found:
        assert ask(found, CHOICE) == ([ord("a"), ord("b")], Finish.EOS, "")
        assert len(server.received) == 3 + 1
        server.reasons = True
        found._servers[0].enforces_until = 0.0
        result = ask(found, CHOICE, key=2)
        assert result.error.startswith("to the client: the sglang server does not enforce structured output")
        assert ask(found, CHOICE, ids=[5, 4], key=3) == ([ord("a"), ord("b")], Finish.EOS, "")
        server.grammar = False
        found._servers[0].enforces_until = 0.0
        assert "--grammar-backend none" in ask(found, CHOICE, key=4).error


@in_one_test("pool", [1000, 32])
def test_no_prompt_or_response_is_cut(pool: int) -> None:
    with listening(pool=pool, truncates=True) as server, engine(server) as found:
        most = found.info.max_total_tokens
        for key, count in enumerate((1, most - 5, most - 1), 1):
            result = ask(found, SAMPLING._replace(max_new_tokens=most - count), ids=[5] * count, key=key)
            assert result == ([5] * (most - count), Finish.LENGTH, "")
    with listening(info={"max_req_input_len": None}) as server, engine(server) as found:
        assert found.info.max_total_tokens == server.context


# -- labels and adapters -----------------------------------------------------------------------------------------------


def labels(found: SglangEngine, *ids: int, **more: Any) -> Output:
    """The outcome of a request for labels."""
    pooling = Pooling("labels", labels=tuple(map(str, ids)), label_ids=ids, cache_salt="tenant")
    found.add(EngineRequest(1, PROMPT, pooling, **more))
    deadline = time.monotonic() + PATIENCE
    while not (others := found.step().others):
        assert time.monotonic() < deadline
    (output,) = others
    return output


@in_one_test("settings", [VERSIONS[name] for name in ("0.5.23", "0.5.23, incremental", "0.5.6")])
def test_one_request_reads_all_labels(settings: dict[str, Any]) -> None:
    ids = (*range(11, 60), 60)
    with listening(**settings) as server, engine(server) as found:
        output = labels(found, *ids)
        assert (output.ids, output.finish, output.error) == ([], Finish.LENGTH, None)
        assert output.extras is not None
        *logprobs, highest = output.extras.vector or ()
        assert logprobs == [-math.inf if id % 10 == 0 else score(id) - 1 for id in ids]
        assert highest == score(5)
        (received,) = server.received
        assert received.body["extra_key"] == "tenant"
        assert "out-of-vocabulary" in (labels(found, 5, 9000).error or "")


def test_labels_that_the_server_left_out_are_an_error() -> None:
    meta = {
        "finish_reason": {"type": "length", "length": 1},
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 5, None]],
        "output_token_ids_logprobs": [[[-1.0, 11, None]]],
    }
    with listening() as server, engine(server) as found:
        server.scripts = [(event({"output_ids": [5], "meta_info": meta}), DONE)] * 3
        assert labels(found, 11, 12).error == "the sglang server sent an event that cannot be read"


def test_an_adapter_of_the_server_is_chosen_by_its_name() -> None:
    with listening() as server, engine(server, base_url_model="german") as found:
        assert found.info.max_total_tokens == server.context - 6
        assert ask(found).ids == [105, 106, 107, 105, 106, 107]
        server.adapters = {}
        assert ask(found, key=2).error == "the sglang server serves another model"


def test_replicas_agree_on_what_is_an_adapter() -> None:
    settings = {"name": "german", "adapters": {}}
    with (
        listening() as first,
        listening(**settings) as second,
        engine(first, second, base_url_model="german") as found,
    ):
        for key in range(1, 4):
            assert ask(found, key=key).ids == [105, 106, 107, 105, 106, 107]
        assert not second.received


# -- errors ------------------------------------------------------------------------------------------------------------


@in_one_test("version", ["0.5.23", "0.5.12", "0.5.2"])
def test_what_the_server_refuses_is_told_to_the_client(version: str) -> None:
    """Before 0.5.13, such an error has no status."""
    with listening(version=version) as server, engine(server) as found:
        result = ask(found, SAMPLING._replace(presence_penalty=3.0))
        assert result == failed(error="to the client: presence_penalty must be in [-2, 2], got 3.0.")
        assert ask(found, key=2) == WHOLE
        assert len(server.received) == 2


def test_a_full_queue_is_tried_elsewhere_and_told() -> None:
    with listening(max_running=0, max_queued=0) as full, listening() as free:
        with engine(full, free) as found:
            for key in range(1, 4):
                assert ask(found, key=key) == WHOLE
        with engine(full) as found:
            result = ask(found)
            assert result == failed(error="the sglang server is busy: it answered 503")
            assert "The request queue is full." in result.error.log


def abort(code: int | None, *ids: int, count: int = 0) -> bytes:
    """The event of an abort. With --incremental-streaming-output, it repeats the last id."""
    reason = {"type": "abort", "message": "no more http://10.1.2.3/", "status_code": code, "err_type": None}
    return event({"output_ids": list(ids), "meta_info": {"finish_reason": reason, "completion_tokens": count}})


def token(*ids: float, count: int, **more: Any) -> bytes:
    meta = {"finish_reason": None, "completion_tokens": count, **more}
    return event({"text": "x", "output_ids": list(ids), "meta_info": meta})


STOPPED = {"finish_reason": {"type": "stop", "matched": "NaN happened"}}
FAILURES = {
    "aborted by another": ((abort(None),), [], "aborted the request"),
    "failed": ((abort(500),), [], "answered 500"),
    "aborted amid": ((token(5, count=1), abort(None, 5, count=1), DONE), [5], "aborted the request"),
    "timed out amid": ((token(5, count=1), abort(503, 5, count=1), DONE), [5], "answered 503"),
    "refused amid": ((token(5, count=1), abort(400, 5, count=1), DONE), [5], "refused the request with 400"),
    "NaN": ((token(5, count=1), token(2, count=2, **STOPPED), DONE), [5], "ended the request for an unknown reason"),
    "lost tokens": ((token(5, count=1), token(8, count=3), DONE), [5], "lost tokens of its response"),
    "no count": (
        (token(5, count=1), event({"output_ids": [6], "meta_info": {"finish_reason": None}})),
        [5],
        "sent a response without its number of tokens",
    ),
    "other tokens": ((token(5, count=1), token(6, 7, count=2)), [5], "changed tokens of its response"),
    "no ids": ((event({"text": "x", "meta_info": {"finish_reason": None}}),), [], "sent text without token ids"),
    "a number": ((token(5.5, count=1),), [], "sent an event that cannot be read"),
    "a negative id": ((token(-5, count=1),), [], "sent an event that cannot be read"),
    "too many": ((token(*[5] * 7, count=7),), [], "sent more tokens than max_tokens=6"),
    "no reason": ((token(5, count=1), DONE), [5], "ended its response without a finish_reason"),
    "an end": ((token(5, count=1),), [5], "ended its response without a finish_reason"),
    "no meta_info": ((event({"output_ids": [5]}),), [], "sent an event that cannot be read"),
    "a list": ((event([]),), [], "sent an event that cannot be read"),
    "no object": ((event({"output_ids": 5, "meta_info": []}),), [], "sent an event that cannot be read"),
}


@in_one_test(("script", "ids", "words"), FAILURES.values(), ids=FAILURES)
def test_a_failure_ends_its_request_and_no_other(script: tuple[bytes, ...], ids: list[int], words: str) -> None:
    with listening() as server, engine(server) as found:
        server.scripts = [script] if ids else [script] * 3
        result = ask(found)
        assert (result.ids, result.finish) == (ids, Finish.ERROR)
        assert result.error.startswith(f"the sglang server {words}"), result
        assert "10.1.2.3" not in result.error
        assert ask(found, key=2) == WHOLE


def test_an_older_version_without_ids_says_what_it_needs() -> None:
    with listening(version="0.4.6") as server, engine(server) as found:
        result = ask(found)
        assert result == failed(error="the sglang server sent text without token ids")
        assert "--skip-tokenizer-init" in result.error.log


def test_a_version_that_loses_tokens_of_a_burst_fails_loudly() -> None:
    with listening(version="0.5.6", incremental=True, loaded=True) as server, engine(server) as found:
        results = [ask(found, SAMPLING._replace(max_new_tokens=30), key=key) for key in range(1, 6)]
        assert any("lost tokens" in result.error for result in results)
        for result in results:
            assert result.finish is Finish.LENGTH or "lost tokens" in result.error
            assert result.ids == ([5, 6, 7] * 10)[: len(result.ids)]


# -- keys, kinds and models --------------------------------------------------------------------------------------------


def test_the_kind_is_detected_and_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "its-key")
    with listening(key="its-key") as server:
        find_kind.cache_clear()
        with test_bad_servers.engine(server, base_url_kind="auto") as found:
            assert isinstance(found, SglangEngine)
            assert ask(found) == WHOLE


def test_a_key_that_is_refused_is_named() -> None:
    with listening(key="its-key") as server, pytest.raises(ConfigError, match="OPENAI_API_KEY"), engine(server):
        pass


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"is_generation": False}, "its model computes embeddings"),
        ({"disaggregation_mode": "prefill"}, "set the address of its router"),
    ],
)
def test_a_server_that_cannot_generate_alone_is_refused(info: dict[str, Any], words: str) -> None:
    with listening(info=info) as server, pytest.raises(ConfigError, match=words), engine(server):
        pass


@in_one_test("report", [{"preferred_sampling_params": "{"}, [], None, "?"])
def test_a_server_whose_report_cannot_be_read_is_not_used(report: Any) -> None:
    with listening() as odd, listening() as well:
        odd.model_info = report
        with engine(odd, well) as found:
            assert ask(found) == WHOLE
            assert not odd.received
    with pytest.raises(Failed) as failed:
        sglang.SglangServer.read(report, {})
    assert failed.value.plain == "does not report its settings"


# -- cancelled requests ------------------------------------------------------------------------------------------------


def start(found: SglangEngine, server: SglangServer, key: int = 1) -> None:
    found.add(EngineRequest(key, PROMPT, Sampling(max_new_tokens=4000, logprobs=False)))
    deadline = time.monotonic() + PATIENCE
    while not found.step().keys:
        assert time.monotonic() < deadline


def test_a_cancelled_request_frees_its_slot_at_once() -> None:
    with listening(context=8000, pace=0.05, disconnect_seconds=NEVER) as server, engine(server) as found:
        start(found, server)
        assert len(server.running) == 1
        found.cancel(1)
        wait_for(lambda: not server.running, 5, "the slot is held")
        assert server.aborted == [server.received[0].body["rid"]]


def test_a_request_that_waits_in_the_server_leaves_its_queue() -> None:
    with listening(context=8000, max_running=1, pace=0.05, disconnect_seconds=NEVER) as server, engine(server) as found:
        start(found, server)
        found.add(EngineRequest(2, PROMPT, SAMPLING))
        wait_for(lambda: found.step() and len(server._waiting) == 1, 10, "it does not wait")
        found.cancel(2)
        wait_for(lambda: found.step() and not server._waiting, 1, "it still waits")
        assert len(server.running) == 1, "the other one goes on"


def test_the_server_notices_itself_if_it_refuses_the_abort(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        listening(context=8000, admin_key="another", pace=0.05, disconnect_seconds=0.3) as server,
        engine(server) as found,
    ):
        for key in (1, 2):
            start(found, server, key)
            found.cancel(key)
        wait_for(lambda: not server.running, 2, "the slot is held")
        assert not server.aborted
    lines = [line for line in capfd.readouterr().err.splitlines() if "--admin-api-key" in line]
    assert len(lines) == 1
    assert "answered 401" in lines[0]


def test_the_end_of_the_engine_aborts_all_requests() -> None:
    with listening(context=8000, pace=0.05, disconnect_seconds=NEVER) as server:
        with engine(server) as found:
            for key in range(1, 9):
                start(found, server, key)
        wait_for(lambda: not server.running, 5, "slots are held")


def test_cancels_that_come_together_are_all_told_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handler.engines.remote.engine._SPINS", 1)  # as if the server were farther away
    with listening(context=8000, pace=0.05, disconnect_seconds=NEVER) as server, engine(server) as found:
        commands, sender = os.pipe()
        try:
            for key in range(1, 9):
                start(found, server, key)
            found.interrupt_on(commands)
            os.write(sender, b"cancel " * 8)
            for key in range(1, 8):
                found.cancel(key)
            os.read(commands, 100)
            found.cancel(8)  # after this, nothing runs the engine
            wait_for(lambda: not server.running, 5, "slots are held")
        finally:
            found._loop.remove_reader(commands)
            os.close(commands)
            os.close(sender)


def test_a_silent_request_is_aborted() -> None:
    script = (token(5, count=1), HANG)
    with listening(script) as server, engine(server, timeout=0.3) as found:
        result = ask(found)
        assert "sent no token for 0.3 s" in result.error
        assert server.left.acquire(timeout=PATIENCE)
        wait_for(lambda: found.step() and len(server.aborted) == 1, 2, "it is not aborted")


def test_a_server_that_answers_nothing_does_not_hold_up_a_cancel() -> None:
    with listening(context=8000, pace=0.05) as server, engine(server) as found:
        start(found, server)
        server.hangs = True
        began = time.monotonic()
        found.cancel(1)
        assert time.monotonic() - began < 2
        assert found.step() == ([], [], [], [])


@pytest.mark.parametrize("incremental", [False, True])
def test_crossed_requests_get_their_own_tokens(incremental: bool) -> None:
    """64 requests at once, of which every third is cancelled amid."""
    settings = {"incremental": incremental, "pace": 0.002, "max_running": 24, "disconnect_seconds": NEVER}
    keys = range(1, 65)
    prompts = {key: [100 + key, 200 + key, 300 + key % 7] for key in keys}
    cancelled = {*keys[::3]}
    got: dict[int, list[int]] = {key: [] for key in keys}
    ended: set[int] = set()
    deadline = time.monotonic() + PATIENCE
    with listening(**settings) as server, engine(server) as found:
        for key in keys:
            found.add(EngineRequest(key, prompts[key], Sampling(max_new_tokens=20, logprobs=False)))
        while ended != {*keys}:
            assert time.monotonic() < deadline
            step = found.step()
            for key, id in zip(step.keys, step.ids, strict=True):
                got[key].append(id)
            for output in step.others:
                assert output.error is None
                got[output.key] += output.ids
                if output.finish is not None:
                    ended.add(output.key)
            for key in [key for key in cancelled - ended if len(got[key]) >= 2]:
                found.cancel(key)
                ended.add(key)
        wait_for(lambda: not server.running and not server._states, 2, "slots are held")
        assert server.aborted
    for key in keys:
        assert got[key] == (prompts[key] * 7)[: len(got[key])]
        assert key in cancelled or len(got[key]) == 20
