"""TGI's format: tokens and events with every key present, as the strict client text_generation 0.7 parses them."""

from __future__ import annotations

from typing import Any

from handler.core.framing import JSON_TEXTS, SLOT, TOKEN_SLOTS, Framing, dumps
from handler.core.values import Finish, Request, Token
from handler.protocols.kernel.base import TokenLine
from handler.protocols.lmi.reply import line_template

_SLOTS = TOKEN_SLOTS._replace(special=SLOT)


class TgiFormat:
    """Tokens and events in TGI's format; null where a key has no value."""

    def token(self, token: Token) -> dict[str, Any]:
        return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}

    def prompt_token(self, token: Token) -> dict[str, Any]:
        return {"id": token.id, "text": token.text, "logprob": token.logprob}

    def top_tokens(self, token: Token) -> list[dict[str, Any]]:
        return [self.token(alternative) for alternative in token.top]

    def chunk(self, token: Token, index: int, beside: dict[str, Any] | None = None) -> dict[str, Any]:
        nothing = {"generated_text": None, "details": None}
        return {"index": index, "token": self.token(token), **(beside or {}), **nothing}

    def token_line(self, framing: Framing, texts: list[str]) -> TokenLine:
        format = line_template(self.chunk, framing, _SLOTS)

        def line(token: Token) -> bytes:
            id, text, logprob, is_special, _ = token
            texts.append("" if is_special else text)
            special = b"true" if is_special else b"false"
            return format % (len(texts), id, JSON_TEXTS[text], dumps(logprob), special)

        return line

    def last_chunk(
        self,
        token: Token,
        index: int,
        text: str,
        details: dict[str, Any] | None,
        beside: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {**self.chunk(token, index, beside), "generated_text": text, "details": details}

    def stream_details(
        self, request: Request, finish: Finish, num_tokens: int, num_prompt_tokens: int
    ) -> dict[str, Any]:
        """Render details without the prompt: aiohttp's clients read lines of at most 128 KiB."""
        return {
            "finish_reason": finish.value,
            "generated_tokens": num_tokens,
            "seed": seed_of(request),
            "input_length": num_prompt_tokens,
        }


def seed_of(request: Request, index: int = 0) -> int | None:
    """Return the seed that reproduces sequence number `index`; None without sampling."""
    return request.sampling.seed_of(index) if request.sampling.do_sample else None


def finish_shown(request: Request, finish: Finish, num_tokens: int) -> Finish:
    """Return the reason for the client: in TGI the last token allowed always ends an answer by length."""
    return Finish.LENGTH if not request.fill_context and num_tokens >= request.sampling.max_new_tokens else finish
