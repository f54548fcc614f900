"""The engine grpc in front of doubles of three systems' servers: each request ends as it should, and alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import uvloop

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Extras, Finish, Sampling, StructuredOutput, Thoughts
from handler.engines import base
from handler.engines.base import EngineConfig, EngineRequest, EngineStatistics, Output, OwnServerLost
from handler.engines.grpc import client
from handler.engines.grpc.client import CONTRACTS, find_contract, status_error
from handler.engines.grpc.contract import GrpcCall
from handler.engines.grpc.engine import GrpcEngine
from handler.engines.process.own_server import OwnServer
from handler.engines.remote import engine as remote_engine
from handler.engines.remote import servers
from handler.engines.remote.servers import Busy, Failed, Lasting, Lost, Refused, Silent
from tests.doubles import tiny
from tests.doubles.grpc_servers import (
    HANG,
    SERVERS,
    THOUGHT_END,
    GrpcServer,
    SglangServer,
    Status,
    TrtLlmServer,
    best,
    listening,
    score,
)
from tests.one_test import in_one_test
from tests.process.engines.openai.test_bad_servers import PATIENCE, Result, failed, run
from tests.servers import wait_for

KINDS = ("vllm", "sglang", "trtllm")
SAMPLING = Sampling(max_new_tokens=8, logprobs=False, stop_token_ids=(9,))
PROMPT = [301, 302, 303]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "_PAUSE", 0.01)
    monkeypatch.setattr(servers, "_PAUSE", 0.01)


@contextlib.contextmanager
def engine(model: Path, *found: GrpcServer | str, timeout: float = PATIENCE, **options: Any) -> Iterator[GrpcEngine]:
    given = {
        "base_url": tuple(one if isinstance(one, str) else one.url for one in found),
        "base_url_kind": next((kind for one in found for kind in KINDS if isinstance(one, SERVERS[kind])), "vllm"),
        "base_url_connect_timeout": 5.0,
        "base_url_timeout": timeout,
        **options,
    }
    made = GrpcEngine(EngineConfig(Config(engine_options=given), model=model))
    try:
        yield made
    finally:
        made.close()


def ask(found: GrpcEngine, sampling: Sampling = SAMPLING, key: int = 1) -> Result:
    found.add(EngineRequest(key, PROMPT, sampling))
    return run(found, key)[key]


def outputs(found: GrpcEngine, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> dict[str, list[Any]]:
    """All that comes of a request, by what it is."""
    found.add(EngineRequest(1, prompt, sampling))
    got: dict[str, list[Any]] = {name: [] for name in ("ids", "logprobs", "tops", "prompt_logprobs", "prompt_tops")}
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        step = found.step()
        got["ids"] += step.ids
        got["logprobs"] += step.logprobs
        for output in step.others:
            for name, values in got.items():
                values += getattr(output, name) or ()
            if output.finish is not None:
                return {**got, "error": [output.error], "finish": [output.finish]}
    raise AssertionError(got)


ANSWER = ([301, 302, 303, 301, 302, 303, 301, 302], Finish.LENGTH, "")


@pytest.mark.parametrize("kind", KINDS)
class TestEachContract:
    @pytest.fixture
    def server(self, kind: str) -> Iterator[GrpcServer]:
        with listening(kind) as found:
            yield found

    @pytest.fixture
    def found(self, server: GrpcServer, model: Path) -> Iterator[GrpcEngine]:
        with engine(model, server) as made:
            yield made

    def test_an_answer_is_read_once_though_its_last_message_repeats_it(self, found: GrpcEngine) -> None:
        assert ask(found) == ANSWER

    def test_the_kind_is_found_by_asking(self, kind: str, server: GrpcServer) -> None:
        find_contract.cache_clear()
        assert find_contract((server.url,)) == kind

    def test_the_id_that_ends_an_answer_says_how(self, found: GrpcEngine) -> None:
        for stops, ignore, ids, finish in (
            ((9,), False, [301, 9], Finish.STOP),
            ((), False, [301, 9, 2], Finish.EOS),
            ((), True, [301, 9, 2, 301], Finish.LENGTH),
        ):
            sampling = Sampling(max_new_tokens=4, stop_token_ids=stops, ignore_eos=ignore)
            found.add(EngineRequest(1, [301, 9, 2], sampling))
            assert run(found, 1)[1] == (ids, finish, "")

    @pytest.mark.parametrize("prompt", [[301, 302], [301, 9], [301, 3]], ids=["length", "stop", "eos"])
    def test_the_last_token_comes_with_the_reason_of_the_end(
        self, server: GrpcServer, found: GrpcEngine, prompt: list[int]
    ) -> None:
        server.eos = frozenset(tiny.EOS)
        found.add(EngineRequest(1, prompt, Sampling(max_new_tokens=2, stop_token_ids=(9,))))
        last = None
        while last is None:
            last = next((output for output in found.step().others if output.finish is not None), None)
        assert last.ids[-1:] == prompt[1:]

    def test_alternatives_are_the_best_and_in_order(self, found: GrpcEngine) -> None:
        got = outputs(found, Sampling(max_new_tokens=2, top_logprobs=3))
        assert got["ids"] == [301, 302]
        assert got["logprobs"] == [score(301), score(302)]
        assert got["tops"] == [best(301, 3), best(302, 3)]

    def test_a_token_outside_the_best_has_its_log_probability_or_none(self, kind: str, found: GrpcEngine) -> None:
        got = outputs(found, Sampling(max_new_tokens=1, top_logprobs=1))
        assert got["logprobs"] == [None if kind == "trtllm" else score(301)]
        assert got["tops"] == [best(301, 1)]

    def test_log_probabilities_of_the_prompt(self, kind: str, found: GrpcEngine) -> None:
        if "prompt_logprobs" in CONTRACTS[kind].capabilities.unsupported:
            pytest.skip("it has none")
        got = outputs(found, Sampling(max_new_tokens=2, prompt_logprobs=True, prompt_top_logprobs=2))
        assert got["prompt_logprobs"] == [None, score(302), score(303)]
        assert got["prompt_tops"] == [(), best(302, 2), best(303, 2)]
        assert got["ids"] == [301, 302]

    @pytest.mark.parametrize(
        ("cached", "goes_on", "told"), [(2, False, 2), (9, False, 3), (0, False, None), (2, True, None)]
    )
    def test_the_first_token_has_how_much_of_the_prompt_was_cached(
        self, server: GrpcServer, found: GrpcEngine, cached: int, goes_on: bool, told: int | None
    ) -> None:
        server.cached = cached
        found.add(EngineRequest(1, PROMPT, SAMPLING, goes_on=goes_on))
        ids: list[int] = []
        others: list[Output] = []
        while not any(output.finish is not None for output in others):
            step = found.step()
            ids += step.ids
            others += step.others
        assert len(ids) + sum(len(output.ids) for output in others) == SAMPLING.max_new_tokens
        assert [output.extras for output in others if output.extras] == (
            [Extras(num_cached_tokens=told)] if told else []
        )

    def test_what_nobody_asked_for_is_dropped(self, kind: str, server: GrpcServer, found: GrpcEngine) -> None:
        asked = server.asked(CONTRACTS[kind].request("x", PROMPT, Sampling(max_new_tokens=1, top_logprobs=5)))
        chunk = server.chunk("", asked, [301], is_first=True)
        server.script = lambda id: [_named(chunk, id), server.complete(id, None, [301], "length")]
        got = outputs(found, Sampling(max_new_tokens=1, logprobs=False))
        assert (got["ids"], got["logprobs"], got["tops"]) == ([301], [None], [])

    def test_who_leaves_is_aborted_there_by_name(self, server: GrpcServer, found: GrpcEngine) -> None:
        server.script = lambda id: [server.chunk(id, None, [301]), HANG]
        for key in (1, 2):
            found.add(EngineRequest(key, [300 + key], SAMPLING))
        begun = 0
        while begun < 2:
            begun += len(found.step().keys)
        server.script = None
        found.cancel(1)
        wait_for(lambda: len(server.aborted) == 1, PATIENCE, "it is not told")
        named = next(one for one in server.received if one.request_id == server.aborted[0])
        assert 301 in (getattr(named.tokenized, "input_ids", ()) or named.tokenized.input_token_ids)
        assert server.left.acquire(timeout=PATIENCE)
        assert not server.left.acquire(timeout=0.05), "the other goes on"
        assert ask(found, key=3) == ANSWER

    def test_what_the_engine_refuses_is_the_clients_own_fault(self, kind: str, found: GrpcEngine) -> None:
        result = ask(found, Sampling(max_new_tokens=2, repetition_penalty=-1.0))
        assert result == failed(error=f"to the client: {result.error.removeprefix('to the client: ')}")
        assert "repetition_penalty" in result.error
        assert ask(found, key=2) == ANSWER

    def test_another_model_after_a_restart_is_not_served(
        self, kind: str, server: GrpcServer, found: GrpcEngine
    ) -> None:
        assert ask(found) == ANSWER
        server.stop()
        name = "model_id" if kind == "trtllm" else "served_model_name"
        server.model[name] = "another"
        server.start()
        result = ask(found, key=2)
        assert result == failed(error=f"the {kind} server serves another model")
        assert len(server.received) == 1, "the other model was not asked"
        server.model[name] = type(server).usual_model[name]
        wait_for(lambda: ask(found, key=3) == ANSWER, PATIENCE, "it is left out for ever")

    def test_many_requests_and_aborts_none_lost_none_crossed(self, server: GrpcServer, found: GrpcEngine) -> None:
        total, at_once = 400, 64
        prompts = {key: [300 + key % 97, 300 + key % 89] for key in range(1, total + 1)}
        waiting, running, ids, whole, gone = list(prompts)[::-1], set[int](), dict[int, list[int]](), 0, 0
        deadline = time.monotonic() + 100
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < at_once:
                key = waiting.pop()
                found.add(EngineRequest(key, prompts[key], Sampling(max_new_tokens=3, logprobs=False)))
                running.add(key)
                ids[key] = []
                if key % 5 == 0:
                    found.cancel(key)
                    running.discard(key)
                    gone += 1
            step = found.step()
            assert {*step.keys, *(output.key for output in step.others)} <= running, "no output after a cancel"
            for key, id in zip(step.keys, step.ids, strict=True):
                ids[key].append(id)
            for output in step.others:
                ids[output.key] += output.ids
                if output.finish is not None:
                    first, second = prompts[output.key]
                    assert (ids[output.key], output.error) == ([first, second, first], None)
                    running.discard(output.key)
                    whole += 1
        assert (whole, gone) == (total * 4 // 5, total // 5)
        wait_for(lambda: found.step() and found._servers[0].outstanding == 0, PATIENCE, "streams are left open")


def _named(message: Any, id: str) -> Any:
    if hasattr(message, "request_id"):
        message.request_id = id
    return message


# -- faults ----------------------------------------------------------------------------------------------------------


def chunks(server: GrpcServer, *ids: int) -> list[Any]:
    return [server.chunk("", None, [id]) for id in ids]


UNREADABLE = "sent a message that cannot be read"
NO_END = "ended its response without a last message"


@in_one_test(
    ("script", "plain"),
    [
        (lambda server: [b"\xff\xff\xff"], UNREADABLE),
        (lambda server: [], NO_END),
        (lambda server: [server.chunk("", None, [])], NO_END),
        (lambda server: [server.chunk("", None, [1 << 20])], "sent an id outside the vocabulary"),
        (lambda server: [server.chunk("", None, [5] * 9)], "sent more tokens than max_tokens=8"),
        (lambda server: [server.complete("", None, [], "abort")], "ended the request for an unknown reason"),
        (lambda server: [server.complete("", None, [], "error")], "ended the request for an unknown reason"),
        (lambda server: [b"\x0a" + b"\xff" * 3 + b"\x02" + b"x" * (5 << 20)], "sent a message that is too large"),
        (lambda server: [Status(grpc.StatusCode.INTERNAL, "down")], "answered INTERNAL"),
        (lambda server: [Status(grpc.StatusCode.CANCELLED, "down")], "answered CANCELLED"),
        (lambda server: [Status(grpc.StatusCode.DATA_LOSS, "down")], "answered DATA_LOSS"),
    ],
)
def test_a_request_moves_before_its_first_token_and_fails_after_it(model: Path, script: Any, plain: str) -> None:
    with listening() as ill, listening() as well, engine(model, ill, well) as found:
        ill.scripts = [script(ill)]
        assert ask(found) == ANSWER
        assert (len(ill.received), len(well.received)) == (1, 1)
    if plain != "sent more tokens than max_tokens=8":
        with listening() as ill, engine(model, ill) as found:
            ill.scripts = [[*chunks(ill, 301), *script(ill)]]
            result = ask(found)
            assert result == failed(301, error=f"the vllm server {plain}")
            assert ask(found, key=2) == ANSWER


@pytest.mark.parametrize("kind", ["sglang", "trtllm"])
def test_a_message_of_another_request_is_none_of_this_one(model: Path, kind: str) -> None:
    with listening(kind) as server, engine(model, server) as found:
        server.scripts = [chunks(server, 301)] * 3
        assert ask(found) == failed(error=f"the {kind} server sent another request's message")


@in_one_test("scores", ["none", "short", "nan"])
def test_a_log_probability_is_a_number_for_each_token(model: Path, scores: str) -> None:
    with listening() as server, engine(model, server) as found:
        values = {"none": [], "short": [-1.0], "nan": [-1.0, float("nan")]}[scores]
        chunk = server.chunk("", None, [301, 302])
        chunk.chunk.output_logprobs.token_logprobs.extend(values)
        server.scripts = [[chunk]] * 3
        assert ask(found, Sampling(max_new_tokens=8)) == failed(error=f"the vllm server {UNREADABLE}")


def test_a_server_that_dies_amid_answers_fails_these_and_comes_back(model: Path) -> None:
    with listening() as server, engine(model, server) as found:
        server.scripts = [[*chunks(server, 301), HANG]] * 2
        for key in (1, 2):
            found.add(EngineRequest(key, PROMPT, SAMPLING))
        begun = 0
        while begun < 2:
            begun += len(found.step().keys)
        server.stop()
        for result in run(found, 1, 2).values():
            assert result.finish is Finish.ERROR
            assert result.error.startswith("the vllm server ")
        assert ask(found, key=3).error == "the vllm server cannot be reached"
        server.start()
        wait_for(lambda: ask(found, key=4) == ANSWER, PATIENCE, "it does not come back")


def test_silence_ends_a_request_and_aborts_it(model: Path) -> None:
    with listening() as server, engine(model, server, timeout=0.3) as found:
        server.scripts = [[*chunks(server, 301), HANG]]
        assert ask(found) == failed(301, error="the vllm server sent no token for 0.3 s (option.base_url_timeout)")
        assert server.left.acquire(timeout=PATIENCE)
        wait_for(lambda: found.step() is not None and server.aborted, PATIENCE, "it is not told")


def test_a_server_that_accepts_and_says_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(client, "INFO_TIMEOUT", 0.3)
    with contextlib.ExitStack() as stack:
        mute = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        well = stack.enter_context(listening())
        found = stack.enter_context(engine(model, f"grpc://127.0.0.1:{mute.getsockname()[1]}", well))
        assert ask(found) == ANSWER


def test_a_slow_server_is_waited_for_as_long_as_tokens_come(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: clock))
    ids: dict[int, list[int]] = {1: [], 2: [], 3: []}
    ended: dict[int, str | None] = {}
    may_come = threading.Semaphore(0)

    def trickle(server: GrpcServer) -> Iterator[Any]:
        for part in [*chunks(server, 301, 302, 303), server.complete("", None, [303], "length")]:
            assert may_come.acquire(timeout=PATIENCE)
            yield part

    with listening() as server, engine(model, server, timeout=0.1) as found:

        def step_until(done: Callable[[], object]) -> None:
            def stepped() -> bool:
                step = found.step()
                for key, id in zip(step.keys, step.ids, strict=True):
                    ids[key].append(id)
                for output in step.others:
                    ids[output.key] += output.ids
                    ended[output.key] = output.error
                return bool(done())

            wait_for(stepped, PATIENCE, "the engine stands still")

        may_come.release()
        for key, script in ((1, trickle(server)), (2, [*chunks(server, 301), HANG]), (3, [*chunks(server, 301), HANG])):
            server.scripts = [script]
            found.add(EngineRequest(key, PROMPT, SAMPLING))
            step_until(partial(ids.get, key))
        found.cancel(3)
        assert server.left.acquire(timeout=PATIENCE)
        clock = 0.06
        may_come.release()
        step_until(lambda: len(ids[1]) == 2)
        assert not ended
        clock = 0.12
        step_until(lambda: ended)
        assert ended == {2: "the vllm server sent no token for 0.1 s (option.base_url_timeout)"}
        may_come.release(2)
        step_until(lambda: 1 in ended)
    assert (ids, ended[1]) == ({1: [301, 302, 303], 2: [301], 3: [301]}, None)


STATUSES: dict[str, Any] = {
    **dict.fromkeys(("INVALID_ARGUMENT", "OUT_OF_RANGE"), Refused),
    **dict.fromkeys(("UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"), Lasting),
    **dict.fromkeys(("RESOURCE_EXHAUSTED", "UNAVAILABLE"), Busy),
    "DEADLINE_EXCEEDED": Silent,
    **dict.fromkeys(("CANCELLED", "UNKNOWN", "ALREADY_EXISTS", "ABORTED", "INTERNAL"), Failed),
    **dict.fromkeys(("DATA_LOSS", "FAILED_PRECONDITION"), Failed),
}


def test_each_status_is_an_error_of_its_own_kind(model: Path) -> None:
    assert {*STATUSES, "OK"} == {code.name for code in grpc.StatusCode}
    with listening() as server, engine(model, server) as found:
        for key, (code, kind) in enumerate(STATUSES.items(), 1):
            server.scripts = [[Status(grpc.StatusCode[code], "no such thing")]] * 4
            found.add(EngineRequest(key, PROMPT, SAMPLING))
            result = run(found, key)[key]
            if kind is Refused:
                assert result == failed(error="to the client: no such thing"), code
            elif kind is Busy:
                assert result == failed(error=f"the vllm server is busy: it answered {code}"), code
                assert result.error.retry_after is not None
            else:
                assert result == failed(error=f"the vllm server answered {code}"), code
                assert result.error.log.endswith(f"answered {code}: no such thing")
            assert type(status_error(code, "", connected=True)) is kind


def test_a_server_of_a_later_version_says_what_is_not_read(model: Path) -> None:
    later = b"\xba\x3e\x03new"  # field 999 of the message
    with listening() as server, engine(model, server) as found:
        end = server.complete("", None, [302], "length").SerializeToString()
        server.scripts = [[*(one.SerializeToString() + later for one in chunks(server, 301, 302)), end + later]]
        assert ask(found, Sampling(max_new_tokens=2, logprobs=False)) == ([301, 302], Finish.LENGTH, "")


def test_a_server_that_goes_after_an_answer_is_replaced_for_the_next(model: Path) -> None:
    with listening() as first, listening() as second, engine(model, first, second) as found:
        assert ask(found) == ANSWER
        (first if first.received else second).stop()
        assert ask(found, key=2) == ANSWER
        assert (len(first.received), len(second.received)) == (1, 1)


def test_loads_that_cannot_be_read_are_none(model: Path) -> None:
    with listening() as server, engine(model, server) as found:
        server.loads = b"\xff\xff"
        assert found.statistics() == EngineStatistics()


def test_loads_of_a_server_that_names_too_many_ranks_are_none(model: Path) -> None:
    with listening() as server, engine(model, server) as found:
        server.loads = [{}] * 1025
        assert found.statistics() == EngineStatistics()


def test_a_rule_that_ends_a_request_is_the_clients_own_fault(model: Path) -> None:
    status = Status(grpc.StatusCode.FAILED_PRECONDITION, "no such thing", (("smg-constraint-failed", "engine"),))
    with listening("sglang") as server, engine(model, server) as found:
        server.scripts = [[status]]
        assert ask(found) == failed(error="to the client: no such thing")


DRAWN = SAMPLING._replace(do_sample=True)
RULED = SAMPLING._replace(structured_output=StructuredOutput("choice", '["ab"]'))


@in_one_test(("settings", "sampling", "words"), [
    ({"speculative_algorithm": "EAGLE"}, DRAWN._replace(min_p=0.1), "min_p: the SGLang server was started with --spec"),
    ({"skip_tokenizer_init": True}, SAMPLING._replace(min_new_tokens=1), "min_tokens: the SGLang server was started"),
    ({"skip_tokenizer_init": True}, RULED, "structured output: the SGLang server was started with --skip-tokenizer"),
])  # fmt: skip
def test_what_sglang_ignores_because_of_its_flags_is_refused(
    model: Path, settings: dict[str, Any], sampling: Sampling, words: str
) -> None:
    with listening("sglang") as server:
        assert isinstance(server, SglangServer)
        server.arguments |= settings
        with engine(model, server) as found:
            assert ask(found, sampling).error.startswith(f"to the client: {words}")
            received = len(server.received)
            assert ask(found, SAMPLING._replace(min_p=0.1), key=2).finish is not None, "greedy decoding needs no min_p"
            assert len(server.received) == received + 1
            assert all(request.sampling_params.max_new_tokens == 1 for request in server.received[:-1]), "the probes"


def test_replicas_of_sglang_may_have_other_flags_and_older_ones_tell_none(model: Path) -> None:
    with listening("sglang") as first, listening("sglang") as second, listening("sglang") as old:
        assert isinstance(first, SglangServer)
        first.arguments["speculative_algorithm"] = "EAGLE"
        old.tells_rule_start = False
        with engine(model, first, second) as found:
            assert ask(found, SAMPLING).finish is not None
        with engine(model, old) as found:
            assert ask(found, DRAWN._replace(min_p=0.1)).finish is not None
            assert len(old.received) == 1


def test_a_repetition_penalty_by_grpc_needs_a_version_that_applies_it(model: Path) -> None:
    with listening("sglang") as server:
        assert isinstance(server, SglangServer)
        server.version = "0.5.9"
        with engine(model, server) as found:
            assert "SGLang before 0.5.10" in ask(found, SAMPLING._replace(repetition_penalty=1.5)).error
            assert not server.received


def test_a_structural_tag_by_grpc_needs_a_version_that_reads_it(model: Path) -> None:
    tag = StructuredOutput(
        "structural_tag", '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}'
    )
    with listening("sglang") as server:
        assert isinstance(server, SglangServer)
        server.version = "0.5.3"
        with engine(model, server) as found:
            assert "SGLang before 0.5.4" in ask(found, SAMPLING._replace(structured_output=tag)).error
            assert not any(request.sampling_params.structural_tag for request in server.received)


# -- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_loads_of_all_ranks_and_servers_are_one_report(model: Path, kind: str) -> None:
    with listening(kind) as first, listening(kind) as second:
        first.loads = [{"num_waiting_reqs": 3, "token_usage": 0.5}, {"num_waiting_reqs": 4, "token_usage": 2.0}]
        second.loads = [{"num_waiting_reqs": -1, "token_usage": -0.5}]
        with engine(model, first, second) as found:
            wanted = EngineStatistics() if kind == "trtllm" else EngineStatistics(7, 0.5)
            assert found.statistics() == wanted
            first.loads = second.loads = [{"num_waiting_reqs": 1, "token_usage": float("nan")}]
            assert found.statistics() == EngineStatistics()
            first.loads = second.loads = None
            assert found.statistics() == EngineStatistics()


def test_loads_are_asked_for_beside_answers_that_come(model: Path) -> None:
    with listening() as server, engine(model, server) as found:
        server.script = lambda id: [server.chunk(id, None, [301]), HANG]
        server.loads = [{"num_waiting_reqs": 5, "token_usage": 0.25}]
        found.add(EngineRequest(1, PROMPT, SAMPLING))

        def reported() -> bool:
            found.step()
            return found.statistics() == EngineStatistics(5, 0.25)

        wait_for(reported, PATIENCE, "no report comes")
        found.cancel(1)


def test_the_report_after_the_last_answer_is_of_a_server_at_rest(model: Path) -> None:
    with listening() as server, engine(model, server) as found:
        server.loads = [{"num_waiting_reqs": 5, "token_usage": 0.25}]
        assert found.statistics() == EngineStatistics(5, 0.25)
        assert ask(found) == ANSWER
        server.loads = [{"num_waiting_reqs": 0, "token_usage": 0.0}]
        assert found.statistics() == EngineStatistics(0, 0.0)


def test_who_waits_for_commands_sleeps(model: Path) -> None:
    """uvloop makes what it watches non-blocking: the engine's process would ask for commands without end."""
    ours, theirs = socket.socketpair()
    with ours, theirs, listening() as server, engine(model, server) as found:
        found.interrupt_on(ours.fileno())
        assert os.get_blocking(ours.fileno())


