"""TGI_COMPAT: LMI's schema in the layout that strict TGI clients parse (contract generate_apis.md, 7 and 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from handler.core import Finish, Request, Token
from handler.errors import ServingError
from handler.framing import JSON, SSE
from handler.schemas.base import Answer
from handler.schemas.lmi import Lmi
from handler.schemas.replies import Continuation


class TgiCompat(Lmi):
    """An array when not streaming, server-sent events when streaming; every key present, null where it has no value.

    Details are on unless switched off, as in LMI's own compatibility mode. Stop strings stay in the text, as in TGI.
    """

    name = "tgi_compat"
    stream_framing = SSE
    defaults: Mapping[str, Any] = MappingProxyType({"include_stop": True})
    details_default = True

    def token(self, token: Token) -> dict[str, Any]:
        return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}

    def prompt_token(self, token: Token) -> dict[str, Any]:
        return {"id": token.id, "text": token.text, "logprob": token.logprob}

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
            "seed": _seed(request),
            "input_length": num_prompt_tokens,
        }

    def details(self, request: Request, best: Continuation, others: Sequence[Continuation]) -> dict[str, Any]:
        return {"seed": _seed(request, best.index), "prefill": [], **super().details(request, best, others)}

    def other(self, request: Request, other: Continuation) -> dict[str, Any]:
        return {"seed": _seed(request, other.index), "prefill": [], **super().other(request, other)}

    def document(self, text: str, details: dict[str, Any] | None, outputs: dict[str, Any] | None = None) -> Any:
        return [super().document(text, details, outputs)]

    def refused(self, error: ServingError, body: Any = None) -> Answer:
        return Answer(error.status, JSON.content_type, JSON.encode(self.stream_failure(error)))

    def stream_failure(self, error: ServingError) -> Any:
        return {"error": error.message, "error_type": error.kind, "code": error.status}


def _seed(request: Request, index: int = 0) -> int | None:
    """What gives sequence number `index` again by itself; null when nothing was drawn."""
    return request.sampling.seed_of(index) if request.sampling.do_sample else None
