"""The echo engine's server that answers chats from a script: a model that calls tools whenever a test wants it to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from handler.core.text import Prompt
from handler.core.values import PLAIN_TEMPLATE, TemplateOptions
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.echo import engine as echo
from handler.engines.echo.engine import EchoTokenizer
from tests.app.server import AppServer, serve

Messages = Sequence[Mapping[str, Any]]


class Speaker(echo.Echo):
    """Repeats the prompt once."""

    def add(self, request: EngineRequest) -> None:
        once = request.sampling._replace(max_new_tokens=len(request.ids))
        super().add(request._replace(parameters=once))


class Script(EchoTokenizer):
    """Lays out a chat as its next answer; after the last one it stays there.

    Attributes:
        chats: the messages of each request, as a chat template gets them.
    """

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers = answers
        self.chats: list[Messages] = []

    def encode_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = PLAIN_TEMPLATE,
    ) -> Prompt:
        self.chats.append(messages)
        return self.encode(self.answers[min(len(self.chats), len(self.answers)) - 1])


@contextlib.contextmanager
def speaking(*answers: str) -> Iterator[tuple[AppServer, Script]]:
    script = Script(answers)

    def load_tokenizer(config: EngineConfig) -> Script:
        return script

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(echo, "load", Speaker)
        patch.setattr(echo, "load_tokenizer", load_tokenizer)
        with serve("--engine", "echo") as server:
            yield server, script