def test_a_command_is_not_kept_waiting_by_a_report(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LOADS_TIMEOUT", 5.0)
    ours, theirs = socket.socketpair()
    with ours, theirs, listening() as server, engine(model, server) as found:
        server.may_tell.clear()
        server.loads = [{"num_waiting_reqs": 5, "token_usage": 0.25}]
        found.interrupt_on(ours.fileno())
        theirs.send(b"a command")
        assert found.statistics() == EngineStatistics(), "the server may not tell yet"

        def asked() -> bool:
            found.complete(asyncio.sleep(0))
            return server.num_loads_asked == 1

        wait_for(asked, PATIENCE, "it was not asked")
        ours.recv(100)
        server.loads = [{"num_waiting_reqs": 0, "token_usage": 0.0}]
        server.may_tell.set()
        assert found.statistics() == EngineStatistics(0, 0.0), "an older question does not count"


# -- a server that the engine has started ----------------------------------------------------------------------------


def connected(found: GrpcEngine) -> bool:
    found.complete(asyncio.sleep(0))
    return any(one.connected for one in found._clients.values())


class Stays(OwnServer):
    """Stands for a server that the engine has started; `stranger` is at its port."""

    stranger: Failed | None = None

    def check_port(self) -> None:
        if self.stranger is not None:
            raise self.stranger


def test_only_an_own_server_that_is_silent_again_and_again_is_given_up(model: Path) -> None:
    with listening() as server, engine(model, server, timeout=1.0) as found:
        server.script = lambda id: [Status(grpc.StatusCode.INTERNAL, "down")]
        found._own = Stays("grpc", "x", [], {})
        for key in range(1, 6):
            assert ask(found, key=key) == failed(error="the vllm server answered INTERNAL")
        server.script = None
        assert ask(found, key=6) == ANSWER
        server.script = lambda id: [HANG]
        silent = r"sent no token for 1 s"
        for key in (7, 8):
            assert re.search(silent, ask(found, key=key).error)
        with pytest.raises(RuntimeError, match=rf"the server of option\.engine_python {silent}"):
            ask(found, key=9)


class Dies(Stays):
    """A server that is killed: it closes its connections before its status can be read."""

    num_looks = 0

    def failure(self) -> str:
        self.num_looks += 1
        return "was killed" if self.num_looks > 3 else ""


def test_a_request_does_not_fail_before_its_own_server_has_ended(model: Path) -> None:
    with listening() as server, engine(model, server) as found:
        assert ask(found) == ANSWER
        own = found._own = Dies("grpc", "x", [], {})
        server.stop()
        with pytest.raises(OwnServerLost, match=r"^the server of option\.engine_python was killed$"):
            ask(found, key=2)
        assert own.num_looks > 3


def test_a_stranger_at_the_port_after_the_start_gets_no_request(model: Path) -> None:
    with listening() as server, engine(model, server) as found:
        own = found._own = Stays("grpc", "x", [], {})
        assert ask(found) == ANSWER
        own.stranger = Lost("shares its port")
        server.stop()
        server.start()
        wait_for(lambda: not connected(found), PATIENCE, "it stays connected")
        assert found.statistics() == EngineStatistics(), "a report makes no connection"
        with pytest.raises(RuntimeError, match="shares its port"):
            ask(found, key=2)
        assert len(server.received) == 1


# -- the start -------------------------------------------------------------------------------------------------------


@in_one_test(
    ("change", "words"),
    [
        ({"vocab_size": 7}, "uses another tokenizer: it has 7 ids"),
        ({"eos_token_ids": [77]}, "uses another tokenizer: its responses end with [77]"),
        ({"is_generation": False}, "serves a model that computes embeddings"),
    ],
)
def test_a_model_that_is_not_ours_is_refused_at_the_start(model: Path, change: dict[str, Any], words: str) -> None:
    with listening() as server:
        server.model |= change
        with pytest.raises(ConfigError) as raised, engine(model, server):
            pass
        assert words in str(raised.value)


@pytest.mark.parametrize("kind", ["sglang", "trtllm"])
def test_a_negative_context_is_none(model: Path, kind: str) -> None:
    with listening(kind) as server:
        limits = ("max_seq_len",) if kind == "trtllm" else ("max_context_length", "max_req_input_len")
        server.model |= dict.fromkeys(limits, -5)
        with pytest.raises(ConfigError, match="does not report its maximum number of tokens"), engine(model, server):
            pass


@pytest.mark.parametrize(("context", "limit"), [(4096, 58), (64, 64), (64, 58), (64, 0)])
def test_sglangs_context_is_that_of_which_nothing_is_cut(model: Path, context: int, limit: int) -> None:
    """The Python servicer reports its KV cache and a limit for prompts, the one in Rust the context for both."""
    with listening("sglang") as server:
        server.model |= {"max_context_length": context, "max_req_input_len": limit}
        with engine(model, server) as found:
            assert found.info.max_total_tokens == 58


def test_another_tokenizer_of_tensorrt_llm_is_refused_at_the_start(model: Path) -> None:
    with listening("trtllm") as server:
        server.model["vocab_size"] = 7
        with pytest.raises(ConfigError, match="uses another tokenizer"), engine(model, server):
            pass


def test_a_broken_tokenizer_leaves_no_event_loop_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    new_loop = uvloop.new_event_loop
    loops: list[asyncio.AbstractEventLoop] = []

    def noted() -> asyncio.AbstractEventLoop:
        loops.append(new_loop())
        return loops[-1]

    monkeypatch.setattr(uvloop, "new_event_loop", noted)
    with pytest.raises(ConfigError, match="is not JSON"), engine(tmp_path, "grpc://127.0.0.1:1"):
        pass
    assert all(loop.is_closed() for loop in loops)


def test_another_contract_is_refused_at_the_start(model: Path) -> None:
    with (
        listening("sglang") as server,
        pytest.raises(ConfigError, match="answered UNIMPLEMENTED"),
        engine(model, server, base_url_kind="vllm"),
    ):
        pass


def test_tls_where_there_is_none_is_refused_at_the_start(model: Path) -> None:
    with listening() as server:
        url = server.url.replace("grpc:", "grpcs:")
        with pytest.raises(ConfigError, match="uses another protocol"), engine(model, url):
            pass


def test_a_server_of_another_protocol_is_refused_at_the_start(model: Path) -> None:
    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = web.accept()
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as web:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"grpc://127.0.0.1:{web.getsockname()[1]}"
        with pytest.raises(ConfigError, match="uses another protocol"), engine(model, url):
            pass
        web.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)


