"""Answers of LMI's async mode to `inputs`: lines of a stream with vLLM's log-probabilities, whole answers."""

from __future__ import annotations

from collections.abc import Iterable

from handler.core.framing import JSON_TEXTS, TOKEN_SLOTS, Framing, dumps
from handler.core.values import Request, Token
from handler.protocols.kernel.base import TokenLine
from handler.protocols.lmi.answers import AsyncAnswer, AsyncDetails, AsyncLine, AsyncStreamDetails, AsyncToken
from handler.protocols.lmi.reply import StreamEnd, StreamReply, WholeOutput, line_template
from handler.protocols.openai.response import REASONS
from handler.protocols.tensors.outputs import TensorValues


class AsyncFormat:
    """The values of LMI's async mode; see `reply.ResponseFormat`. It shows one sequence, no alternatives or tensors."""

    special_in_text = True

    def chunk(self, token: Token, index: int, *, tops: bool = False, outputs: TensorValues | None = None) -> AsyncLine:
        return {"index": 0, "token": _token(token), "generated_text": None, "details": None}

    def token_line(self, framing: Framing, texts: list[str]) -> TokenLine:
        line = line_template(self.chunk, framing, TOKEN_SLOTS)
        add = texts.append

        def encode(token: Token) -> bytes:
            id, text, logprob, _, _ = token
            add(text)
            return line % (id, JSON_TEXTS[text], dumps(logprob))

        return encode

    def last_chunk(self, chunk: AsyncLine, text: str, end: StreamEnd | None) -> AsyncLine:
        details: AsyncStreamDetails | None = None
        if end is not None:
            details = {
                "finish_reason": REASONS[end.finish] or "stop",
                "seed": _seed(end.request),
                "generated_tokens": end.num_tokens,
                "input_length": end.num_prompt_tokens,
            }
        return {**chunk, "generated_text": text, "details": details}

    def document(self, text: str, output: WholeOutput | None, outputs: TensorValues | None = None) -> AsyncAnswer:
        if output is None:
            return {"generated_text": text}
        best = output.best
        details: AsyncDetails = {
            "finish_reason": REASONS[best.finish] or "stop",
            "generated_tokens": len(best.tokens),
            "seed": _seed(output.request),
            "prefill": _tokens(token for token in best.prefill if token.logprob is not None),
            "tokens": _tokens(best.tokens),
        }
        return {"generated_text": text, "details": details}


class AsyncStream(StreamReply):
    """A stream of lines, then an empty one each for vLLM's counts and its end, of which LMI shows nothing."""

    def _end(self) -> bytes:
        return b"\n\n"


def _token(token: Token) -> AsyncToken:
    return {"id": token.id, "text": token.text, "logprob": token.logprob}


def _tokens(tokens: Iterable[Token]) -> list[AsyncToken]:
    return [_token(token) for token in tokens]


def _seed(request: Request) -> int | None:
    """Return the seed of the request, as a signed number as vLLM reads it; None where it has none."""
    return request.sampling.signed_seed
