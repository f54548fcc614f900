"""LMI's rolling-batch schema (seed 004), as the seed states it; docs/wire.md lists every field."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from handler.core import Delta, Finish, Request, Sampling, Token
from handler.errors import InvalidParameter, InvalidPayload, ServingError
from handler.framing import FRAMINGS, JSON, JSONLINES, Framing
from handler.schemas.base import Answer, Call, Context
from handler.schemas.parameters import PARAMETERS, REQUEST_FIELDS, read_parameters, show

_TOP_LEVEL = {"inputs", "parameters", "stream"}
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
        framing = self._framing(body, parameters, context)
        ignored = unknown_names(body, parameters, context)
        request = self.request(prompt, parameters, context)
        if framing is JSON:
            return Call((request,), LmiDocument(self, request), ignored)
        request = replace(request, stream=True)
        if request.sampling.num_sequences > 1:
            raise InvalidParameter(
                "parameters.n, best_of and num_beams must be 1 when streaming: only whole answers hold more"
            )
        return Call((request,), LmiStream(self, request, framing), ignored, streams=True)

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

    def _framing(self, body: Mapping[str, Any], parameters: Mapping[str, Any], context: Context) -> Framing:
        stream = body.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise InvalidPayload(f"'stream' must be true or false, not {show(stream)}")
        if stream is None:
            stream = read_field(parameters, "stream")
        name = read_field(parameters, "output_formatter")
        if name is None:
            name = context.output_formatter
        elif not isinstance(name, str) or name not in FRAMINGS:
            raise InvalidParameter(f"parameters.output_formatter={show(name)}: must be one of {', '.join(FRAMINGS)}")
        if name is not None:
            return FRAMINGS[name]
        return self.stream_framing if stream else JSON

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
        return {"token": self.token(token)}

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
        else:  # what DJL's front end would say
            value = {"code": error.status, "type": error.type, "message": error.message, "error": error.message}
        return Answer(error.status, JSON.content_type, JSON.encode(value))

    def stream_failure(self, error: ServingError) -> Any:
        return {
            "token": {"id": -1, "text": "", "log_prob": -1, "special_token": True},
            "generated_text": "",
            "details": {"finish_reason": "error", "generated_tokens": None, "inputs": None},
            "error": error.message,
            "code": error.status,
        }


class Continuation:
    """One sequence of a whole answer, as far as it has come; `index` numbers those of one request."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.tokens: list[Token] = []
        self.prefill: Sequence[Token] = ()
        self.finish = Finish.ERROR

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens])

    @property
    def logprob(self) -> float:
        return sum(token.logprob or 0.0 for token in self.tokens)


class LmiStream:
    """A stream of lines, one a token."""

    def __init__(self, schema: Lmi, request: Request, framing: Framing) -> None:
        self._schema = schema
        self._request = request
        self._framing = framing
        self._texts: list[str] = []
        self._num_tokens = 0
        self._num_prompt_tokens = 0
        self._prompt = request.prompt
        self._prefill: Sequence[Token] | None = None
        self.content_type = framing.content_type
        self.finished = False

    def start(self, index: int, prompt: str, prompt_tokens: int) -> None:
        self._num_prompt_tokens = prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is not None:
            self.finished = True
            return self._framing.encode(self._schema.stream_failure(delta.error))
        if delta.finish is None and len(delta.tokens) == 1 and delta.prefill is None:  # nearly every delta
            token = delta.tokens[0]
            self._num_tokens += 1
            self._texts.append(token.text)
            return self._framing.encode(self._schema.chunk(token, self._num_tokens))
        if delta.prefill is not None:
            self._prefill = delta.prefill
        schema, encode = self._schema, self._framing.encode
        lines = []
        tokens = delta.tokens
        if delta.finish is not None:
            *tokens, last = tokens or (Token(-1, "", None, True),)
        for token in tokens:
            self._num_tokens += 1
            self._texts.append(token.text)
            lines.append(encode(schema.chunk(token, self._num_tokens)))
        if delta.finish is not None:
            lines.append(encode(self._last(last, delta.finish)))
        return lines[0] if len(lines) == 1 else b"".join(lines)

    def _last(self, token: Token, finish: Finish) -> Any:
        self.finished = True
        self._num_tokens += token.id >= 0
        self._texts.append(token.text)
        request = self._request
        text = (request.prompt if request.full_text else "") + "".join(self._texts)
        details = None
        if request.details:
            details = self._schema.stream_details(request, finish, self._num_tokens, self._num_prompt_tokens)
            if self._prefill is not None:
                details["prefill"] = [self._schema.prompt_token(token) for token in self._prefill]
        return self._schema.last_chunk(token, self._num_tokens, text, details)

    def refused(self, error: ServingError) -> Answer:
        return self._schema.refused(error)


