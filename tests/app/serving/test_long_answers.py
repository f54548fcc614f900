"""A long answer is written on a thread, so that the event loop serves others meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from handler.protocols.lmi.response import DocumentReply
from handler.serving.model import ServedModel
from tests.services import begin, load_echo


async def service() -> ServedModel:
    model = await load_echo("option.max_model_len=100000")
    model.start()
    await model.opened
    return model


def ask(num_tokens: int) -> dict[str, Any]:
    return {"inputs": "a b", "parameters": {"max_new_tokens": num_tokens, "details": True}}


class Document:
    """Notes the threads on which documents are made; `hold` keeps a document from ending."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[threading.Thread] = []
        self.begun, self.free = threading.Event(), threading.Event()
        self.free.set()
        self.error: Exception | None = None
        make = DocumentReply._document

        def document(reply: DocumentReply) -> object:
            self.threads.append(threading.current_thread())
            self.begun.set()
            self.free.wait(5)
            if self.error is not None:
                raise self.error
            return make(reply)

        monkeypatch.setattr(DocumentReply, "_document", document)


def test_a_long_answer_is_written_on_a_thread_and_a_short_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    document = Document(monkeypatch)

    async def story() -> None:
        model = await service()
        for num_tokens in (3, 5000):
            task, begun = begin(model, ask(num_tokens))
            await begun
            answer = task.take_whole()
            assert task.finished
            assert answer.status == 200
            assert len(json.loads(answer.body)["details"]["tokens"]) == num_tokens
            task.close()
        model.close()

    asyncio.run(story())
    main = threading.main_thread()
    assert [thread is main for thread in document.threads] == [True, False]


def test_a_failure_of_writing_is_the_answer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    document = Document(monkeypatch)
    document.error = ZeroDivisionError("secret")

    async def story() -> None:
        model = await service()
        task, begun = begin(model, ask(5000))
        await begun
        answer = task.take_whole()
        assert answer.status == 500
        assert b"secret" not in answer.body
        task.close()
        model.close()

    asyncio.run(story())
    assert "ZeroDivisionError" in caplog.text


def test_a_client_that_goes_meanwhile_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    document = Document(monkeypatch)
    document.free.clear()

    async def story() -> None:
        model = await service()
        task, _ = begin(model, ask(5000))
        while not document.begun.is_set():
            await asyncio.sleep(0.01)
        assert not task.finished
        task.close()
        document.free.set()
        await asyncio.sleep(0.2)
        assert task.unsent == []
        model.close()

    asyncio.run(story())
