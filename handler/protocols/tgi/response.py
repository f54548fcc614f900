"""What tokens and the events of a stream look like in TGI's layout (contract generate_apis.md, 2.2 and 12)."""

from __future__ import annotations

from typing import Any

from handler.core.errors import ServingError
from handler.core.framing import Framing
from handler.core.values import Finish, Request, Token
from handler.protocols.base import HttpResponse, ServerContext


class TgiFormat:
    """Every key present, null where it has no value."""

    def token(self, token: Token) -> dict[str, Any]:
        return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}

    def prompt_token(self, token: Token) -> dict[str, Any]:
        return {"id": token.id, "text": token.text, "logprob": token.logprob}

    def top_tokens(self, token: Token) -> list[dict[str, Any]]:
        return [self.token(one) for one in token.top]

    def chunk(self, token: Token, index: int, beside: dict[str, Any] | None = None) -> dict[str, Any]:
        if beside is not None:
            return {"index": index, "token": self.token(token), **beside, "generated_text": None, "details": None}
        return {
            "index": index,
            "token": {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special},
            "generated_text": None,
            "details": None,
        }

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
        """Without the prompt, which would make a line longer than some clients read (aiohttp: 128 KiB)."""
        return {
            "finish_reason": finish.value,
            "generated_tokens": num_tokens,
            "seed": seed_of(request),
            "input_length": num_prompt_tokens,
        }

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        """The dialect's own."""
        raise NotImplementedError

    def refused_as(self, error: ServingError, framing: Framing) -> HttpResponse:
        """A JSON object also where a stream was asked for: TGI's clients read no other body under an error's status."""
        return self.refused(error)


def seed_of(request: Request, index: int = 0) -> int | None:
    """What gives sequence number `index` again by itself; null when nothing was drawn."""
    return request.sampling.seed_of(index) if request.sampling.do_sample else None


def finish_shown(request: Request, finish: Finish, num_tokens: int) -> Finish:
    """In TGI the last token that was asked for ends an answer by length, whatever it is."""
    return Finish.LENGTH if not request.fill_context and num_tokens >= request.sampling.max_new_tokens else finish
