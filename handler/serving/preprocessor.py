"""Preprocesses requests: checks the head, and decodes and parses the body."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from handler.core.errors import (
    InvalidPayload,
    NotJson,
    ServingError,
    UnsupportedMedia,
)
from handler.core.values import Adapter, Request, Task
from handler.engines.base import EngineInfo, Tokenizer
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.plugins.custom_messages import CustomReader, FormatterTokenizer, with_formatter
from handler.plugins.functions import AdapterFormatters, Formatters, InputFormatter, OutputFormatter
from handler.protocols.kernel.body import decode, decode_text, decoded_size
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import BinaryBody, Dialect, ParsedRequest, WithoutEngine
from handler.protocols.kernel.readers import merge_adapters
from handler.protocols.kernel.stored import NOTHING, Recalled
from handler.protocols.triton.infer import HEADER as TENSORS_HEADER
from handler.serving.compression import check_encoding
from handler.serving.encoder import Encoder
from handler.serving.forms import read_form
from handler.serving.head import (
    ADAPTER_HEADERS,
    DETACHES,
    NO_FORMATTERS,
    PATH_MODEL,
    Head,
    adapter_of,
    media_type,
    owner_of,
)
from handler.serving.large_bodies import LARGE, MOST_DECODED, LargeBodies
from handler.serving.request.plan import Decoded, Plan, Stage, Time
from handler.serving.sessions import HEADER, SESSION_CALL, Sessions, answer_call, session_call, session_of
from handler.serving.stored_responses import OwnersKeeper, ResponseStore

_JSON_LINES = re.compile(r"application/(x-)?(jsonlines|ndjson|jsonl)")
"""Content types of JSON lines. As in LMI, a request must contain a single line, as sent by batch transform."""

_JSON_TYPES = re.compile(rf"|application/(.+\+)?json|application/x-www-form-urlencoded|{_JSON_LINES.pattern}")
"""Content types that are read as JSON: those of JSON, the default of `curl -d`, and a missing content type."""

_JSON, _FORM = "application/json", "multipart/form-data"

TARGET_MODEL = "x-amzn-sagemaker-target-model"


class Preprocessor:
    """Decodes, parses and checks requests. Thread-safe.

    Args:
        dialect: dialect of routes that have no dialect of their own.
        context: facts about the server that dialects need.
        tokenizer: tokenizer of the model.
        engine_info: function that returns the description of the engine, or None while the engine is loading.
        formatters: input and output formatters of model.py.
        validator: validator of structured output, or None if no validation is needed.
        sessions: open sessions, or None if sessions are off.
        store: store of responses for later requests, or None if responses are not stored.
        whole: whether the host cannot stream. In DJL, all responses of a dynamic batch have the same content type.

    Attributes:
        encoder: encoder that tokenizes parsed requests and checks their limits.
        plan: the stages that read the head of a request.
        adapter_formatters: formatters in the model.py files of adapters.
    """

    def __init__(
        self,
        dialect: Dialect,
        context: ServerContext,
        tokenizer: Tokenizer,
        engine_info: Callable[[], EngineInfo | None],
        formatters: Formatters = NO_FORMATTERS,
        validator: StructuredOutputValidator | None = None,
        sessions: Sessions | None = None,
        store: ResponseStore | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.dialect = dialect
        self._sessions = sessions
        self.store = store
        self.large_bodies = LargeBodies()
        self.formatters = formatters
        self.adapter_formatters = AdapterFormatters()
        self._keywords = {"tokenizer": FormatterTokenizer(tokenizer.encode), "configs": formatters.configs}
        self.encoder = Encoder(tokenizer, engine_info, context.config.max_input_len, validator)
        self.context = replace(
            context,
            vocabulary=tokenizer.vocabulary,
            chat_template=tokenizer.chat_template,
            most_tokens=self.encoder.max_tokens,
        )
        self._whole = whole

        self.plan = Plan(
            (
                Stage("target model", Time.LOOP, headers=frozenset({TARGET_MODEL}), head=_refuse_target),
                Stage("session", Time.LOOP, headers=frozenset({HEADER}), head=self._find_session, parsed=_for_session),
                Stage("adapter", Time.LOOP, headers=ADAPTER_HEADERS, head=self._find_adapter, parsed=_for_adapter),
                Stage("encoding", Time.LOOP, headers=frozenset({"content-encoding"}), head=self._check_encoding),
                Stage("tensors", Time.LOOP, headers=frozenset({TENSORS_HEADER})),
                Stage("content type", Time.LOOP, head=self._choose_reader),
            )
        )

    def read_head(self, head: Head) -> Head:
        """Return the head with the values of its headers, as the plan of a server does.

        Raises:
            InvalidPayload: a header is invalid. The message contains its name.
            UnsupportedMedia: the content type or encoding is not supported.
            BadRequest: the session does not exist, or sessions are off.
        """
        return self.plan.read_head(head)

    def _find_session(self, head: Head) -> Head:
        id = head.headers[HEADER]
        return head._replace(session=session_of(self._sessions, id, owner_of(head.headers)) if id else None)

    def _find_adapter(self, head: Head) -> Head:
        return head._replace(adapter=adapter_of(head.headers, self.context))

    def _check_encoding(self, head: Head) -> Head:
        check_encoding(head.encoding)
        return head

    def _choose_reader(self, head: Head) -> Head:
        headers, dialect = head.headers, head.dialect
        owner, is_configured = owner_of(headers), dialect is None
        if not head.stages and headers.get("content-type") == _JSON:  # as nearly always
            dialect = self.dialect if dialect is None else dialect
            return Head(headers, dialect, _JSON, None, self.formatters, None, owner, is_configured, self._read_json)
        head = head._replace(
            dialect=self.dialect_of(head),
            media_type=media_type(headers),
            formatters=self.adapter_formatters.of(head.adapter, self.formatters),
            owner=owner,
            is_configured=is_configured,
        )
        self._check_media_type(head)
        return head._replace(read=self._reader(head))

    def _reader(self, head: Head) -> Callable[[bytes, Head], Decoded]:
        if head.is_prompt:
            return self._read_prompt
        return _read_form if self._is_form(head) else self._read_document

    def _check_media_type(self, head: Head) -> None:
        formatter, dialect = self._input_of(head.formatters), self.dialect_of(head)
        any_media = formatter is not None and not formatter.takes_payload
        if any_media if head.is_configured else dialect.any_media:
            return
        is_json = _JSON_TYPES.fullmatch(head.media_type) or head.media_type in dialect.media_types
        if not head.is_prompt and not self._is_form(head) and not is_json:
            alternatives = f" or {_FORM}, {dialect.forms}" if dialect.forms else ""
            alternatives = alternatives or (" or text/plain" if head.is_configured else "")
            raise UnsupportedMedia(
                f"content type {head.media_type!r} is not supported; send application/json{alternatives}"
            )

    def dialect_of(self, head: Head) -> Dialect:
        """Return the dialect of a request body."""
        return self.dialect.of_headers(head.headers) if head.dialect is None else head.dialect

    def _is_form(self, head: Head) -> bool:
        return head.media_type == _FORM and bool(self.dialect_of(head).forms)

    def input_formatter(self, head: Head) -> str:
        """Return the title of the input formatter for error messages, or "" if no formatter reads the body."""
        if not head.is_configured:
            return ""
        if self.adapter_formatters.read:
            return "input formatter of an adapter's model.py"
        formatter = head.formatters.input  # possibly of an adapter that was unregistered in the meantime
        return "" if formatter is None else formatter.title

    def decoded_size(self, body: bytes, head: Head) -> int:
        """Return the maximum memory, in bytes, that the result of `decode` needs."""
        if head.media_type != _JSON and (head.is_prompt or self._is_form(head)):
            return decoded_size(body, 0)
        is_limited = len(body) >= LARGE and not self.input_formatter(head)
        return decoded_size(body, MOST_DECODED if is_limited else sys.maxsize)

    def decode(self, body: bytes, head: Head) -> Decoded:
        """Decode a body. An input formatter of model.py reads only bodies of the configured dialect.

        A large body must be decoded on a thread of `large_bodies`.

        Raises:
            NotJson: the body is not valid JSON.
            TooLarge: the body contains too much data, or takes too long to decode.
            Unavailable: the process that decodes large bodies cannot be started.
            FormatterFailed: the input formatter failed.
            BadRequest: the body is meant to open or close a session, but is not valid.
        """
        try:
            return self._decode(body, head)
        except NotJson:
            media = head.media_type
            if _JSON_LINES.fullmatch(media) and (num_lines := sum(map(bool, map(bytes.strip, body.splitlines())))) > 1:
                raise NotJson(
                    f"{media}: a request must be one line of JSON, but this body has {num_lines} lines; send each "
                    "line as a separate request (in batch transform: SplitType=Line, BatchStrategy=SingleRecord)"
                ) from None
            raise

    def _decode(self, body: bytes, head: Head) -> Decoded:
        assert head.read is not None, "the head has been read"
        if head.is_configured:
            if SESSION_CALL in body and not head.is_prompt and (call := session_call(body)):
                return Decoded({}, session_call=call)
            if self.adapter_formatters.read or head.formatters.input is not None:
                formatter = self._input_formatter(body, head)
                if formatter is not None:
                    reader = CustomReader(formatter, functools.partial(self._read_value, head=head), self._keywords)
                    return Decoded(*reader.read(body, head.headers, head.session))
        return head.read(body, head)

    def _read_document(self, body: bytes, head: Head) -> Decoded:
        """Decode JSON, which may be followed by binary data if a header tells the length of the document."""
        length = self.dialect_of(head).document_length(body, head.headers)
        decoded = self._read_json(body[:length], head)
        if length is None:
            return decoded
        return decoded._replace(value=BinaryBody(decoded.value, body[length:], head.media_type))

    def _read_json(self, body: bytes, head: Head) -> Decoded:
        unique_keys = self.dialect.unique_keys if head.dialect is None else head.dialect.unique_keys
        if len(body) < LARGE:
            return Decoded(decode(body, unique_keys=unique_keys))
        value, size = self.large_bodies.decode(body, plain=False, unique_keys=unique_keys)
        return Decoded(value, size=size)

    def _read_prompt(self, body: bytes, head: Head) -> Decoded:
        if len(body) < LARGE:
            return Decoded({"inputs": decode_text(body)})
        value, size = self.large_bodies.decode(body, plain=True, unique_keys=False)
        return Decoded(value, size=size)

    def _input_formatter(self, body: bytes, head: Head) -> InputFormatter | None:
        """Return the input formatter of the adapter in the head or body, or else that of the model."""
        formatters = head.formatters
        if self.adapter_formatters.read and head.adapter is None:
            with contextlib.suppress(ServingError):  # a body that is not JSON may be meant for the model's formatter
                adapter = self._adapter_in(self._read_value(body, head))
                formatters = self.adapter_formatters.of(adapter, self.formatters)
        return self._input_of(formatters)

    def _input_of(self, formatters: Formatters) -> InputFormatter | None:
        formatter = formatters.input
        return None if formatter is None else formatter.as_in(asynchronous=self.context.config.async_schema)

    def _adapter_in(self, body: Any) -> Adapter | None:
        """Return the adapter from `adapters` in the body, or None. The field `model` does not select formatters."""
        if not isinstance(body, dict):
            return None
        adapters = body.get("adapters")
        name = adapters[0] if isinstance(adapters, list) else adapters
        return self.context.adapters.find(name) if isinstance(name, str) and not self.context.no_adapters else None

    def _read_value(self, body: bytes, head: Head) -> Any:
        if head.is_prompt:
            return {"inputs": decode_text(body)}
        return decode(body, unique_keys=self.dialect_of(head).unique_keys)

    def close(self) -> None:
        self.large_bodies.close()
        if self._sessions is not None:
            self._sessions.end()
        if self.store is not None:
            self.store.close()

    def parse(
        self, body: Decoded, head: Head, recalled: Recalled | None = None, keeper: OwnersKeeper | None = None
    ) -> ParsedRequest:
        """Parse a decoded body.

        Args:
            recalled: stored responses that the body refers to.
            keeper: stores the response. It is None, as `recalled` is, if the request neither uses stored responses nor
                stores its own response.

        Raises:
            ServingError: the dialect refuses the body.
        """
        if body.session_call:
            id = head.headers.get(HEADER)
            return answer_call(self._sessions, body.session_call, id, head.owner, self.dialect.errors)
        model, formats = head.headers.get(PATH_MODEL, ""), self._may_format(head)
        may_detach = DETACHES in head.headers
        request_context = RequestContext(
            head.adapter, model, keeper, recalled or NOTHING, formats, head.owner, may_detach
        )
        call = self.dialect_of(head).parse(body.value, self.context, request_context)
        if not isinstance(call.course, WithoutEngine):  # models for any task can tokenize a prompt
            for request in call.requests:
                check_task(request, self.context.task)
        if call.streams and self._whole:
            raise InvalidPayload("'stream' is not supported by DJL's dynamic batching; it requires a rolling batch")
        for stage in head.stages:
            if stage.parsed is not None:
                call = stage.parsed(call, head)
        formatter = self._output_formatter(body, head) if formats else None
        if formatter is None:
            return call if call.reply.shows_logprobs else _without_logprobs(call)
        compat = self.dialect.name == "tgi_compat"
        return with_formatter(call, formatter, body.value, body.given, tgi_compat=compat, session=head.session)

    @property
    def has_formatters(self) -> bool:
        """Whether model.py or the model.py of an adapter may have formatters."""
        own = self.formatters
        return own.input is not None or own.output is not None or not self.context.no_adapters

    def _may_format(self, head: Head) -> bool:
        """Return whether a request may have an output formatter."""
        return head.is_configured and (head.formatters.output is not None or self.adapter_formatters.exist)

    def _output_formatter(self, body: Decoded, head: Head) -> OutputFormatter | None:
        """Return the output formatter of the adapter in the head or body, or else that of the model."""
        if head.adapter is None and self.adapter_formatters.exist:
            return self.adapter_formatters.of(self._adapter_in(body.value), self.formatters).output
        return head.formatters.output


_ROUTES = {
    Task.GENERATION: "/v1/chat/completions, /generate and similar routes",
    Task.EMBEDDING: "/v1/embeddings, /embed and similar routes",
    Task.CLASSIFICATION: "/predict",
    Task.RERANK: "/rerank and similar routes",
    Task.TRANSCRIPTION: "/v1/audio/transcriptions, /v1/audio/translations",
}
_KINDS = {
    "embed": Task.EMBEDDING,
    "score": Task.RERANK,
    "classify": Task.CLASSIFICATION,
    "labels": Task.GENERATION,
}


def check_task(request: Request, task: Task) -> None:
    """Raise InvalidPayload if the model serves a different task."""
    generated = Task.TRANSCRIPTION if request.transcribes else Task.GENERATION
    kind = generated if request.pooling is None else _KINDS[request.pooling.kind]
    if kind is not task:
        raise InvalidPayload(
            f"this server is for {task.value} (option.task), on {_ROUTES[task]}; this request is for {kind.value}"
        )


def _refuse_target(head: Head) -> Head:
    if head.headers[TARGET_MODEL]:
        raise InvalidPayload(f"header {TARGET_MODEL}: multi-model hosting is not supported by this server")
    return head


def _for_adapter(call: ParsedRequest, head: Head) -> ParsedRequest:
    adapter = head.adapter
    if adapter is None:
        return call
    requests = [
        request._replace(adapter=merge_adapters(adapter, request.adapter, "the body")) for request in call.requests
    ]
    return call._replace(requests=requests)


def _for_session(call: ParsedRequest, head: Head) -> ParsedRequest:
    session = head.session
    if session is None:
        return call
    return call._replace(requests=[request._replace(session=session.id) for request in call.requests])


def _read_form(body: bytes, head: Head) -> Decoded:
    return Decoded(read_form(body, head.headers["content-type"]), size=len(body))


def _without_logprobs(call: ParsedRequest) -> ParsedRequest:
    if not any(request.sampling.logprobs for request in call.requests):
        return call
    requests = [request._replace(sampling=request.sampling._replace(logprobs=False)) for request in call.requests]
    return call._replace(requests=requests)
