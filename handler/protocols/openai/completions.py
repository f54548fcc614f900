"""OpenAI's text completions at /v1/completions, with vLLM's and TGI's additions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSON, SSE_DONE, Framing
from handler.core.values import Adapter, Request, Sampling, keep_last
from handler.protocols.kernel.base import Dialect, ParsedRequest, Reply
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.parameters import read_sampled
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.lax import PYDANTIC, relaxed_by
from handler.protocols.kernel.reply import PromptOnly
from handler.protocols.kernel.schema.shapes import Shape
from handler.protocols.kernel.texts import read_texts, text_of, texts_shape
from handler.protocols.openai.completions_response import TextDocument, TextFormat, TextStream
from handler.protocols.openai.errors import ERRORS
from handler.protocols.openai.parameters import COMPLETIONS, MODEL, harmless, read_model
from handler.protocols.openai.request import STREAM, names, read_stream, streaming, unknown_fields
from handler.protocols.openai.response import Head, identity

MAX_PROMPTS = 256
MAX_SEQUENCES = 1024  # of all prompts together: more would hold the engine for one client

_MAX_TOKENS = 16  # OpenAI's and vLLM's default
FIELDS: Mapping[str, Shape] = {"prompt": texts_shape(MAX_PROMPTS), **MODEL, **STREAM}


class OpenAiCompletions(Dialect):
    """It samples unless `temperature` is 0.

    Subclasses change the fields and the framings (`lmi/asynchronous.py`), not the flow.

    Attributes:
        table: the fields that set parameters.
        fields: the others, with what they take.
        whole, stream: the framings of whole answers and of streams.
    """

    name = "openai_completions"
    errors: ErrorFormat = ERRORS
    table = COMPLETIONS
    fields: Mapping[str, Shape] = FIELDS
    whole: Framing = JSON
    stream: Framing = SSE_DONE

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("the body must be a JSON object with 'prompt'")
        body = self._relax()(body)
        model, adapter = self.read_model(body, context)
        prompts = read_texts(body.get("prompt"), "prompt", MAX_PROMPTS, "prompts")
        stream, usage = read_stream(body, context)
        prompt_only = body.get("max_tokens") == 0
        # A new token's alternatives are not wanted where no token is shown.
        able = _with_support_for(context, "top_logprobs") if prompt_only else context
        parameters = read_sampled(
            body, able, generation=context.generation, max_new_tokens=_MAX_TOKENS, table=self.table
        )
        ignored = [*report_unknown(unknown_fields(body, self._known), body, context), *harmless(body)]
        sampling, echo = parameters.sampling, parameters.others.get("echo", False)
        logprobs = body.get("logprobs")
        _check(sampling, stream, prompt_only=prompt_only, echo=echo, scored=echo and logprobs is not None)
        if len(prompts) * sampling.num_sequences > MAX_SEQUENCES:
            most = MAX_SEQUENCES // len(prompts)
            raise InvalidParameter(f"n={sampling.num_sequences}: with {len(prompts)} prompts at most {most}")
        ranked = sampling.best_of > sampling.n
        sampling = sampling._replace(logprobs=logprobs is not None or ranked)
        if echo and logprobs is not None:
            sampling = _with_prompt_logprobs(sampling, logprobs, context)
        if prompt_only:  # the engines generate one token at least
            sampling = sampling._replace(max_new_tokens=1, logprobs=False, top_logprobs=0)
        requests = tuple(
            Request(
                text_of(prompt, "prompt", context),
                sampling,
                truncation=keep_last(parameters.others.get("truncate")),
                prompt_ids=None if isinstance(prompt, str) else prompt,
                adapter=adapter,
                priority=parameters.others.get("priority", 0),
                names=names("prompt", parameters),
            )
            for prompt in prompts
        )
        shown = [request.prompt if echo else "" for request in requests]
        format = TextFormat(logprobs, shown, sampling.n, token_ids=parameters.others.get("return_token_ids", False))
        id, created = identity("cmpl")
        head = Head(id, created, model, context.fingerprint)
        reply: Reply = (
            TextStream(head, format, sampling.n, usage, self.stream, self.errors)
            if stream
            else TextDocument(head, format, sampling.num_sequences, self.whole)
        )
        if prompt_only:
            reply = PromptOnly(reply)
        if stream:
            return streaming(requests, reply, self.errors, ignored, self.stream)
        return ParsedRequest(requests, reply, self.errors, ignored)

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.fields) | self.table.parameters.keys()

    @classmethod
    @functools.cache
    def _relax(cls) -> Callable[[Any], Any]:
        """Return what puts the body's numbers and flags right."""
        return relaxed_by(PYDANTIC, {**cls.fields, **cls.table.shapes})

    def read_model(self, body: Mapping[str, Any], context: ServerContext) -> tuple[str, Adapter | None]:
        """Read the model's name for the answer, and the LoRA adapter."""
        return read_model(body, context)


def _check(sampling: Sampling, stream: bool, *, prompt_only: bool, echo: bool, scored: bool) -> None:
    """Refuse what a stream cannot rank or order, and `max_tokens` 0 without an answer to give."""
    n, best_of = sampling.n, sampling.best_of
    if stream and best_of > n:
        raise InvalidParameter(f"best_of={best_of}: must be n={n} when streaming: the best is known at the end")
    if stream and scored and n > 1:
        raise InvalidParameter(f"n={n}: must be 1 when streaming with echo and logprobs")
    if prompt_only:
        if not echo:
            raise InvalidParameter("max_tokens=0: needs echo=true: there would be no answer")
        for name, value in {"n": n, "best_of": best_of}.items():
            if value > 1:
                raise InvalidParameter(f"{name}={value}: must be 1 with max_tokens=0: the answer is the prompt")


def _with_prompt_logprobs(sampling: Sampling, logprobs: int, context: ServerContext) -> Sampling:
    """Ask for the log-probabilities of the prompt's tokens, with as many alternatives."""
    if why := context.unsupported.get("prompt_logprobs"):
        raise InvalidParameter(f"echo=true: with logprobs the engine {context.engine} lacks it: {why}")
    if logprobs and (why := context.unsupported.get("prompt_top_logprobs")):
        raise InvalidParameter(f"logprobs={logprobs}: with echo the engine {context.engine} lacks it: {why}")
    return sampling._replace(prompt_logprobs=True, prompt_top_logprobs=logprobs)


def _with_support_for(context: ServerContext, field: str) -> ServerContext:
    """Return the context of an engine that supports `field`."""
    return replace(context, unsupported={name: why for name, why in context.unsupported.items() if name != field})
