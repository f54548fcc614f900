"""64 clients at once before a llama-server of the engine's own, which is killed while it streams."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import load_tokenizer
from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.engines.llamacpp.pieces import Pieces
from tests import process_tree
from tests.checkpoints import architectures
from tests.checkpoints.lora_gguf import write_lora
from tests.doubles import tiny
from tests.llamacpp.test_architectures import CLEAR, Case, differences
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.real import RealServer
from tests.process.engines.llamacpp.test_llamacpp import REAL, own, pieces_of
from tests.servers import ANSWER_LIMIT, ServerProcess, options, serve, wait_for

pytestmark = [REAL, pytest.mark.long, pytest.mark.timeout(600)]

NUM_CLIENTS, NUM_KILLS, NUM_TOKENS = 64, 3, 24
ADAPTERS = ("poem", "sql", "tale")
PATH = "/v1/completions"
NUM_SLOTS = 8
DEATH = "engine failure: llama-server was killed, perhaps because the machine has too little memory"
"""What clients get when llama-server is killed after their first tokens."""


class Question(NamedTuple):
    """What a client asks.

    Attributes:
        adapter: the name of a LoRA adapter; "" for the model itself.
    """

    text: str
    adapter: str


class Received(NamedTuple):
    """What a client has received of a response.

    Attributes:
        error: the message of an error; "" if there was none.
        ended: whether the response has ended; False if the client left.
    """

    text: str
    error: str
    ended: bool


@pytest.fixture(scope="module", params=["gpt2", "mamba", "stablelm with adapters"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, _, more = request.param.partition(" ")
    directory = architectures.make(tmp_path_factory.mktemp(name), name)
    if more:
        (directory / "adapters").mkdir()
        for seed, adapter in enumerate(ADAPTERS):
            write_lora(directory / "adapters" / f"{adapter}.gguf", seed, name, architectures.SIZE)
    return directory


def adapters_of(model: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(model.glob("adapters/*.gguf"))}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[Question, str]:
    """Questions with different and clear responses of llama-server itself, asked one after the other.

    A server of its own answers those to each adapter. Many texts are asked of several adapters.
    """
    adapters, found = adapters_of(model), dict[Question, str]()
    for name in ("", *adapters):
        flags = ("--lora", str(adapters[name])) if name else ()
        with real.running(model / "model.gguf", pieces_of(model), 8, *real.EXACT, *flags) as plain:
            clear = clear_questions(plain, model, name, {*found.values()})
            found |= itertools.islice(clear, NUM_CLIENTS // (1 + len(adapters)))
    assert len(found) == NUM_CLIENTS, f"only {len(found)} prompts have clear responses"
    if adapters:
        assert len({question.text for question in found}) < NUM_CLIENTS * 3 / 4
    return found


def clear_questions(
    server: RealServer, model: Path, adapter: str, other: Collection[str]
) -> Iterator[tuple[Question, str]]:
    """Yield questions and their responses, which differ from each other and from others."""
    tokenizer, known = load_tokenizer(EngineConfig(model=model)), {*other}
    for number in range(8 * NUM_CLIENTS):
        text = f"{number} times the town of {number * number}"
        prompt = list(tokenizer.encode(text).ids)
        case = Case(prompt, own(server, prompt, n_predict=NUM_TOKENS, n_probs=2, cache_prompt=False))
        response = readable(tokenizer, case.ids)
        if len(response) > 8 and response not in known and min(differences(server, case)) >= CLEAR:
            known.add(response)
            yield Question(text, adapter), response


def readable(tokenizer: HfTokenizer, ids: list[int]) -> str:
    """Return the text, or "" if a token of it has no text, or if its first or last token ends within a character."""
    assert tokenizer.vocabulary is not None
    text = ids[:-1] if ids[-1] in tiny.EOS else ids
    special = any(id < len(tiny.SPECIAL) for id in text)
    if not text or special:
        return ""
    incomplete = Pieces(tokenizer.vocabulary.pieces).incomplete(text)
    if incomplete[0] or incomplete[-1]:
        return ""
    return tokenizer.vocabulary.decode(text)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    own_options = options(
        f"option.llama_server={real.PROGRAM}",
        "option.llama_server_args=-t 1",
        f"option.max_rolling_batch_size={NUM_SLOTS}",
        "option.max_model_len=512",
        "option.enable_lora=true",
    )
    with serve(str(model / "model.gguf"), "--engine", "llamacpp", *own_options) as found:
        found.wait_ready()
        yield found
        found.stop()
        wait_for(lambda: not of_model(model), 30, "llama-server outlives the server")


def of_model(model: Path) -> list[int]:
    """The processes that have a model's file among their arguments."""
    found = process_tree.descendants(1)
    return [pid for pid, command in found.items() if str(model) in command]


