"""LMI's answers from tokens: lines of a stream, whole answers."""

from __future__ import annotations

from collections.abc import Sequence

from handler.core.framing import JSON_TEXTS, TOKEN_SLOTS, Framing, dumps
from handler.core.values import Request, Token
from handler.protocols.kernel.base import TokenLine
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.lmi.answers import LmiAnswer, LmiDetails, LmiLine, LmiSequence, LmiToken, LmiTops
from handler.protocols.lmi.reply import StreamEnd, WholeOutput, line_template
from handler.protocols.tensors.outputs import TensorValues

_SPECIAL_SLOTS = TOKEN_SLOTS._replace(special=True)


class LmiFormat:
    """LMI's values; see `reply.ResponseFormat`."""

    special_in_text = True

    def token(self, token: Token) -> LmiToken:
        value: LmiToken = {"id": token.id, "text": token.text, "log_prob": token.logprob}
        if token.special:
            value["special_token"] = True
        return value

    def tokens(self, tokens: Sequence[Token]) -> list[LmiToken]:
        return [self.token(token) for token in tokens]

    def _top_tokens(self, tokens: Sequence[Token]) -> list[list[LmiToken]]:
        return [self.tokens(token.top) for token in tokens]

    def chunk(self, token: Token, index: int, *, tops: bool = False, outputs: TensorValues | None = None) -> LmiLine:
        line: LmiLine = {"token": self.token(token)}
        if tops:
            line["top_tokens"] = self.tokens(token.top)
        if outputs is not None:
            line["outputs"] = outputs
        return line

    def token_line(self, framing: Framing, texts: list[str]) -> TokenLine:
        ordinary = line_template(self.chunk, framing, TOKEN_SLOTS)
        special = line_template(self.chunk, framing, _SPECIAL_SLOTS)
        add = texts.append

        def line(token: Token) -> bytes:
            id, text, logprob, is_special, _ = token
            add(text)
            return (special if is_special else ordinary) % (id, JSON_TEXTS[text], dumps(logprob))

        return line

    def last_chunk(self, chunk: LmiLine, text: str, end: StreamEnd | None) -> LmiLine:
        line: LmiLine = {**chunk, "generated_text": text}
        if end is not None:
            line["details"] = self._stream_details(end)
        return line

    def document(self, text: str, output: WholeOutput | None, outputs: TensorValues | None = None) -> LmiAnswer:
        answer: LmiAnswer = {"generated_text": text}
        if output is not None:
            answer["details"] = self._details(output)
        if outputs is not None:
            answer["outputs"] = outputs
        return answer

    def _stream_details(self, end: StreamEnd) -> LmiDetails:
        details: LmiDetails = {
            "finish_reason": end.finish.value,
            "generated_tokens": end.num_tokens,
            "inputs": end.request.prompt,
        }
        if end.prefill is not None:
            details["prefill"] = self.tokens(end.prefill)
        if end.tops:
            details["top_tokens"] = [self.tokens(top) for top in end.tops]
        return details

    def _details(self, output: WholeOutput) -> LmiDetails:
        request, best, others, _ = output
        details: LmiDetails = {
            "finish_reason": best.finish.value,
            "generated_tokens": len(best.tokens),
            "inputs": request.prompt,
            "tokens": self.tokens(best.tokens),
        }
        if request.sampling.prompt_logprobs:
            details["prefill"] = self.tokens(best.prefill)
        if request.sampling.top_logprobs:
            details["top_tokens"] = self._top_tokens(best.tokens)
        if others:
            details["best_of_sequences"] = [self._other(request, other) for other in others]
        return details

    def _other(self, request: Request, other: SequenceOutput) -> LmiSequence:
        """Render one of `best_of_sequences`."""
        tops: LmiTops = {"top_tokens": self._top_tokens(other.tokens)} if request.sampling.top_logprobs else {}
        return {
            "finish_reason": other.finish.value,
            "generated_tokens": len(other.tokens),
            "tokens": self.tokens(other.tokens),
            **tops,
            "generated_text": other.text,
        }