def test_servers_of_several_contracts_are_refused_by_name() -> None:
    find_contract.cache_clear()
    with listening("vllm") as first, listening("trtllm") as second:
        urls = first.url, second.url
        with pytest.raises(ConfigError, match=r"of different kinds: .*: vllm; .*: trtllm"):
            find_contract(urls)


def test_a_server_that_is_ill_waits_beside_a_good_one(model: Path) -> None:
    with listening() as ill, listening() as well:
        ill.health = {"healthy": False, "message": "Engine is not alive"}
        with engine(model, ill, well) as found:
            assert ask(found) == ANSWER
            assert not ill.received


def test_the_least_context_counts(model: Path) -> None:
    with listening() as first, listening() as second:
        second.model["max_context_length"] = 48
        with engine(model, first, second) as found:
            assert found.info.max_total_tokens == 48


# -- requests --------------------------------------------------------------------------------------------------------


def test_what_a_contract_cannot_do_is_refused() -> None:
    large = EngineRequest(1, [1] * 200_000, Sampling(prompt_logprobs=True))
    with pytest.raises(ValueError, match="prompt_logprobs: the values of 200000 tokens"):
        GrpcCall(CONTRACTS["vllm"], large, 460, frozenset())


STOP_RULES = {
    "TensorRT-LLM, ignore_eos": ("trtllm", {"ignore_eos": True}, [301, 2, 9]),
    "TensorRT-LLM, a minimum": ("trtllm", {"min_new_tokens": 4}, [301, 302, 9, 301, 302, 9]),
    "TensorRT-LLM, both": ("trtllm", {"ignore_eos": True, "min_new_tokens": 4}, [301, 2, 9, 301, 2, 9]),
    "SGLang, ignore_eos": ("sglang", {"ignore_eos": True}, [301, 2, 9]),
    "SGLang, both": ("sglang", {"ignore_eos": True, "min_new_tokens": 4}, [301, 2, 9, 301, 2, 9]),
}


