"""LMI's chat answers: OpenAI's without `model` and `system_fingerprint`, with LMI's framings, reasons and failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.values import Finish
from handler.protocols.lmi.answers import LmiChatAnswer, LmiChatChoice, LmiChatChunk
from handler.protocols.openai import chat_response as openai
from handler.protocols.openai.answers import OpenAiMessagePart, StreamUsage
from handler.protocols.openai.chat_response import ChatFormat, ReadAnswer
from handler.protocols.openai.response import Choice


class LmiChatFormat(ChatFormat):
    __slots__ = ()

    def reason(self, finish: Finish | None, *, called: bool, broken: bool = False) -> str | None:
        reason = super().reason(finish, called=called, broken=broken)
        return finish.value if finish is not None and reason == "stop" else reason


class ChatStream(openai.ChatStream):
    def _value(self, choices: list[Any], counts: StreamUsage) -> Mapping[str, object]:
        head = self._fields
        chunk: LmiChatChunk = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "choices": choices,
            **counts,
        }
        return chunk

    def _message_part(self, choice: Choice, delta: OpenAiMessagePart) -> OpenAiMessagePart:
        return delta if choice.begun else {**delta, "role": "assistant"}


class ChatDocument(openai.ChatDocument):
    def _document(self) -> Mapping[str, object]:
        head = self._head
        value: LmiChatAnswer = {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "choices": [_choice(answer, "" if self._format.named else None) for answer in self._answers()],
            "usage": self._usage(self._num_thoughts),
        }
        return value


def _choice(answer: ReadAnswer, no_content: str | None) -> LmiChatChoice:
    """Return a choice; `no_content` is its content where there is no text: beside a named function's call, not null."""
    content = no_content if answer.content is None else answer.content
    return {
        "index": answer.number,
        "message": {"role": "assistant", "content": content, **answer.parts},
        "logprobs": answer.logprobs,
        "finish_reason": answer.reason,
    }
