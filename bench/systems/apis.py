"""Requests to the servers and parsers of their streams: text in each server's form, or OpenAI's chat."""

from __future__ import annotations

import json
from typing import Any, ClassVar, NamedTuple

from proof.bench.client import AnswerReader, Target

MODEL = "model"
"""The model's name in requests to the peer."""


class UsageReader(AnswerReader):
    """Counts tokens by `usage` in the answer's last event.

    vLLM joins tokens to one event when its sender falls behind. A token that came with another one counts as one that
    came 0 s later, as its client saw it.
    """

    num_heads: ClassVar[int] = 0  # events before the first token

    def verdict(self, expected_tokens: int) -> str:
        tokens = self._num_tokens()
        if tokens is not None:
            self.arrivals.pop()  # the event with `usage` has no token
            del self.arrivals[: self.num_heads]
            del self.arrivals[tokens:]  # llama.cpp tells the finish reason in an event of its own
            missing = tokens - len(self.arrivals)
            self.arrivals.extend(self.arrivals[-1:] * missing)
        return super().verdict(expected_tokens)

    def _num_tokens(self) -> int | None:
        try:
            usage = json.loads(self._last)["usage"]
            return int(usage["completion_tokens"])
        except (ValueError, KeyError, TypeError):  # a failed answer; the verdict has its error
            return None


class UsageChatReader(UsageReader):
    """Reads chats, whose first event has only the role."""

    num_heads = 1


class Completions(Target):
    """OpenAI's completions, text alone."""

    path: ClassVar[str] = "/v1/completions"
    reader: ClassVar[type[AnswerReader]] = UsageReader

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {**_WITH_USAGE, **_fixed(tokens), "prompt": prompt}


class PeerText(Completions):
    """The same with the log-probability of each token, as LMI has it."""

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {**super().body(prompt, tokens), "logprobs": 0}


class PeerChat(Target):
    """OpenAI's chat completions."""

    path: ClassVar[str] = "/v1/chat/completions"
    reader: ClassVar[type[AnswerReader]] = UsageChatReader

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {**_WITH_USAGE, **_fixed(tokens), "messages": [{"role": "user", "content": prompt}]}


class OurChat(Target):
    """LMI's chat completions: a line a token."""

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {**_fixed(tokens), "messages": [{"role": "user", "content": prompt}]}


def _fixed(tokens: int) -> dict[str, Any]:
    return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}


_WITH_USAGE: dict[str, Any] = {"model": MODEL, "stream_options": {"include_usage": True}}


class Api(NamedTuple):
    """The requests to both servers."""

    ours: type[Target]
    peers: type[Target]
    chat: bool


APIS = {"chat": Api(OurChat, PeerChat, True), "text": Api(Target, PeerText, False)}