@in_one_test(("kind", "more", "ids"), STOP_RULES.values(), ids=STOP_RULES)
def test_stop_tokens_that_a_server_would_miss_end_an_answer(
    model: Path, kind: str, more: dict[str, Any], ids: list[int]
) -> None:
    with listening(kind) as server, engine(model, server) as found:
        sampling = Sampling(max_new_tokens=40, top_logprobs=2, stop_token_ids=(9,), **more)
        got = outputs(found, sampling, ids[:3])
        assert (got["ids"], got["finish"], got["error"]) == (ids, [Finish.STOP], [None])
        assert len(got["logprobs"]) == len(got["tops"]) == len(ids)
        assert ask(found, key=2) == ANSWER


def test_the_server_is_told_of_a_stop_token_that_it_would_miss(model: Path) -> None:
    with listening("trtllm") as server, engine(model, server) as found:
        server.script = lambda id: [server.chunk(id, None, [301, 9, 302]), HANG]
        found.add(EngineRequest(1, PROMPT, SAMPLING._replace(ignore_eos=True)))
        assert run(found, 1)[1] == ([301, 9], Finish.STOP, "")
        assert server.left.acquire(timeout=PATIENCE), "it generates for nobody"


# -- what a server's flags change --------------------------------------------------------------------------------------


