"""OpenAI's completions route, as vLLM's own server streams it."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from handler.bench.answer import AnswerReader
from handler.bench.client import Target

MODEL = "model"
"""The name under which the server knows it."""


class CompletionsReader(AnswerReader):
    """Counts what the answer's own last event says.

    vLLM joins tokens to one event when its sender falls behind. Each token that came with another one counts as one
    that came 0 s later, which is what its client saw.
    """

    def verdict(self, expected_tokens: int) -> str:
        tokens = self._told()
        if tokens is not None:
            self.arrivals.pop()  # the event that told it has no token
            missing = tokens - len(self.arrivals)
            self.arrivals.extend(self.arrivals[-1:] * missing)
        return super().verdict(expected_tokens)

    def _told(self) -> int | None:
        try:
            usage = json.loads(self._last)["usage"]
            return int(usage["completion_tokens"])
        except (ValueError, KeyError, TypeError):  # a failure, which the verdict names
            return None


class CompletionsTarget(Target):
    """Greedy, streaming, of fixed length; the number of tokens is told once, at the end."""

    path: ClassVar[str] = "/v1/completions"
    reader: ClassVar[type[AnswerReader]] = CompletionsReader

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