def body(question: Question) -> dict[str, Any]:
    named = {"model": question.adapter} if question.adapter else {}
    return {"prompt": question.text, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True, **named}


receiving: dict[int, bool] = {}
"""Maps each client's thread to whether it is receiving a response, of which it has some tokens."""


def ask(server: ServerProcess, question: Question, leave_after: float = math.inf) -> Received:
    """Stream a response, and leave after a number of events."""
    received, count, request = "", 0, body(question)
    with (
        httpx.Client(timeout=ANSWER_LIMIT, trust_env=False) as client,
        client.stream("POST", server.url + PATH, json=request) as response,
    ):
        if response.status_code != 200:
            return Received("", json.loads(response.read())["error"]["message"], True)
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data in ("", ":"):
                continue
            if data == "[DONE]":
                receiving[threading.get_ident()] = False
                return Received(received, "", True)
            event = json.loads(data)
            if "error" in event:
                receiving[threading.get_ident()] = False
                return Received(received, event["error"]["message"], True)
            received += event["choices"][0]["text"]
            count += 1
            receiving[threading.get_ident()] = count < leave_after
            if count >= leave_after:
                return Received(received, "", False)
    return Received(received, "the stream ended early", True)


def clients(
    server: ServerProcess, expected: dict[Question, str], rounds: Iterable[int]
) -> Iterator[tuple[Question, Received]]:
    """Ask each question twice in each round, 64 at once. A quarter of the clients leave amid their responses."""
    draw = random.Random(4)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for _ in rounds:
            asked = draw.sample([*expected] * 2, 2 * len(expected))
            leave = [draw.randrange(1, NUM_TOKENS) if draw.random() < 0.25 else math.inf for _ in asked]
            answers = pool.map(lambda given: ask(server, *given), zip(asked, leave, strict=True))
            yield from zip(asked, answers, strict=True)


def is_free(server: ServerProcess) -> bool:
    return server.metric("lmi_active_sequences") == 0 == server.metric("lmi_queued_requests")


def llama_server(server: ServerProcess) -> Sequence[int]:
    found = process_tree.descendants(server.process.pid)
    return [pid for pid, command in found.items() if command.startswith(str(real.PROGRAM))]


def is_replaced(server: ServerProcess, pid: int) -> bool:
    """Whether another llama-server runs in place of one that was killed."""
    return len(found := llama_server(server)) == 1 and pid not in found


def test_each_client_gets_its_own_response(server: ServerProcess, expected: dict[Question, str]) -> None:
    num_whole = 0
    for question, received in clients(server, expected, range(1)):
        assert not received.error, received
        assert expected[question].startswith(received.text)
        if received.ended:
            assert received.text == expected[question]
            num_whole += 1
    assert num_whole > NUM_CLIENTS
    wait_for(lambda: is_free(server), 30, "slots are busy")


def test_kills_of_llama_server_fail_only_what_it_computes(
    server: ServerProcess, expected: dict[Question, str], model: Path
) -> None:
    num_kills, num_receiving = (1, 1) if adapters_of(model) else (NUM_KILLS, NUM_SLOTS // 2)  # adapters take turns
    ended, may_kill, num_killed = threading.Event(), threading.Event(), 0
    outcomes = Counter[str]()

    def rounds() -> Iterator[int]:
        """Yield until enough servers are killed. A request continues only once, so there is one kill in a round."""
        for number in range(100):
            if num_killed >= num_kills and outcomes[DEATH]:
                return
            may_kill.set()
            yield number

    def kill() -> None:
        nonlocal num_killed
        while not ended.wait(0.005):
            pids = llama_server(server)
            if may_kill.is_set() and len(pids) == 1 and sum(receiving.values()) >= num_receiving:
                may_kill.clear()
                os.kill(pids[0], signal.SIGKILL)
                num_killed += 1
                wait_for(functools.partial(is_replaced, server, pids[0]), 60, "it is not started again")

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for question, received in clients(server, expected, rounds()):
            assert expected[question].startswith(received.text), (question, received)
            assert received.text or not received.error, "a request without a token is computed by the next server"
            if received.ended and not received.error:
                assert received.text == expected[question]
            outcomes[received.error or ("whole" if received.ended else "left")] += 1
    finally:
        ended.set()
        killer.join()
    print(num_killed, outcomes)
    assert num_killed >= num_kills
    assert outcomes["whole"] > NUM_CLIENTS
    assert outcomes.keys() == {"whole", "left", DEATH}
    assert outcomes[DEATH] <= num_killed * NUM_SLOTS
    wait_for(lambda: server.ping() == 200, 60, "the server is not ready")
    for question in [*expected][::8]:
        assert ask(server, question) == Received(expected[question], "", True)
    wait_for(lambda: is_free(server), 30, "slots are busy")
    assert len(llama_server(server)) == 1