RULE = StructuredOutput("choice", '["ab"]')
RULED = Sampling(max_new_tokens=2, structured_output=RULE)
OBEYED = ([ord("a"), ord("b")], Finish.LENGTH, "")
FLAGS = {
    "none": ({}, True),
    "an older servicer": ({"tells_rule_start": False}, True),
    "a reasoning parser": ({"rule_start": "after_reasoning"}, False),
    "a reasoning parser, untold": ({"rule_start": "after_reasoning", "tells_rule_start": False}, False),
    "a reasoning parser, heeding": ({"rule_start": "after_reasoning", "heeds_first_token": True}, True),
}


@in_one_test(("flags", "obeys"), FLAGS.values(), ids=FLAGS)
def test_structured_output_is_enforced_or_refused_whatever_vllms_flags(
    model: Path, flags: dict[str, Any], obeys: bool
) -> None:
    with listening("vllm") as server:
        vars(server).update(flags)
        with engine(model, server) as found:
            result = ask(found, RULED)
            if obeys:
                assert result == OBEYED
            else:
                assert result.finish is Finish.ERROR
                assert "to the client: the vllm server does not enforce structured output" in result.error
                assert "--reasoning-parser" in result.error
            found.add(EngineRequest(2, [301, THOUGHT_END], RULED))
            assert run(found, 2)[2] == OBEYED, "the thought has ended in the prompt"
            assert ask(found, key=3) == ANSWER


