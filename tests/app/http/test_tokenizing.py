"""/tokenize, /chat_tokenize and count_tokens beside inference: how many at a time, and what is counted of them."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from functools import partial
from typing import Any

import pytest

from handler.core.framing import Framing
from handler.protocols.anthropic.request import AnthropicCount
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.tgi.native import CHAT_TOKENIZE, TOKENIZE
from handler.serving.admission import MOST_TOKENIZING, TOKENIZER_THREADS, Admission
from handler.serving.model import ServedModel
from handler.serving.task import RequestTask
from tests.servers import PATIENCE
from tests.services import echo_service

CHAT = {"messages": [{"role": "user", "content": "a"}]}


async def ask(service: ServedModel, schema: Dialect, body: Any) -> tuple[int, Any]:
    finished = asyncio.Event()

    def on_bytes(task: RequestTask) -> None:
        if task.finished:
            finished.set()

    task = service.open({}, schema, on_bytes=on_bytes)
    task.start(json.dumps(body).encode())
    if not task.finished:
        await finished.wait()
    answer = task.take_whole()
    return answer.status, json.loads(answer.body)


def count(service: ServedModel, outcome: str) -> float:
    return service.metrics.requests.labels(outcome)._value.get()  # type: ignore[no-any-return]


def test_what_is_beyond_the_bound_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "handler.request")

    async def story() -> None:
        service = await echo_service()
        free, tokenizing = asyncio.Event(), Admission._tokenizing

        async def held(self: Admission, *arguments: Any) -> Any:
            await free.wait()
            return await tokenizing(self, *arguments)

        monkeypatch.setattr(Admission, "_tokenizing", held)
        first = [asyncio.ensure_future(ask(service, TOKENIZE, {"inputs": "a"})) for _ in range(MOST_TOKENIZING)]
        await asyncio.sleep(0.01)
        said = {"error": "Model is overloaded", "error_type": "overloaded"}
        assert await ask(service, TOKENIZE, {"inputs": "a"}) == (429, said)
        assert await ask(service, CHAT_TOKENIZE, CHAT) == (429, said)
        assert (await ask(service, AnthropicCount(), {**CHAT, "model": "model"}))[0] == 529
        free.set()
        assert [status for status, _ in await asyncio.gather(*first)] == [200] * MOST_TOKENIZING
        assert (await ask(service, TOKENIZE, {"inputs": "a"}))[0] == 200, "their places are free again"
        assert (await ask(service, TOKENIZE, {"inputs": ""}))[0] == 422
        counts = [count(service, outcome) for outcome in ("ok", "overloaded", "refused")]
        assert counts == [MOST_TOKENIZING + 1, 3, 1]
        service.close()

    asyncio.run(story())
    outcomes = [record.getMessage().split("outcome=")[1].split()[0] for record in caplog.records]
    assert sorted(outcomes) == ["ok"] * (MOST_TOKENIZING + 1) + ["overloaded"] * 3 + ["refused"]


@pytest.mark.parametrize(("schema", "beside"), [(TOKENIZE, 0), (CHAT_TOKENIZE, 1)])
def test_a_long_answer_is_made_in_parts_that_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch, schema: Dialect, beside: int
) -> None:
    encoded: list[Any] = []
    encode = Framing.encode

    def note(self: Framing, value: Any) -> bytes:
        encoded.append(value)
        return encode(self, value)

    monkeypatch.setattr(Framing, "encode", note)
    words = [f"w{number % 997}" for number in range(10_000)]
    text = " ".join(words)
    body = {"inputs": text} if schema is TOKENIZE else {"messages": [{"role": "user", "content": text}]}

    async def story() -> tuple[int, Any]:
        service = await echo_service()
        answer = await ask(service, schema, body)
        service.close()
        return answer

    status, value = asyncio.run(story())
    assert status == 200
    tokens = value["tokenize_response"] if beside else value
    said = [token["text"].strip() for token in tokens]
    assert said == (["user:", *words, "assistant:"] if beside else words)
    data = (value["templated_text"] if beside else text).encode()
    assert all(data[token["start"] : token["stop"]].decode() == token["text"] for token in tokens)
    sizes = [len(part) for part in encoded if isinstance(part, list)]
    assert sum(sizes) == len(tokens)
    assert max(sizes) <= 1024, "JSON is made while the GIL is held, which the event loop needs"


def test_long_prompts_of_one_client_do_not_hold_up_a_short_one() -> None:
    async def story() -> list[int]:
        service = await echo_service()
        free, done = threading.Event(), list[int]()

        def work(size: int) -> None:
            free.wait(PATIENCE)
            done.append(size)

        sizes = [*[500_000] * 20, 70_000]
        works = [asyncio.ensure_future(service.admission.run(size, partial(work, size))) for size in sizes]
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*works)
        service.close()
        return done

    assert asyncio.run(story()).index(70_000) <= TOKENIZER_THREADS + 1
