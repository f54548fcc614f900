"""TGI's response format. Required keys are never missing, because the text_generation 0.7 client is strict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from handler.core.errors import ServingError
from handler.core.framing import JSON_TEXTS, SLOT, SSE, TOKEN_SLOTS, Framing, dumps
from handler.core.values import Finish, Request, Token
from handler.protocols.kernel.reply import SequenceOutput, TokenEncoder
from handler.protocols.kernel.tensors import TensorValues
from handler.protocols.lmi.api import LmiErrors
from handler.protocols.lmi.request import Lmi
from handler.protocols.lmi.response import StreamEnd, WholeOutput, line_template
from handler.protocols.tgi.api import (
    TgiAnswer,
    TgiBeside,
    TgiCompatDetails,
    TgiCompatStreamDetails,
    TgiDetails,
    TgiError,
    TgiEvent,
    TgiInputs,
    TgiList,
    TgiOthers,
    TgiPromptToken,
    TgiSequence,
    TgiStreamDetails,
    TgiToken,
    TgiTops,
)

_SLOTS = TOKEN_SLOTS._replace(special=SLOT)


class TgiFormat:
    """Base class of the response formats with TGI's tokens and events.

    Before the last event of a stream, `generated_text` and `details` are null.

    Attributes:
        array: whether a non-streaming response is wrapped in an array.
    """

    special_in_text: bool
    array: bool

    def token(self, token: Token) -> TgiToken:
        return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}

    def tokens(self, tokens: Sequence[Token]) -> list[TgiToken]:
        return [self.token(token) for token in tokens]

    def prefill(self, tokens: Sequence[Token]) -> list[TgiPromptToken]:
        return [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in tokens]

    def _tops(self, request: Request, sequence: SequenceOutput) -> TgiTops:
        if not request.sampling.top_logprobs:
            return {}
        return {"top_tokens": [self.tokens(token.top) for token in sequence.tokens]}

    def chunk(self, token: Token, index: int, *, tops: bool = False, outputs: TensorValues | None = None) -> TgiEvent:
        beside: TgiBeside = {"top_tokens": self.tokens(token.top)} if tops else {}
        if outputs is not None:
            beside["outputs"] = outputs
        return {"index": index, "token": self.token(token), **beside, "generated_text": None, "details": None}

    def token_encoder(self, framing: Framing, texts: list[str]) -> TokenEncoder:
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

    def document(
        self, text: str, output: WholeOutput | None, outputs: TensorValues | None = None
    ) -> TgiAnswer | list[TgiAnswer]:
        response: TgiAnswer = {"generated_text": text}
        if output is not None:
            response["details"] = self._details(output)
        if outputs is not None:
            response["outputs"] = outputs
        return [response] if self.array else response

    def _details(self, output: WholeOutput) -> TgiDetails | TgiCompatDetails:
        raise NotImplementedError

    def _stream_details(self, end: StreamEnd) -> TgiStreamDetails:
        """Render details without the prompt, because aiohttp clients read lines of at most 128 KiB."""
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
    """Return the seed that reproduces the sequence at this index, or None if the sequence is not sampled."""
    return request.sampling.seed_of(index) if request.sampling.do_sample else None


def finish_shown(request: Request, finish: Finish, num_tokens: int) -> Finish:
    """Return TGI's finish reason, which is `length` for every response that reaches the maximum number of tokens."""
    return Finish.LENGTH if not request.fill_context and num_tokens >= request.sampling.max_new_tokens else finish


# -- TGI_COMPAT: LMI's requests, answered in TGI's format --------------------------------------------------------------


class TgiCompatErrors(LmiErrors):
    def framed(self, framing: Framing) -> TgiCompatErrors:
        """Return the same format, because TGI clients expect errors as JSON objects even if they request a stream."""
        return self

    def body(self, error: ServingError) -> Any:
        value: TgiError = {"error": error.message, "error_type": error.kind, "code": self.status(error)}
        return value

    tail = body


_MAX_INPUTS = 1 << 16
"""The maximum size of a prompt in details, in bytes of JSON. TGI's asynchronous clients use aiohttp, whose older
versions refuse lines above 128 KiB.
"""


class TgiCompatFormat(TgiFormat):
    """The format of TGI_COMPAT: an array with one object, or server-sent events. Stop strings stay in the text."""

    special_in_text = True
    array = True

    def _stream_details(self, end: StreamEnd) -> TgiCompatStreamDetails:
        """Render TGI's details with LMI's `inputs`, which is omitted if it is too long for TGI's clients."""
        tops: TgiTops = {"top_tokens": [self.tokens(top) for top in end.tops]} if end.tops else {}
        prompt = end.request.prompt
        inputs: TgiInputs = {"inputs": prompt} if len(dumps(prompt)) <= _MAX_INPUTS else {}
        return {**super()._stream_details(end), **inputs, **tops}

    def _details(self, output: WholeOutput) -> TgiCompatDetails:
        request, best, others, _ = output
        more: TgiOthers = {"best_of_sequences": [self._other(request, other) for other in others]} if others else {}
        return {
            "seed": seed_of(request, best.index),
            "prefill": self.prefill(best.prefill) if request.sampling.prompt_logprobs else [],
            "finish_reason": best.finish.value,
            "generated_tokens": len(best.tokens),
            "inputs": request.prompt,
            "tokens": self.tokens(best.tokens),
            **self._tops(request, best),
            **more,
        }

    def _other(self, request: Request, other: SequenceOutput) -> TgiSequence:
        return {
            "seed": seed_of(request, other.index),
            "prefill": [],
            "finish_reason": other.finish.value,
            "generated_tokens": len(other.tokens),
            "tokens": self.tokens(other.tokens),
            **self._tops(request, other),
            "generated_text": other.text,
        }


class TgiCompat(Lmi):
    """The dialect of TGI_COMPAT. It returns details by default, as LMI's own compatibility mode does."""

    name = "tgi_compat"
    errors = TgiCompatErrors()
    description = Lmi.description._replace(
        title="TGI_COMPAT",
        error=TgiError,
        response=TgiList,
        chunk=TgiEvent,
        failure=TgiError,
        streams=(SSE.content_type,),
        refuses_in_frame=False,
    )
    format = TgiCompatFormat()
    stream_framing = SSE
    defaults: Mapping[str, Any] = MappingProxyType({"include_stop": True})
    details_default = True
    reports_seed = True
