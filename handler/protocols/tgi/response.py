"""TGI's format: tokens and events with every key present, as the strict client text_generation 0.7 parses them."""

from __future__ import annotations

from collections.abc import Sequence

from handler.core.framing import JSON_TEXTS, SLOT, TOKEN_SLOTS, Framing, dumps
from handler.core.values import Finish, Request, Token
from handler.protocols.kernel.base import TokenLine
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.lmi.reply import StreamEnd, line_template
from handler.protocols.tensors.outputs import TensorValues
from handler.protocols.tgi.answers import TgiBeside, TgiEvent, TgiPromptToken, TgiStreamDetails, TgiToken, TgiTops

_SLOTS = TOKEN_SLOTS._replace(special=SLOT)


class TgiFormat:
    """Tokens and events in TGI's format; null where a key has no value."""

    special_in_text: bool

    def token(self, token: Token) -> TgiToken:
        return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}

    def tokens(self, tokens: Sequence[Token]) -> list[TgiToken]:
        return [self.token(token) for token in tokens]

    def prefill(self, tokens: Sequence[Token]) -> list[TgiPromptToken]:
        return [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in tokens]

    def _tops(self, request: Request, sequence: SequenceOutput) -> TgiTops:
        return (
            {"top_tokens": [self.tokens(token.top) for token in sequence.tokens]}
            if request.sampling.top_logprobs
            else {}
        )

    def chunk(self, token: Token, index: int, *, tops: bool = False, outputs: TensorValues | None = None) -> TgiEvent:
        beside: TgiBeside = {"top_tokens": self.tokens(token.top)} if tops else {}
        if outputs is not None:
            beside["outputs"] = outputs
        return {"index": index, "token": self.token(token), **beside, "generated_text": None, "details": None}

    def token_line(self, framing: Framing, texts: list[str]) -> TokenLine:
        format = line_template(self.chunk, framing, _SLOTS)
        special_in_text = self.special_in_text

        def line(token: Token) -> bytes:
            id, text, logprob, is_special, _ = token
            texts.append(text if special_in_text or not is_special else "")
            special = b"true" if is_special else b"false"
            return format % (len(texts), id, JSON_TEXTS[text], dumps(logprob), special)

        return line

    def last_chunk(self, chunk: TgiEvent, text: str, end: StreamEnd | None) -> TgiEvent:
        return {**chunk, "generated_text": text, "details": None if end is None else self._stream_details(end)}

    def _stream_details(self, end: StreamEnd) -> TgiStreamDetails:
        """Render details without the prompt: aiohttp's clients read lines of at most 128 KiB."""
        details: TgiStreamDetails = {
            "finish_reason": self._finish(end.request, end.finish, end.num_tokens),
            "generated_tokens": end.num_tokens,
            "seed": seed_of(end.request),
            "input_length": end.num_prompt_tokens,
        }
        if end.prefill is not None:
            details["prefill"] = self.prefill(end.prefill)
        return details

    def _finish(self, request: Request, finish: Finish, num_tokens: int) -> str:
        return finish.value


def seed_of(request: Request, index: int = 0) -> int | None:
    """Return the seed that reproduces sequence number `index`; None without sampling."""
    return request.sampling.seed_of(index) if request.sampling.do_sample else None


def finish_shown(request: Request, finish: Finish, num_tokens: int) -> Finish:
    """Return the reason for the client: in TGI the last token allowed always ends an answer by length."""
    return Finish.LENGTH if not request.fill_context and num_tokens >= request.sampling.max_new_tokens else finish
