"""Answers in a dialect's own layout and framing whose values somebody changes before they are framed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from handler.core.values import Token
from handler.protocols.reply import ResponseFormat


class Reshaped:
    """A layout whose lines and documents go through `change`; failures and all else are the layout's own."""

    def __init__(self, layout: ResponseFormat, change: Callable[[Any], Any]) -> None:
        self._layout = layout
        self._change = change
        self.special_in_text = layout.special_in_text
        self.prompt_token = layout.prompt_token
        self.top_tokens = layout.top_tokens
        self.stream_details = layout.stream_details
        self.stream_failure = layout.stream_failure
        self.details = layout.details
        self.refused_as = layout.refused_as

    def chunk(self, token: Token, index: int, beside: dict[str, Any] | None = None) -> Any:
        return self._change(self._layout.chunk(token, index, beside))

    def last_chunk(
        self,
        token: Token,
        index: int,
        text: str,
        details: dict[str, Any] | None,
        beside: dict[str, Any] | None = None,
    ) -> Any:
        return self._change(self._layout.last_chunk(token, index, text, details, beside))

    def document(self, text: str, details: dict[str, Any] | None, outputs: dict[str, Any] | None = None) -> Any:
        found = self._layout.document(text, details, outputs)
        return [self._change(value) for value in found] if isinstance(found, list) else self._change(found)
