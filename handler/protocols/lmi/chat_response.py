"""LMI's chat answers: OpenAI's without `model` and `system_fingerprint`, with LMI's framings, reasons and failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from handler.core.values import Finish
from handler.protocols.assistant.events import Event
from handler.protocols.openai import chat_response as openai
from handler.protocols.openai.answers import OpenAiMessagePart
from handler.protocols.openai.chat_response import ChatFormat
from handler.protocols.openai.response import Choice, Head


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
    def _message_part(self, choice: Choice, delta: OpenAiMessagePart) -> OpenAiMessagePart:
        return delta if choice.begun else {**delta, "role": "assistant"}


class ChatDocument(openai.ChatDocument):
    def _message(self, events: Iterable[Event]) -> Any:
        return {name: item for name, item in super()._message(events).items() if name != "refusal"}
