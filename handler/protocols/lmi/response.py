"""LMI's answers from tokens: lines of a stream, whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handler.core.framing import JSON_TEXTS, TOKEN_SLOTS, Framing, dumps
from handler.core.values import Finish, Request, Token
from handler.protocols.kernel.base import TokenLine
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.lmi.reply import line_template

_SPECIAL_SLOTS = TOKEN_SLOTS._replace(special=True)


class LmiFormat:
    """LMI's values; see `reply.ResponseFormat`."""

    special_in_text = True

    def token(self, token: Token) -> dict[str, Any]:
        value: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
        if token.special:
            value["special_token"] = True
        return value

    def prompt_token(self, token: Token) -> dict[str, Any]:
        return self.token(token)

    def top_tokens(self, token: Token) -> list[dict[str, Any]]:
        return [self.token(alternative) for alternative in token.top]

    def chunk(self, token: Token, index: int, beside: dict[str, Any] | None = None) -> dict[str, Any]:
        """Render a line of a stream that is not the last."""
        return {"token": self.token(token), **(beside or {})}

    def token_line(self, framing: Framing, texts: list[str]) -> TokenLine:
        ordinary = line_template(self.chunk, framing, TOKEN_SLOTS)
        special = line_template(self.chunk, framing, _SPECIAL_SLOTS)
        add = texts.append

        def line(token: Token) -> bytes:
            id, text, logprob, is_special, _ = token
            add(text)
            return (special if is_special else ordinary) % (id, JSON_TEXTS[text], dumps(logprob))

        return line

    def last_chunk(
        self,
        token: Token,
        index: int,
        text: str,
        details: dict[str, Any] | None,
        beside: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        value = {**self.chunk(token, index, beside), "generated_text": text}
        return value if details is None else {**value, "details": details}

    def stream_details(
        self, request: Request, finish: Finish, num_tokens: int, num_prompt_tokens: int
    ) -> dict[str, Any]:
        return {"finish_reason": finish.value, "generated_tokens": num_tokens, "inputs": request.prompt}

    def details(
        self, request: Request, best: SequenceOutput, others: Sequence[SequenceOutput], num_prompt_tokens: int
    ) -> dict[str, Any]:
        value: dict[str, Any] = {
            "finish_reason": best.finish.value,
            "generated_tokens": len(best.tokens),
            "inputs": request.prompt,
            "tokens": [self.token(token) for token in best.tokens],
        }
        if request.sampling.prompt_logprobs:
            value["prefill"] = [self.prompt_token(token) for token in best.prefill]
        if request.sampling.top_logprobs:
            value["top_tokens"] = [self.top_tokens(token) for token in best.tokens]
        if others:
            value["best_of_sequences"] = [self.other(request, other) for other in others]
        return value

    def other(self, request: Request, other: SequenceOutput) -> dict[str, Any]:
        """Render one of `best_of_sequences`."""
        tops = {"top_tokens": [self.top_tokens(token) for token in other.tokens]}
        return {
            "finish_reason": other.finish.value,
            "generated_tokens": len(other.tokens),
            "tokens": [self.token(token) for token in other.tokens],
            **(tops if request.sampling.top_logprobs else {}),
            "generated_text": other.text,
        }

    def document(self, text: str, details: dict[str, Any] | None, outputs: dict[str, Any] | None = None) -> Any:
        value: dict[str, Any] = {"generated_text": text}
        if details is not None:
            value["details"] = details
        return value if outputs is None else {**value, "outputs": outputs}