@pytest.mark.parametrize("kind", KINDS)
def test_end_tokens_that_a_server_does_not_know_end_an_answer(kind: str, model: Path) -> None:
    """Those of option.generation_config, and those that vLLM leaves out with --generation-config vllm."""
    ending = tiny.EOS[-1]
    with listening(kind) as server, engine(model, server) as found:
        server.eos = frozenset({tiny.EOS[0]})

        def answer(**more: Any) -> Result:
            found.add(EngineRequest(1, [301, ending], Sampling(max_new_tokens=9, logprobs=False, **more)))
            return run(found, 1)[1]

        assert answer() == ([301, ending], Finish.EOS, "")
        assert answer(ignore_eos=True) == ([301, ending] * 4 + [301], Finish.LENGTH, "")
        late = answer(min_new_tokens=3)
        assert (late.ids[-1], len(late.ids), late.finish) == (ending, 4, Finish.EOS)


@in_one_test("value", [302, [302, -1], -1], ids=["another", "several", "none"])
def test_generation_config_replaces_the_end_token_of_config_json(value: Any, model: Path) -> None:
    """vLLM reports that of config.json nevertheless."""
    with tempfile.TemporaryDirectory() as directory:
        own = Path(shutil.copytree(model, Path(directory, "own")))
        config = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps({**config, "eos_token_id": value}))
        with listening("vllm") as server:
            server.model |= {"eos_token_ids": [302]} if value != -1 else {}
            with engine(own, server) as found:
                assert ask(found) == ANSWER


