"""Every dialect in front of an SGLang server, through its own API."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.app.dialects.test_every_dialect import DIALECTS, STREAMS, answered, completion, lines, said
from tests.app.server import AppServer, serve
from tests.doubles import tiny
from tests.doubles.sglang_server import NEVER, SglangServer, best, listening, score
from tests.one_test import in_one_test
from tests.servers import http, options, wait_for

WORDS = "Paris is the capital of France and Rome the capital of Italy"
CLIENTS = 64


@pytest.fixture(scope="module")
def sglang() -> Iterator[SglangServer]:
    settings = {"context": tiny.CONTEXT, "max_running": 24, "disconnect_seconds": NEVER, "certain": True}
    with listening(**settings) as server:
        yield server


@pytest.fixture(scope="module")
def front(sglang: SglangServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    model = tiny.make(tmp_path_factory.mktemp("tiny"))
    own = options(f"option.base_url={sglang.url}", "option.chat_template={{ messages[0]['content'] }}")
    with serve(str(model), "--engine", "openai", *own) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(str(tiny.make(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"))


@in_one_test("stream", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("incremental", [False, True])
def test_every_dialect_gets_the_tokens_of_its_prompt(
    sglang: SglangServer, front: AppServer, tokenizer: Tokenizer, incremental: bool, name: str, stream: bool
) -> None:
    if stream and name not in STREAMS:
        return
    sglang.incremental = incremental
    ids = tokenizer.encode(WORDS).ids
    assert answered(front, DIALECTS[name], WORDS, len(ids) + 3, stream=stream) == WORDS + tokenizer.decode(ids[:3])
    assert sglang.received[-1].body["input_ids"] == ids


def test_log_probabilities_and_samples_arrive(sglang: SglangServer, front: AppServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(WORDS).ids
    body = {**completion(WORDS, 4), "logprobs": 2, "n": 2, "temperature": 0}
    choices = front.post(body, "/v1/completions").json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[score(id) for id in ids[:4]]] * 2
    likeliest = [[value for _, value in best(id, 2)] for id in ids[:4]]
    assert [[*tops.values()] for tops in choices[0]["logprobs"]["top_logprobs"]] == likeliest


def test_a_seed_is_refused_by_name_in_each_api(front: AppServer) -> None:
    for name in ("openai chat", "openai completions", "lmi", "tgi generate"):
        dialect = DIALECTS[name]
        body = dialect.body("a", 2)
        drawn = {"seed": 7, "temperature": 0.5}
        body = {**body, **drawn} if "parameters" not in body else {
            **body, "parameters": {**body["parameters"], **drawn, "do_sample": True}
        }  # fmt: skip
        found = front.post(body, dialect.path)
        assert found.status_code in (400, 422, 424)
        assert "seed: the SGLang server was started without --enable-deterministic-inference" in found.text


def test_a_stop_string_ends_the_request_at_the_server(sglang: SglangServer, front: AppServer) -> None:
    sglang.pace = 0.01
    try:
        body = {**completion(WORDS, 500), "stop": ["Rome"]}
        assert front.post(body, "/v1/completions").json()["choices"][0]["text"] == "Paris is the capital of France and "
        wait_for(lambda: not sglang.running, 5, "it goes on although nobody listens")
    finally:
        sglang.pace = 0.0


def test_clients_that_leave_free_their_slots(sglang: SglangServer, front: AppServer) -> None:
    sglang.pace = 0.02
    try:
        for name in ("openai chat", "lmi"):
            dialect = STREAMS[name]
            body = {**dialect.body(WORDS, 1000), "stream": True}
            with http.stream("POST", front.url + dialect.path, json=body, timeout=60) as found:
                assert any(said(json.loads(line)) for line in lines(found))
                assert sglang.running
            wait_for(lambda: not sglang.running, 2, "the slot is held")
    finally:
        sglang.pace = 0.0


@pytest.mark.parametrize("incremental", [False, True])
def test_crossed_clients_get_their_own_text(
    sglang: SglangServer, front: AppServer, tokenizer: Tokenizer, incremental: bool
) -> None:
    """64 clients at once with two requests each, of which some leave amid."""
    sglang.incremental, sglang.pace, sglang.most_running = incremental, 0.002, 0
    left, lock = 0, threading.Lock()

    def client(number: int) -> None:
        nonlocal left
        draw = random.Random(number)
        for turn in range(2):
            text = f"client {number} says {draw.randrange(1000)} in turn {turn} and "
            ids = tokenizer.encode(text).ids
            whole, leaves = tokenizer.decode((ids * 4)[:40]), draw.random() < 0.4
            body = {**completion(text, 40), "stream": True}
            got = ""
            with http.stream("POST", front.url + "/v1/completions", json=body, timeout=60) as found:
                assert found.status_code == 200
                for line in lines(found):
                    got += said(json.loads(line))
                    if leaves and len(got) > 20:
                        break
            assert whole.startswith(got)
            assert leaves or got == whole
            with lock:
                left += leaves

    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(client, number) for number in range(CLIENTS)]:
                done.result()
        wait_for(lambda: not sglang.running and not sglang._states, 5, "slots are held")
    finally:
        sglang.pace = 0.0
    assert left > CLIENTS / 4
    assert sglang.most_running == 24, "all slots were in use"


def test_a_decision_reads_all_labels_by_one_request(sglang: SglangServer, front: AppServer) -> None:
    before = len(sglang.received)
    questions = {"which": {"type": "choice", "instructions": "Which?", "criteria": dict.fromkeys("abc")}}
    found = front.post({"state": WORDS, "questions": questions}, "/v1/systemone")
    assert found.status_code == 200, found.text
    assert len(sglang.received) == before + 1
    assert len(sglang.received[-1].body["token_ids_logprob"]) == 3


def test_a_server_that_was_restarted_with_other_flags_is_used(sglang: SglangServer, front: AppServer) -> None:
    for incremental in (True, False, True):
        sglang.incremental = incremental
        began = time.monotonic()
        assert front.post(completion("a b", 2), "/v1/completions").json()["choices"][0]["text"]
        assert time.monotonic() - began < 5


@pytest.fixture
def adapters(sglang: SglangServer, tmp_path: Path) -> Iterator[AppServer]:
    sglang.files, sglang.adapters, sglang.roots = {"/adapters/sql": 1, "/etc/x": 2}, {"german": 3}, {}
    model = tiny.make(tmp_path / "tiny")
    own = options(f"option.base_url={sglang.url}", "option.chat_template={{ messages[0]['content'] }}")
    own += options("option.enable_lora=true", "option.adapters_root=/adapters")
    with serve(str(model), "--engine", "openai", *own) as server:
        server.wait_ready()
        yield server


def test_adapters_are_registered_used_and_unregistered(
    sglang: SglangServer, adapters: AppServer, tokenizer: Tokenizer
) -> None:
    def call(method: str, path: str = "", **query: str) -> str:
        return http.request(method, f"{adapters.url}/adapters{path}", params=query).text

    def text(name: str) -> str:
        found = adapters.post({**completion(WORDS, 4), "model": name, "temperature": 0}, "/v1/completions")
        return str(found.json()["choices"][0]["text"]) if found.status_code == 200 else found.text

    def shifted(by: int) -> str:
        return tokenizer.decode([id + by for id in tokenizer.encode(WORDS).ids[:4]])

    assert text("german") == shifted(3)
    assert "registered" in call("POST", name="sql", src="/adapters/sql")
    assert text("sql") == shifted(1)
    body = {"inputs": WORDS, "parameters": {"max_new_tokens": 4}, "adapters": ["sql"]}
    assert adapters.post(body, "/invocations").json()["generated_text"] == shifted(1)
    assert "from /adapters/sql again: set src to another adapter" in call("POST", "/sql/update")
    assert "option.adapters_root" in call("POST", name="x", src="/etc/x")
    assert "unregistered" in call("DELETE", "/sql")
    wait_for(lambda: [*sglang.adapters] == ["german"], 5, "it is not unloaded")
    assert "sql" in text("sql"), "the model does not exist"
