"""Log-probabilities from a client's body to the engine: asked for if the response depends on them, and only then."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from unittest import mock

import pytest

from handler.config.loader import read_config
from handler.core.framing import dumps
from handler.plugins.functions import Formatters, OutputFormatter, Style
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.registry import INVOCATIONS, ROOTS, ROUTES
from handler.scheduler.batcher import Batcher
from handler.serving import preprocessor
from handler.serving.head import Head
from handler.serving.model import ServedModel
from handler.serving.request.task import RequestTask
from handler.serving.start import load_model
from tests.services import load_echo

CHAT = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
GENERATE, TRITON = ROUTES["/generate"], ROUTES["/v2/models/{model}/generate"]


def body(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "a b", "parameters": {"max_new_tokens": 2, **parameters}}


UNSHOWN: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "LMI": (INVOCATIONS["lmi"], body()),
    "TGI_COMPAT": (INVOCATIONS["tgi_compat"], body(details=False)),
    "async": (INVOCATIONS["lmi_async"], body()),
    "dynamic batch": (INVOCATIONS["dynamic_batch"], body()),
    "TGI": (GENERATE, body()),
    "MindIE": (ROOTS["mindie"], body()),
    "MindIE, details": (ROOTS["mindie"], body(details=True, seed=1)),
    "MindIE, stream": (ROOTS["mindie"], {**body(), "stream": True}),
    "chat": (ROUTES["/v1/chat/completions"], CHAT),
    "completion": (ROUTES["/v1/completions"], {"prompt": "a b", "max_tokens": 2}),
    "messages": (ROUTES["/v1/messages"], CHAT),
    "prompt only": (ROUTES["/v1/messages"], {**CHAT, "max_tokens": 0}),
    "Triton": (TRITON, {"text_input": "a b", "max_tokens": 2}),
}
SHOWN: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "LMI, details": (INVOCATIONS["lmi"], body(details=True)),
    "LMI, samples": (INVOCATIONS["lmi"], body(n=2, do_sample=True, details=False)),
    "LMI, stream": (INVOCATIONS["lmi"], {**body(), "stream": True}),
    "LMI, tensors": (INVOCATIONS["lmi"], body(return_log_probs=True)),
    "async, details": (INVOCATIONS["lmi_async"], body(details=True)),
    "TGI, details": (GENERATE, body(details=True)),
    "TGI, best_of": (GENERATE, body(best_of=2, do_sample=True)),
    "TGI, stream": (ROUTES["/generate_stream"], body()),
    "chat": (ROUTES["/v1/chat/completions"], {**CHAT, "logprobs": True}),
    "completion": (ROUTES["/v1/completions"], {"prompt": "a b", "max_tokens": 2, "logprobs": 1}),
    "Triton": (TRITON, {"text_input": "a b", "max_tokens": 2, "return_log_probs": True}),
}


def sent(dialect: Dialect, value: dict[str, Any]) -> tuple[list[bool], bytes]:
    """Whether each request to the engine asks for log-probabilities, and the response without ids and times."""

    async def story() -> tuple[list[bool], bytes]:
        model: ServedModel = await load_echo()
        model.start()
        await model.availability.opened
        over, asked = asyncio.Event(), list[bool]()
        submit = Batcher.submit

        def note(batcher: Batcher, request: Any, *arguments: Any, **more: Any) -> int:
            asked.append(request.sampling.logprobs)
            return submit(batcher, request, *arguments, **more)

        def on_bytes(task: RequestTask) -> None:
            if task.finished:
                over.set()

        with mock.patch.object(Batcher, "submit", note), model.open({}, dialect, id="id", on_bytes=on_bytes) as task:
            task.begin(task.run(dumps(value)))
            await asyncio.wait_for(over.wait(), 30)
            assert task.error is None, task.error
            response = task.take()
        model.close()
        return asked, re.sub(rb'"(id|created)":("[^"]*"|\d+)|id: \S+', b"", response)

    return asyncio.run(story())


@pytest.mark.parametrize("name", UNSHOWN)
def test_log_probabilities_that_no_response_shows_are_not_computed(name: str) -> None:
    asked, response = sent(*UNSHOWN[name])
    assert asked == [False]
    with mock.patch.object(preprocessor, "_without_logprobs", side_effect=lambda parsed: parsed):
        assert sent(*UNSHOWN[name])[1] == response


@pytest.mark.parametrize("name", SHOWN)
def test_log_probabilities_that_a_response_needs_are_computed(name: str) -> None:
    asked, _ = sent(*SHOWN[name])
    assert asked == [True]


def test_a_users_formatter_gets_log_probabilities() -> None:
    def formatter(output: Any) -> str:
        return ""

    config = read_config(overrides=["option.llm_engine=echo"], environ={}).checked()

    async def story() -> list[bool]:
        model = await load_model(config, Formatters(output=OutputFormatter("w", formatter, Style.OUTPUT)))
        head = model.preprocessor.read_head(Head({}))
        parsed = model.preprocessor.parse(model.preprocessor.decode(dumps(body()), head), head)
        model.close()
        return [request.sampling.logprobs for request in parsed.requests]

    assert asyncio.run(story()) == [True]