def test_a_server_that_tells_its_flags_is_asked_only_if_it_has_to_be(model: Path) -> None:
    with listening("vllm") as server, engine(model, server) as found:
        assert ask(found, RULED) == OBEYED
        assert len(server.received) == 1


def test_a_server_restarted_with_other_flags_is_asked_again(model: Path) -> None:
    with listening("vllm") as server, engine(model, server) as found:
        assert ask(found, RULED) == OBEYED
        server.stop()
        server.rule_start = "after_reasoning"
        server.start()
        assert "does not enforce" in ask(found, RULED, key=2).error


def test_tags_that_allow_text_wait_for_the_thoughts_end(model: Path) -> None:
    tag = StructuredOutput("structural_tag", "{}", allows_text=True)
    thinking = Sampling(max_new_tokens=2, structured_output=tag, thoughts=Thoughts(("<think>",), ("</think>",), True))
    with listening("vllm") as server:
        server.rule_start = "after_reasoning"
        with engine(model, server) as found:
            assert ask(found, thinking).finish is Finish.LENGTH
            assert "does not enforce" in ask(found, thinking._replace(thoughts=None), key=2).error


def test_tensorrt_llm_without_guided_decoding_is_found_out(model: Path) -> None:
    with listening("trtllm") as server:
        server.rule_start = "never"
        with engine(model, server) as found:
            assert "guided_decoding_backend" in ask(found, RULED).error
            assert ask(found, key=2) == ANSWER