class LmiDocument:
    """One JSON document, written when all sequences have ended."""

    content_type = JSON.content_type

    def __init__(self, schema: Lmi, request: Request) -> None:
        self._schema = schema
        self._request = request
        self._sequences = [Continuation(index) for index in range(request.sampling.num_sequences)]
        self._unfinished = len(self._sequences)
        self.finished = False

    def start(self, index: int, prompt: str, prompt_tokens: int) -> None:
        pass

    def feed(self, index: int, delta: Delta) -> bytes:
        assert delta.error is None, "a failed document is written by refused()"
        sequence = self._sequences[delta.sequence]
        sequence.tokens += delta.tokens
        if delta.prefill is not None:
            sequence.prefill = delta.prefill
        if delta.finish is None:
            return b""
        sequence.finish = delta.finish
        self._unfinished -= 1
        self.finished = not self._unfinished
        return JSON.encode(self._document()) if self.finished else b""

    def _document(self) -> Any:
        best, *others = returned(self._sequences, self._request.sampling)
        best.prefill = self._sequences[0].prefill
        request = self._request
        text = (request.prompt if request.full_text else "") + best.text
        details = self._schema.details(request, best, others) if request.details else None
        return self._schema.document(text, details)

    def refused(self, error: ServingError) -> Answer:
        return self._schema.refused(error)


def returned(sequences: Sequence[Continuation], sampling: Sampling) -> list[Continuation]:
    """The sequences that the client gets, the most probable first; beams come ranked by the engine."""
    ranked = list(sequences)
    if sampling.num_beams == 1:
        ranked.sort(key=lambda sequence: -sequence.logprob)
    return ranked[: sampling.n] if sampling.n > 1 else ranked


def read_object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise InvalidPayload("the body must be a JSON object with 'inputs'")
    if "inputs" not in body:
        raise InvalidPayload("the body has no 'inputs'")
    return body


def read_parameters_field(body: Mapping[str, Any]) -> Mapping[str, Any]:
    found = body.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidPayload(f"'parameters' must be an object, not {show(found)}")
    return found


def read_field(parameters: Mapping[str, Any], name: str) -> Any:
    """One of the names under `parameters` that are not sampling; None when absent."""
    value = parameters.get(name)
    if value is None:
        return None
    try:
        return REQUEST_FIELDS[name](value)
    except ValueError as error:
        raise InvalidParameter(f"parameters.{name}={show(value)}: {error}") from None


def unknown_names(body: Mapping[str, Any], parameters: Mapping[str, Any], context: Context) -> list[str]:
    """Names that mean nothing here: never silently dropped."""
    found = [name for name in body if name not in _TOP_LEVEL]
    found += [f"parameters.{name}" for name in parameters if name not in PARAMETERS and name not in REQUEST_FIELDS]
    if "adapters" in found and body["adapters"] not in (None, [], ""):
        raise InvalidPayload("'adapters': the engine has no LoRA adapters")
    if found and context.refuse_unknown:
        raise InvalidPayload(f"unknown names: {', '.join(found)} (option.unknown_parameters=refuse)")
    return found
