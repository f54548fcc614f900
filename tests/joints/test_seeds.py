"""Seeds from a client's body to what an engine is sent: only those that the client sent or that the answer reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Delta, Finish, Request
from handler.engines.base import EngineRequest, Output, Step
from handler.engines.grpc.client import CONTRACTS
from handler.engines.openai.completions import KINDS
from handler.engines.openai.sglang.api import generate
from handler.engines.trtllm.sampling import ModelProperties
from handler.engines.trtllm.sampling import sampling_arguments as trtllm_arguments
from handler.engines.vllm.sampling import sampling_arguments as vllm_arguments
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.registry import INVOCATIONS, ROOTS, ROUTES
from handler.scheduler.batcher import Batcher
from handler.scheduler.engine import ReasoningEngine

LETTERS = Vocabulary([bytes([code]) for code in range(128)])
CONTEXT = ServerContext("vllm", vocabulary=LETTERS, most_tokens=lambda: 100)
CHAT = {"messages": [{"role": "user", "content": "a"}]}
DRAWN = {"do_sample": True, "max_new_tokens": 2}
Body = dict[str, Any]


def body(**parameters: Any) -> Body:
    return {"inputs": "a", "parameters": {**DRAWN, **parameters}}


SILENT: dict[str, tuple[Dialect, Body]] = {
    "LMI": (INVOCATIONS["lmi"], body()),
    "LMI, details": (INVOCATIONS["lmi"], body(details=True)),
    "LMI, samples": (INVOCATIONS["lmi"], body(n=2, best_of=2)),
    "dynamic batch": (INVOCATIONS["dynamic_batch"], body()),
    "async": (INVOCATIONS["lmi_async"], {"inputs": "a", "parameters": {"temperature": 1}}),
    "TGI": (ROUTES["/generate"], body()),
    "TGI, stream": (ROUTES["/generate_stream"], body()),
    "TGI, best_of": (ROUTES["/generate"], body(best_of=2)),
    "TGI_COMPAT": (INVOCATIONS["tgi_compat"], body(details=False)),
    "MindIE": (ROOTS["mindie"], body()),
    "chat": (ROUTES["/v1/chat/completions"], {**CHAT, "n": 2}),
    "completion": (ROUTES["/v1/completions"], {"prompt": "a"}),
    "messages": (ROUTES["/v1/messages"], {**CHAT, "max_tokens": 2}),
    "responses": (ROUTES["/v1/responses"], {"input": "a"}),
    "Triton": (ROUTES["/v2/models/{model}/generate"], {"text_input": "a", "max_tokens": 2, "top_k": 5}),
}
"""Requests that sample, and whose answers report no seed."""

REPORTING: dict[str, tuple[Dialect, Body]] = {
    "TGI": (ROUTES["/generate"], body(details=True)),
    "TGI, stream": (ROUTES["/generate_stream"], body(details=True)),
    "TGI, prefill": (ROUTES["/generate"], body(decoder_input_details=True)),
    "TGI, best_of": (ROUTES["/generate"], body(details=True, best_of=2)),
    "TGI_COMPAT": (INVOCATIONS["tgi_compat"], body()),
    "MindIE": (ROOTS["mindie"], body(details=True)),
}


class Recording:
    """An engine that answers "a", and records what it is sent."""

    ready = True

    def __init__(self) -> None:
        self.sent: list[EngineRequest] = []
        self._new: list[int] = []

    def admits(self, request: Request, prompt: Prompt) -> bool:
        return True

    def continues(self, key: int) -> bool:
        return True

    def add(self, request: EngineRequest) -> None:
        self.sent.append(request)
        self._new.append(request.key)

    def cancel(self, key: int) -> None: ...

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None: ...

    def step(self, timeout: float = 0.0) -> list[Step]:
        outputs = [Output(key, (97,), (-0.5,), Finish.LENGTH) for key in self._new]
        self._new.clear()
        return [Step([], [], [], outputs)]


def run(dialect: Dialect, asked: Body, context: ServerContext = CONTEXT) -> tuple[list[EngineRequest], bytes]:
    """Return the engine's requests, and the answer."""
    engine = Recording()
    batcher = Batcher(ReasoningEngine(engine, LETTERS))
    parsed = dialect.parse(asked, context)
    ids = {}
    for index, request in enumerate(parsed.requests):
        ids[batcher.submit(request, Prompt("a", [97], LETTERS))] = index
        parsed.reply.start(index, 1)
    answer = b"".join(parsed.reply.feed(ids[delta.id], delta) for delta in deltas(batcher))
    return engine.sent, answer


def deltas(batcher: Batcher) -> Iterator[Delta]:
    while not batcher.idle:
        yield from batcher.step()


@pytest.mark.parametrize("name", SILENT)
def test_no_engine_is_sent_a_seed_that_nobody_asked_for(name: str) -> None:
    sent, _ = run(*SILENT[name])
    for request in sent:
        sampling = request.sampling
        assert sampling.do_sample
        assert vllm_arguments(sampling)["seed"] is None
        for body in (generate, *(kind.body for kind in KINDS.values())):
            assert "seed" not in body("m", [97], sampling)
        assert not CONTRACTS["vllm"].request("", [97], sampling).sampling_params.HasField("seed")


@pytest.mark.parametrize("name", REPORTING)
def test_a_seed_in_the_answer_is_the_one_that_the_engine_was_sent(name: str) -> None:
    dialect, asked = REPORTING[name]
    sent, answer = run(dialect, asked)
    seeds = [request.sampling.seed for request in sent]
    assert None not in seeds
    assert len({*seeds}) == len(seeds)
    for seed in seeds:
        assert f'"seed":{seed}' in answer.decode()
    assert run(dialect, asked)[0][0].sampling.seed != seeds[0]


@pytest.mark.parametrize("name", [name for name in REPORTING if name != "MindIE"])  # whose seed is always a number
def test_an_engine_without_seeds_has_none_in_its_answers(name: str) -> None:
    context = ServerContext("grpc", unsupported={"seed": "no field"}, vocabulary=LETTERS, most_tokens=lambda: 100)
    sent, answer = run(*REPORTING[name], context)
    assert {request.sampling.seed for request in sent} == {None}
    assert '"seed":null' in answer.decode()


def test_a_client_s_seed_reaches_the_engine() -> None:
    sent, _ = run(ROUTES["/v1/completions"], {"prompt": "a", "n": 2, "seed": 7})
    assert [KINDS["vllm"].body("m", [97], request.sampling)["seed"] for request in sent] == [7, 8]


@pytest.mark.parametrize("torch_sampler", [True, False])
def test_engines_with_a_constant_default_seed_draw_one_for_each_request(torch_sampler: bool) -> None:
    sent, _ = run(*SILENT["chat"])
    model = ModelProperties(128, frozenset({3}), 3, torch_sampler=torch_sampler)
    seeds = [trtllm_arguments(request.sampling, model)["seed"] for request in sent]
    assert len({*seeds}) == 2
