"""MindIE's inference at `/`, with requests like those of TGI 0.9.4 and responses in MindIE's own format.

Source: Huawei's MindIE Service documentation, the TGI-compatible interface of `POST /`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from handler.core.framing import JSON_TEXTS, SSE, TOKEN_SLOTS, Framing
from handler.core.values import Request, Token, keep_last
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, Dialect, ParsedRequest
from handler.protocols.kernel.parameters import read_all
from handler.protocols.kernel.reply import TokenEncoder
from handler.protocols.kernel.tensors import TensorValues
from handler.protocols.lmi.request import EXAMPLE
from handler.protocols.lmi.response import StreamEnd, WholeOutput, line_template
from handler.protocols.tgi.api import MindieAnswer, MindieDetails, MindieError, MindieErrors, MindieEvent, MindieToken
from handler.protocols.tgi.native import (
    PARAMETERS,
    TGI_DEFAULTS,
    TOP_LEVEL,
    Body,
    SerdeType,
    body_shape,
    check_sampling,
    check_truncate,
    parsed_request,
    read_body,
    require,
    table_of,
    unknown,
)
from handler.protocols.tgi.response import finish_shown

MAX_CHARACTERS = 512 << 10

_LACKING = ("best_of", "frequency_penalty", "top_n_tokens", "grammar")
"""The TGI parameters that MindIE does not have."""

_NOT_LIMITED: Mapping[str, Mapping[str, Any]] = {
    "typical_p": {"type": "number"},
    "stop": {"type": "array", "items": {"type": "string"}},
}
"""The schemas of the parameters that MindIE accepts without TGI's limits."""

KINDS: Mapping[str, SerdeType] = {
    name: kind._replace(null=True, schema=_NOT_LIMITED.get(name, kind.schema))
    for name, kind in PARAMETERS.items()
    if name not in _LACKING
}
MINDIE_TOP_LEVEL: Mapping[str, SerdeType] = {
    **TOP_LEVEL,
    **{name: TOP_LEVEL[name]._replace(null=True) for name in ("parameters", "stream")},
}

_WITHOUT_EFFECT = {"typical_p": 1.0, "watermark": False}
"""Parameters that MindIE accepts but that have no effect, with their defaults. Other values are reported as ignored."""

TABLE = table_of(KINDS.keys() - _WITHOUT_EFFECT.keys())


class Mindie(Dialect):
    """MindIE's dialect. A null field counts as absent, as in MindIE's own example."""

    name = "mindie"
    errors = MindieErrors()
    description = Description(
        title="MindIE",
        request="MindieRequest",
        request_shape=partial(body_shape, MINDIE_TOP_LEVEL, KINDS, maxLength=MAX_CHARACTERS),
        error=MindieError,
        example=EXAMPLE,
        response=MindieAnswer,
        chunk=MindieEvent,
        streams=(SSE.content_type,),
    )
    special_in_text = False
    unique_keys = True

    # -- reading -------------------------------------------------------------------------------------------------

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        read = read_body(body, MINDIE_TOP_LEVEL, KINDS)
        _check_limits(read, context)
        request = _request(read, context)
        names = [name for name, neutral in _WITHOUT_EFFECT.items() if read.parameters.get(name, neutral) != neutral]
        ignored = [*unknown(body, context, KINDS), *(f"parameters.{name}" for name in names)]
        return parsed_request(self, MindieErrors, request, ignored, streams=read.stream)

    # -- writing -------------------------------------------------------------------------------------------------

    def chunk(
        self, token: Token, index: int, *, tops: bool = False, outputs: TensorValues | None = None
    ) -> MindieEvent:
        return {
            "token": {"id": token.id, "text": token.text, "logprob": None, "special": None},
            "generated_text": None,
            "details": None,
        }

    def token_encoder(self, framing: Framing, texts: list[str]) -> TokenEncoder:
        format = line_template(self.chunk, framing, TOKEN_SLOTS)

        def line(token: Token) -> bytes:
            id, text, _, is_special, _ = token
            texts.append("" if is_special else text)
            return format % (id, JSON_TEXTS[text])

        return line

    def last_chunk(self, chunk: MindieEvent, text: str, end: StreamEnd | None) -> MindieEvent:
        return {**chunk, "generated_text": text, "details": None if end is None else _stream_details(end)}

    def document(self, text: str, output: WholeOutput | None, outputs: TensorValues | None = None) -> MindieAnswer:
        return {"generated_text": text} if output is None else {"details": _details(output), "generated_text": text}


def _stream_details(end: StreamEnd) -> MindieDetails:
    return {
        "prompt_tokens": end.num_prompt_tokens,
        "finish_reason": finish_shown(end.request, end.finish, end.num_tokens).value,
        "generated_tokens": end.num_tokens,
        "seed": end.request.sampling.seed,
    }


def _details(output: WholeOutput) -> MindieDetails:
    request, best, _, num_prompt_tokens = output
    num_tokens = len(best.tokens)
    return {
        "finish_reason": finish_shown(request, best.finish, num_tokens).value,
        "generated_tokens": num_tokens,
        "prefill": _tokens(best.prefill),
        "prompt_tokens": num_prompt_tokens,
        "seed": request.sampling.seed,
        "tokens": _tokens(best.tokens),
    }


def _tokens(tokens: Sequence[Token]) -> list[MindieToken]:
    return [{"id": token.id, "logprob": None, "special": None, "text": token.text} for token in tokens]


def _check_limits(read: Body, context: ServerContext) -> None:
    """Check the ranges of the body fields, as MindIE does."""
    params = read.parameters
    no_prefill = not (read.stream and params.get("decoder_input_details"))
    require(no_prefill, "`decoder_input_details` == true is not supported when streaming tokens")
    require(read.inputs != "", "`inputs` cannot be empty")
    size = len(read.inputs)
    require(size <= MAX_CHARACTERS, f"`inputs` must have at most {MAX_CHARACTERS} characters. Given: {size}")
    check_sampling({name: value for name, value in params.items() if name != "typical_p"})
    require(0 < params.get("typical_p", 1) <= 1, "`typical_p` must be > 0.0 and <= 1.0")
    most = (1 << 31) - 1 if context.vocabulary is None else len(context.vocabulary) - 1
    require(params.get("top_k", 1) <= most, f"`top_k` must be <= {most}. Given: {params.get('top_k')}")
    require(params.get("seed", 1) > 0, "`seed` must be strictly positive")
    require(params.get("max_new_tokens", 1) > 0, "`max_new_tokens` must be strictly positive")
    check_truncate(params, context)


def _request(read: Body, context: ServerContext) -> Request:
    params = {name: value for name, value in read.parameters.items() if (name, value) != ("adapter_id", "None")}
    parameters = read_all(params, context, defaults={**TGI_DEFAULTS, "max_new_tokens": 20}, table=TABLE)
    sampling = parameters.sampling
    details = params.get("details", False) or sampling.prompt_logprobs
    if details and sampling.seed is None:
        sampling = sampling._replace(seed=random.randrange(1, 1 << 53))  # MindIE's details always have a seed
    return Request(
        prompt=read.inputs,
        sampling=sampling._replace(logprobs=False),  # MindIE's log-probabilities are always null
        truncation=keep_last(params.get("truncate")),
        details=details,
        full_text=params.get("return_full_text", False),
        adapter=parameters.others.get("adapter"),
    )
