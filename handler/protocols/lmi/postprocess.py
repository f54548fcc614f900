"""Change an answer's values before they are framed, as a user's output formatter does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from handler.core.framing import Framing
from handler.core.values import Token
from handler.protocols.kernel.base import TokenLine
from handler.protocols.lmi.reply import ResponseFormat


class Postprocessor:
    """A format that passes lines and documents through `change`."""

    def __init__(self, format: ResponseFormat, change: Callable[[Any], Any]) -> None:
        self._format = format
        self._change = change
        self.special_in_text = format.special_in_text
        self.prompt_token = format.prompt_token
        self.top_tokens = format.top_tokens
        self.stream_details = format.stream_details
        self.details = format.details

    def chunk(self, token: Token, index: int, beside: dict[str, Any] | None = None) -> Any:
        return self._change(self._format.chunk(token, index, beside))

    def token_line(self, framing: Framing, texts: list[str]) -> TokenLine:
        def line(token: Token) -> bytes:
            texts.append("" if token.special and not self.special_in_text else token.text)
            return framing.encode(self.chunk(token, len(texts)))

        return line

    def last_chunk(
        self,
        token: Token,
        index: int,
        text: str,
        details: dict[str, Any] | None,
        beside: dict[str, Any] | None = None,
    ) -> Any:
        return self._change(self._format.last_chunk(token, index, text, details, beside))

    def document(self, text: str, details: dict[str, Any] | None, outputs: dict[str, Any] | None = None) -> Any:
        answer = self._format.document(text, details, outputs)
        return [self._change(value) for value in answer] if isinstance(answer, list) else self._change(answer)
