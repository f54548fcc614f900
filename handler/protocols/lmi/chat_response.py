"""LMI's chat answers: OpenAI's without `model` and `system_fingerprint`, with LMI's framings, reasons and failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from handler.core.errors import ServingError
from handler.core.framing import Framing
from handler.core.values import Finish
from handler.protocols.assistant.events import Event
from handler.protocols.kernel.base import HttpResponse
from handler.protocols.openai import chat_response as openai
from handler.protocols.openai.answers import OpenAiMessagePart
from handler.protocols.openai.chat_response import ChatFormat
from handler.protocols.openai.response import Choice, Head, Usage


class Failures(Protocol):
    """The failures of a mode."""

    def stream_failure(self, error: ServingError) -> Any:
        """Render the last value of a stream that broke off."""

    def refused(self, error: ServingError) -> HttpResponse:
        """Render a failure before anything has been sent."""


class LmiHead(Head):
    __slots__ = ()

    def value(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "choices": choices}


class LmiChatFormat(ChatFormat):
    __slots__ = ()

    def reason(self, finish: Finish | None, *, called: bool, broken: bool = False) -> str | None:
        reason = super().reason(finish, called=called, broken=broken)
        return finish.value if finish is not None and reason == "stop" else reason


class ChatStream(openai.ChatStream):
    def __init__(
        self, failures: Failures, head: Head, format: ChatFormat, num_sequences: int, usage: Usage, framing: Framing
    ) -> None:
        super().__init__(head, format, num_sequences, usage, framing)
        self._failures = failures

    def _message_part(self, choice: Choice, delta: OpenAiMessagePart) -> OpenAiMessagePart:
        return delta if choice.begun else {**delta, "role": "assistant"}

    def _failure(self, error: ServingError) -> bytes:
        return self._framing.encode(self._failures.stream_failure(error)) + self._framing.end

    def refused(self, error: ServingError) -> HttpResponse:
        return self._failures.refused(error)


class ChatDocument(openai.ChatDocument):
    def __init__(self, failures: Failures, head: Head, format: ChatFormat, num_sequences: int) -> None:
        super().__init__(head, format, num_sequences)
        self._failures = failures

    def _message(self, events: Iterable[Event]) -> Any:
        return {name: item for name, item in super()._message(events).items() if name != "refusal"}

    def refused(self, error: ServingError) -> HttpResponse:
        return self._failures.refused(error)
