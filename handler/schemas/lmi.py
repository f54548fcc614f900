"""LMI's rolling-batch schema (seed 004), as the seed states it; docs/wire.md lists every field."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from handler.core import Finish, Request, Token
from handler.errors import InvalidParameter, InvalidPayload, ServingError
from handler.framing import FRAMINGS, JSON, JSONLINES, Framing
from handler.schemas.base import Answer, Call, Context, Reply, front_end_error
from handler.schemas.parameters import read_parameters, show
from handler.schemas.reading import read_field, read_object, read_parameters_field, read_stream, unknown_names
from handler.schemas.replies import Continuation, DocumentReply, Layout, StreamReply
from handler.schemas.reshaped import Reshaped

_NO_DETAILS = {"finish_reason": "error", "generated_tokens": None, "inputs": None, "tokens": None}


class Lmi:
    """Non-streaming: one object. Streaming: a line a token, the last one with `generated_text` and the details.

    Subclasses change the layout (`schemas/tgi.py`), not the flow.
    """

    name = "lmi"
    stream_framing = JSONLINES
    defaults: Mapping[str, Any] = {}  # Sampling fields
    details_default = False

    # -- reading -------------------------------------------------------------------------------------------------

    def parse(self, body: Any, context: Context) -> Call:
        body = read_object(body)
        parameters = read_parameters_field(body)
        prompt = body["inputs"]
        if isinstance(prompt, list):
            raise InvalidPayload(
                "'inputs' must be one string under rolling batch; send one request a prompt, "
                "or use dynamic batching (option.rolling_batch=disable)"
            )
        if not isinstance(prompt, str) or not prompt:
            raise InvalidPayload("'inputs' must be a non-empty string")
        stream = read_stream(body, parameters)
        named = _read_formatter(parameters)
        framing = named or FRAMINGS.get(context.output_formatter or "") or (self.stream_framing if stream else JSON)
        ignored = unknown_names(body, parameters, context)
        request = self.request(prompt, parameters, context)
        streams = framing is not JSON
        if streams and request.sampling.num_sequences > 1:
            raise InvalidParameter(
                "parameters.n, best_of and num_beams must be 1 when streaming: only whole answers hold more"
            )

        def reply(layout: Layout) -> Reply:
            return StreamReply(layout, request, framing) if streams else DocumentReply(layout, request)

        def reshape(change: Callable[[Any], Any]) -> Reply:
            return reply(Reshaped(self, change))

        return Call((request,), reply(self), ignored, streams, None if named else reshape)

    def request(self, prompt: str, parameters: Mapping[str, Any], context: Context) -> Request:
        flags = {name: read_field(parameters, name) for name in ("details", "return_full_text", "truncate")}
        sampling = read_parameters(parameters, context, defaults=self.defaults)
        if sampling.do_sample and sampling.seed is None:  # drawn here, so that an answer can name it
            sampling = replace(sampling, seed=random.getrandbits(53))
        details = self.details_default if flags["details"] is None else flags["details"]
        return Request(
            prompt=prompt,
            sampling=sampling,
            truncate=flags["truncate"],
            # Several sequences, and prompt tokens, are shown in the details: asking for them asks for those.
            details=details or sampling.num_sequences > 1 or sampling.prompt_logprobs,
            full_text=bool(flags["return_full_text"]),
        )

    # -- writing -------------------------------------------------------------------------------------------------

    def token(self, token: Token) -> dict[str, Any]:
        value: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
        if token.special:
            value["special_token"] = True
        return value

    def prompt_token(self, token: Token) -> dict[str, Any]:
        return self.token(token)

    def chunk(self, token: Token, index: int) -> dict[str, Any]:
        """A line of a stream that is not the last."""
        if token.special:
            return {"token": self.token(token)}
        return {"token": {"id": token.id, "text": token.text, "log_prob": token.logprob}}  # the hot path, spelt out

    def last_chunk(self, token: Token, index: int, text: str, details: dict[str, Any] | None) -> dict[str, Any]:
        value = {**self.chunk(token, index), "generated_text": text}
        return value if details is None else {**value, "details": details}

    def stream_details(
        self, request: Request, finish: Finish, num_tokens: int, num_prompt_tokens: int
    ) -> dict[str, Any]:
        return {"finish_reason": finish.value, "generated_tokens": num_tokens, "inputs": request.prompt}

    def details(self, request: Request, best: Continuation, others: Sequence[Continuation]) -> dict[str, Any]:
        value: dict[str, Any] = {
            "finish_reason": best.finish.value,
            "generated_tokens": len(best.tokens),
            "inputs": request.prompt,
            "tokens": [self.token(token) for token in best.tokens],
        }
        if request.sampling.prompt_logprobs:
            value["prefill"] = [self.prompt_token(token) for token in best.prefill]
        if others:
            value["best_of_sequences"] = [self.other(request, other) for other in others]
        return value

    def other(self, request: Request, other: Continuation) -> dict[str, Any]:
        """One of `best_of_sequences`."""
        return {
            "finish_reason": other.finish.value,
            "generated_tokens": len(other.tokens),
            "tokens": [self.token(token) for token in other.tokens],
            "generated_text": other.text,
        }

    def document(self, text: str, details: dict[str, Any] | None) -> Any:
        return {"generated_text": text} if details is None else {"generated_text": text, "details": details}

    def refused(self, error: ServingError) -> Answer:
        """Payload problems are `{"error", "code"}`, the rest has the seed's error document around that."""
        value: dict[str, Any] = {"error": error.message, "code": error.status}
        if isinstance(error, InvalidPayload):
            pass
        elif error.status == 424:
            value = {"generated_text": "", "details": _NO_DETAILS, **value}
        else:
            value = front_end_error(error)
        return Answer(error.status, JSON.content_type, JSON.encode(value))

    def stream_failure(self, error: ServingError) -> Any:
        return {
            "token": {"id": -1, "text": "", "log_prob": -1, "special_token": True},
            "generated_text": "",
            "details": {"finish_reason": "error", "generated_tokens": None, "inputs": None},
            "error": error.message,
            "code": error.status,
        }


def _read_formatter(parameters: Mapping[str, Any]) -> Framing | None:
    """What `output_formatter` names; None when absent."""
    name = read_field(parameters, "output_formatter")
    if name is None or (isinstance(name, str) and name in FRAMINGS):
        return None if name is None else FRAMINGS[name]
    raise InvalidParameter(f"parameters.output_formatter={show(name)}: must be one of {', '.join(FRAMINGS)}")