@pytest.mark.parametrize("kind", KINDS)
def test_every_contract_takes_structural_tags(kind: str, model: Path) -> None:
    tag = StructuredOutput("structural_tag", '{"type": "structural_tag", "format": {}}')
    with listening(kind) as server, engine(model, server) as found:
        assert ask(found, Sampling(max_new_tokens=2, structured_output=tag)).ids == [ord("{"), ord('"')]
        assert server.rule(server.received[-1]) == tag.value


def test_a_large_seed_is_folded_and_never_none() -> None:
    seeds = [0, 1, 2**31 - 1, 2**31, 2**53, 2**64 - 1]
    sent = [CONTRACTS["vllm"].request("", [1], Sampling(do_sample=True, seed=seed)).sampling_params for seed in seeds]
    assert [one.seed for one in sent[:3]] == seeds[:3]
    assert all(one.HasField("seed") and one.seed >= 0 for one in sent)


def test_equal_requests_to_tensorrt_llm_get_answers_of_their_own(model: Path) -> None:
    """The server's default seed is 0 for all requests; the copies of a request with `n` are requests, too."""
    drawn = Sampling(max_new_tokens=8, do_sample=True)
    with listening("trtllm") as server, engine(model, server) as found:
        for key in range(4):
            ask(found, drawn, key=key + 1)
        seeds = [request.sampling_config.seed for request in server.received[-4:]]
        assert len(set(seeds)) == 4
        chosen = [ask(found, drawn._replace(seed=seed), key=10 + seed).ids for seed in (3, 3, 4, 5, 6)]
        assert chosen[0] == chosen[1]
        assert len({tuple(ids) for ids in chosen}) > 1
        ask(found, drawn._replace(seed=2**64 - 1), key=20)
        assert server.received[-1].sampling_config.seed == 2**64 - 1


def test_the_models_defaults_do_not_replace_what_tensorrt_llm_is_sent(model: Path) -> None:
    with listening("trtllm") as server, engine(model, server) as found:
        assert isinstance(server, TrtLlmServer)
        server.of_the_model = {"min_p": 0.5, "no_repeat_ngram_size": 2, "top_k": 7, "top_p": 0.5, "temperature": 0.1}
        ask(found, Sampling(max_new_tokens=2, do_sample=True))
        config = server.received[-1].sampling_config
        assert (config.min_p, config.no_repeat_ngram_size, config.top_k) == (0, 0, 0)
        assert (config.top_p, config.temperature) == (1, 1)
        ask(found, Sampling(max_new_tokens=2), key=2)
        config = server.received[-1].sampling_config
        assert (config.top_k, config.no_repeat_ngram_size) == (1, 0)
