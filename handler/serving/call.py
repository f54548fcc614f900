"""The preprocessing of requests: check the head, decode and parse the body, and tokenize the prompts."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from handler.core.errors import (
    AnswerTooLong,
    InvalidParameter,
    InvalidPayload,
    NotJson,
    PromptTooLong,
    ServingError,
    UnsupportedMedia,
)
from handler.core.media import Medium, Upload
from handler.core.text import Prompt, check_ids, given_prompt
from handler.core.values import Adapter, Request, Task
from handler.engines.base import EngineInfo, Tokenizer
from handler.engines.huggingface.pooling import encode_pooled
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.plugins.custom_messages import CustomReader, FormatterTokenizer, with_formatter
from handler.plugins.functions import AdapterFormatters, Formatters, InputFormatter
from handler.protocols.kernel.body import decode, decode_text, decoded_size
from handler.protocols.kernel.dialect import Dialect, ParsedRequest, Recalled, ServerContext
from handler.protocols.kernel.readers import merge_adapters
from handler.serving.head import NO_FORMATTERS, Head, adapter_of, media_type
from handler.serving.media.loader import place_media
from handler.serving.sessions import HEADER, Sessions, answer_call, session_call, session_of
from handler.serving.stored_responses import ResponseStore
from handler.serving.turns import LARGE, MOST_DECODED, LargeBodies

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


_JSON_LINES = re.compile(r"application/(x-)?(jsonlines|ndjson|jsonl)")
"""Content types of JSON lines. As in LMI, a request must contain one line; batch transform sends single lines."""

_JSON_TYPES = re.compile(rf"|application/(.+\+)?json|application/x-www-form-urlencoded|{_JSON_LINES.pattern}")
"""Content types that are read as JSON: an empty one, those of JSON, and the one that `curl -d` sends."""

_FORM = "multipart/form-data"

TARGET_MODEL = "x-amzn-sagemaker-target-model"

MAX_LOGITS = 1 << 20  # maximum numbers in a response: about 20 MB of JSON; SageMaker's limit is 25 MB


class Decoded(NamedTuple):
    """A decoded body.

    Attributes:
        value: decoded value, which the dialect parses.
        given: value that the input formatter of model.py has returned.
        session_call: NEW_SESSION or CLOSE if the body opens or closes a session, otherwise "".
        size: bytes of memory that the value needs, or 0 if they are not known.
    """

    value: Any
    given: Any = None
    session_call: str = ""
    size: int = 0


class Preprocessor:
    """The reader of requests, which decodes, parses, checks and tokenizes them. Thread-safe.

    Args:
        dialect: dialect of routes that have none of their own.
        context: facts about the server that dialects need.
        tokenizer: tokenizer of the engine's model.
        engine_info: returns the description of the engine, or None while the engine is loading.
        formatters: input and output formatters of model.py.
        validator: checker of structured output, or None if none is needed.
        sessions: open sessions, or None if sessions are off.
        store: store of responses for later requests, or None if responses are not stored.
        whole: whether the host cannot stream. A dynamic batch of DJL has one content type for all its responses.

    Attributes:
        of_adapters: formatters in the model.py files of adapters.
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
        self.of_adapters = AdapterFormatters()
        self._keywords = {"tokenizer": FormatterTokenizer(tokenizer.encode), "configs": formatters.configs}
        self.context = replace(
            context,
            vocabulary=tokenizer.vocabulary,
            chat_template=tokenizer.chat_template,
            most_tokens=self._most_tokens,
        )
        self._tokenizer = tokenizer
        self._engine_info = engine_info
        self.validator = validator
        self._whole = whole

    def read_head(self, head: Head) -> Head:
        """Return the head with the values read from its headers. Errors in headers are raised before the body is read.

        Raises:
            InvalidPayload: a header is invalid; the message names it.
            UnsupportedMedia: the content type or encoding is not supported.
            BadRequest: the session does not exist.
        """
        headers, dialect = head.headers, head.dialect
        if headers.get(TARGET_MODEL):
            raise InvalidPayload(f"header {TARGET_MODEL}: multi-model hosting is not supported by the engine")
        named = headers.get(HEADER)
        session = session_of(self._sessions, named) if named else None
        adapter = adapter_of(headers, self.context)
        formatters = self._formatters_of(adapter)
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise UnsupportedMedia(f"content-encoding {encoding!r} is not supported")
        head = Head(headers, dialect, media_type(headers), adapter, formatters, session)
        formatter = self._input_of(formatters)
        any_media = formatter is not None and not formatter.takes_payload
        if any_media if dialect is None else dialect.any_media:
            return head
        if not head.is_prompt and not self._is_form(head) and not _JSON_TYPES.fullmatch(head.media_type):
            forms = self.dialect_of(head).forms
            others = f" or {_FORM}, with the audio clip as the file 'file'" if forms else ""
            others = others or ("" if dialect is not None else " or text/plain")
            raise UnsupportedMedia(f"content type {head.media_type!r} is not supported; send application/json{others}")
        return head

    def dialect_of(self, head: Head) -> Dialect:
        """Return the dialect of a request's body."""
        return head.dialect or self.dialect

    def _is_form(self, head: Head) -> bool:
        return head.media_type == _FORM and self.dialect_of(head).forms

    def input_formatter(self, head: Head) -> str:
        """Return the title of the input formatter for messages, or "" if no formatter reads the body."""
        if head.dialect is not None:
            return ""
        if self.of_adapters.read:
            return "input formatter of an adapter's model.py"
        formatter = head.formatters.input  # possibly of an adapter that was unregistered in the meantime
        return "" if formatter is None else formatter.title

    def decoded_size(self, body: bytes, head: Head) -> int:
        """Return the maximum memory, in bytes, that the result of `decode` needs."""
        if head.is_prompt or self._is_form(head):
            return decoded_size(body, 0)
        is_limited = len(body) >= LARGE and not self.input_formatter(head)
        return decoded_size(body, MOST_DECODED if is_limited else sys.maxsize)

    def decode(self, body: bytes, head: Head) -> Decoded:
        """Decode a body. An input formatter of model.py reads bodies of /invocations only.

        A large body must be decoded on a thread of `large_bodies`.

        Raises:
            NotJson: the body is not valid JSON.
            TooLarge: the body contains too much, or takes too long to decode.
            Unavailable: the process that decodes large bodies cannot be started.
            FormatterFailed: the input formatter failed.
            BadRequest: the body of a call about a session is not valid.
        """
        try:
            return self._decode(body, head)
        except NotJson:
            media = head.media_type
            if _JSON_LINES.fullmatch(media) and (num_lines := sum(map(bool, map(bytes.strip, body.splitlines())))) > 1:
                raise NotJson(
                    f"{media}: a request must be one line of JSON, but this body has {num_lines} lines; send one "
                    "request per line (in batch transform: SplitType=Line, BatchStrategy=SingleRecord)"
                ) from None
            raise

    def _decode(self, body: bytes, head: Head) -> Decoded:
        if head.dialect is None:
            if not head.is_prompt and (call := session_call(body)):
                return Decoded({}, session_call=call)
            if (formatter := self._input_formatter(body, head)) is not None:
                reader = CustomReader(formatter, functools.partial(self._read_value, head=head), self._keywords)
                return Decoded(*reader.read(body, head.headers, head.session))
        if self._is_form(head):
            return Decoded(read_form(body, head.headers["content-type"]), size=len(body))
        if len(body) >= LARGE:
            unique_keys = self.dialect_of(head).unique_keys
            value, size = self.large_bodies.decode(body, plain=head.is_prompt, unique_keys=unique_keys)
            return Decoded(value, size=size)
        return Decoded(self._read_value(body, head))

    def _input_formatter(self, body: bytes, head: Head) -> InputFormatter | None:
        """Return the input formatter for a body: that of the adapter named in the head or the body, or the model's."""
        formatters = head.formatters
        if self.of_adapters.read and head.adapter is None:
            with contextlib.suppress(ServingError):  # a body that is not JSON may be meant for the model's formatter
                formatters = self._formatters_of(self._adapter_in(self._read_value(body, head)))
        return self._input_of(formatters)

    def _input_of(self, formatters: Formatters) -> InputFormatter | None:
        formatter = formatters.input
        return None if formatter is None else formatter.as_in(asynchronous=self.context.config.async_schema)

    def _formatters_of(self, adapter: Adapter | None) -> Formatters:
        return self.of_adapters.of(adapter, self.formatters) if self.of_adapters.exist else self.formatters

    def _adapter_in(self, body: Any) -> Adapter | None:
        """Return the adapter in the body's `adapters`, or None. An adapter named by `model` has no formatters."""
        if not isinstance(body, dict):
            return None
        named = body.get("adapters")
        name = named[0] if isinstance(named, list) else named
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

    def parse(self, body: Decoded, head: Head, recalled: Recalled | None = None) -> ParsedRequest:
        """Parse a decoded body.

        Args:
            recalled: stored responses that the body refers to. None if it refers to none and its own is not to be
                stored.

        Raises:
            ServingError: the dialect refuses the body.
        """
        if body.session_call:
            return answer_call(self._sessions, body.session_call, head.headers.get(HEADER), self.dialect.errors)
        adapter, formatters = head.adapter, head.formatters
        context = self.context if adapter is None else replace(self.context, adapter=adapter)
        if recalled is not None and self.store is not None:
            context = replace(context, keeper=self.store.keeper(head.owner), recalled=recalled)
        call = self.dialect_of(head).parse(body.value, context)
        if call.take_prompt is None:  # models for any task can tokenize a prompt
            for request in call.requests:
                check_task(request, self.context.task)
        if call.streams and self._whole:
            raise InvalidPayload("'stream' is not supported by DJL's dynamic batching; it requires rolling batch")
        if adapter is not None:
            call = call._replace(requests=[_for_adapter(request, adapter) for request in call.requests])
        elif self.of_adapters.exist:
            formatters = self._formatters_of(self._adapter_in(body.value))
        if (session := head.session) is not None:
            call = call._replace(requests=[request._replace(session=session.id) for request in call.requests])
        if head.dialect is not None or (formatter := formatters.output) is None:
            return call
        compat = self.dialect.name == "tgi_compat"
        return with_formatter(call, formatter, body.value, body.given, tgi_compat=compat, session=session)

    def encode(self, request: Request, media: Sequence[Medium] = ()) -> tuple[Request, Prompt]:
        """Tokenize a request and check its limits.

        Returns:
            The request without its prompt, with its final maximum number of new tokens, and the prompt, truncated if
            the request asks for it.

        Raises:
            InvalidPayload: the prompt exceeds a limit. Engines would truncate it silently, or fail later.
            InvalidParameter: a parameter exceeds a limit.
        """
        if request.pooling is not None:
            return encode_pooled(request, self._tokenizer, self._engine_info(), self.context.config.max_input_len)
        prompt = self.tokenize(request, media)
        if request.read_prompt is not None:
            request = request.read_prompt(request, prompt.text)
        self._check(request, prompt)
        return self._filled(request, prompt), prompt

    def tokenize(self, request: Request, media: Sequence[Medium] = ()) -> Prompt:
        """Return the prompt with its token ids and media, truncated if the request asks for it.

        Raises:
            InvalidPayload: a field is wrong; the message names it.
            InvalidParameter: a parameter is wrong; the message names it.
            PromptTooLong: the prompt is too long to be tokenized.
        """
        if request.pooling is not None:
            return encode_pooled(request, self._tokenizer)[1]
        if request.prompt_ids is not None:
            prompt = given_prompt(request, request.prompt_ids, self._tokenizer.vocabulary)
        else:
            try:
                if request.messages:
                    prompt = self._tokenizer.encode_chat(request.messages, request.tools, request.template)
                else:
                    prompt = self._tokenizer.encode(request.prompt)
            except PromptTooLong as error:
                raise error.named(request.names.prompt, self._most_tokens()) from None
            if media:
                return place_media(request, prompt, media, self._tokenizer.media_tokens)
        if request.truncation is None:
            return prompt
        most = request.truncation.most or self._room(request)
        return prompt if most is None else prompt._replace(ids=prompt.ids[-most:])

    def _room(self, request: Request) -> int | None:
        """Return the number of prompt tokens that leave room for the answer, or None if no engine was ever loaded."""
        limit = self._most_tokens()
        if limit is None:
            return None
        free = 1 if request.fill_context else _needed(request)
        return max(1, min(limit - free, self.context.config.max_input_len or limit))

    def try_structured_output(self, request: Request) -> Future[str] | None:
        """Start a check of the request's structured output, or return None if no check is needed.

        The result must be passed to `check_structured_output`.
        """
        output = request.sampling.structured_output
        return None if output is None or self.validator is None else self.validator.check(output)

    def _check(self, request: Request, prompt: Prompt) -> None:
        num_prompt, names = len(prompt.ids), request.names
        if not num_prompt:
            raise InvalidPayload(f"'{names.prompt}' has no tokens")
        sampling, vocabulary = request.sampling, prompt.vocabulary
        check_ids(names.stop_token_ids, sampling.stop_token_ids, vocabulary)
        check_ids(names.bad_token_ids, sampling.bad_token_ids, vocabulary)
        check_ids(names.allowed_token_ids, sampling.allowed_token_ids, vocabulary)
        check_ids(names.logit_bias, [id for id, _ in sampling.logit_bias], vocabulary)
        rows = num_prompt * sampling.return_context_logits
        rows += sampling.max_new_tokens * sampling.num_sequences * sampling.return_generation_logits
        if rows * len(vocabulary) > MAX_LOGITS:
            raise InvalidParameter(
                f"{names.logits}: {rows} rows of {len(vocabulary)} logits are too many for one response; at most "
                f"{MAX_LOGITS // len(vocabulary)} rows are allowed: shorten the prompt or reduce {names.max_new_tokens}"
            )
        info = self._engine_info()
        if info is None:  # no engine was ever loaded: the host refuses requests
            return
        limit = info.max_total_tokens
        most = min(limit - 1, self.context.config.max_input_len or limit)
        if num_prompt > most:
            raise PromptTooLong(names.prompt, num_prompt, most, limit=limit)
        needed = _needed(request)
        if num_prompt + needed > limit and not request.fill_context:
            raise AnswerTooLong(names.max_new_tokens, num_prompt, needed, limit)

    def _filled(self, request: Request, prompt: Prompt) -> Request:
        request = request._replace(messages=(), media=(), tools=())  # the prompt contains them now
        limit, wanted = self._most_tokens(), request.sampling.max_new_tokens
        if limit is None or wanted <= (left := limit - len(prompt.ids)):
            return request
        return request._replace(sampling=request.sampling._replace(max_new_tokens=left))

    def _most_tokens(self) -> int | None:
        info = self._engine_info()
        return None if info is None else info.max_total_tokens


def _needed(request: Request) -> int:
    """Return the number of tokens that must be left for the answer."""
    wanted = request.sampling.max_new_tokens
    return wanted if request.min_free_tokens is None else min(wanted, request.min_free_tokens)


def check_structured_output(request: Request, why: str) -> None:
    """Raise InvalidParameter if `why`, the result of the check of structured output, is not empty."""
    if why:
        raise InvalidParameter(f"{request.names.structured_output}: the engine cannot apply it: {why}")


_ROUTES = {
    Task.GENERATION: "/v1/chat/completions, /generate and similar routes",
    Task.EMBEDDING: "/v1/embeddings, /embed and similar routes",
    Task.CLASSIFICATION: "/predict",
    Task.RERANK: "/rerank and similar routes",
    Task.TRANSCRIPTION: "/v1/audio/transcriptions, /v1/audio/translations",
}
_KINDS = {"embed": Task.EMBEDDING, "score": Task.RERANK, "classify": Task.CLASSIFICATION}


def check_task(request: Request, task: Task) -> None:
    """Raise InvalidPayload if the request is for a task other than the model's."""
    generated = Task.TRANSCRIPTION if request.transcribes else Task.GENERATION
    wanted = generated if request.pooling is None else _KINDS[request.pooling.kind]
    if wanted is not task:
        raise InvalidPayload(
            f"this server is for {task.value} (option.task), on {_ROUTES[task]}; this request is for {wanted.value}"
        )


def _for_adapter(request: Request, adapter: Adapter) -> Request:
    return request._replace(adapter=merge_adapters(adapter, request.adapter, "the body"))


# -- forms (multipart/form-data) of small texts and files, which are kept in memory ------------------------------------


_MOST_PARTS = 64  # maximum number of parts; OpenAI's routes have about ten
_MOST_TEXT = 1 << 20  # maximum size of a part that is not a file, in bytes
_MOST_BOUNDARY = 70  # maximum characters (RFC 2046, section 5.1.1)


Parts = dict[str, str | Upload | list[str]]


def read_form(body: bytes, content_type: str) -> Parts:
    """Return the parts of a form by name. If a name is repeated, its last part counts, as in JSON. The parts of a name
    that ends with `[]` form a list.

    Raises:
        InvalidPayload: the body is not a valid form, or has too many parts.
    """
    form = FormReader(content_type)
    form.feed(body)
    return form.end()


class FormReader:
    """An incremental parser of forms, which collects their parts.

    Args:
        write: called with the pieces of the form's only file. If it is None, files are collected like other parts.

    Raises:
        InvalidPayload: the content type has no valid boundary.
    """

    def __init__(self, content_type: str, write: Callable[[memoryview], None] | None = None) -> None:
        from python_multipart.multipart import MultipartParser, parse_options_header

        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        if not 0 < len(boundary) <= _MOST_BOUNDARY:
            raise InvalidPayload(f"multipart/form-data needs a boundary of 1 to {_MOST_BOUNDARY} characters")
        self._parser = MultipartParser(boundary, self._callbacks)
        self._parts: Parts = {}
        self._ended = False
        self._write = write
        self._number = self._num_written = 0
        self._options: dict[bytes, bytes] = {}
        self._field, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Parse the next piece of the body.

        Raises:
            InvalidPayload: the body is not a valid form, or has too many parts.
        """
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(data)
        except (FormParserError, ValueError):
            raise _no_form() from None

    def end(self) -> Parts:
        """Return the parts by name, like `read_form`.

        Raises:
            InvalidPayload: the form is incomplete.
        """
        if not self._ended:
            raise _no_form()
        return self._parts

    @property
    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_headers_finished": self._open,
            "on_part_data": lambda data, start, end: self._take(memoryview(data)[start:end]),
            "on_part_end": self._part,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._number += 1
        if self._number > _MOST_PARTS:
            raise InvalidPayload(f"the form has more than {_MOST_PARTS} parts")
        self._headers, self._data = {}, bytearray()

    def _header(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _open(self) -> None:
        """Choose the function that receives the part's data."""
        from python_multipart.multipart import parse_options_header

        self._options = parse_options_header(self._headers.get(b"content-disposition", b""))[1]
        self._take: Callable[[memoryview], None] = self._data.extend
        if self._write is not None and b"filename" in self._options:
            self._num_written += 1
            if self._num_written > 1:
                raise InvalidPayload("the form has more than one file")
            self._take = self._write

    def _part(self) -> None:
        options = self._options
        name = options.get(b"name", b"").decode(errors="replace")
        if not name:
            raise InvalidPayload("a part of the form has no name")
        if b"filename" in options:
            self._parts[name] = Upload(bytes(self._data), options[b"filename"].decode(errors="replace"))
            return
        if len(self._data) > _MOST_TEXT:
            raise InvalidPayload(
                f"{name[:64]!r} is longer than {_MOST_TEXT} bytes, the limit for text fields of a form; send it as a "
                "file, with a filename"
            )
        try:
            text = self._data.decode()
        except UnicodeDecodeError:
            raise InvalidPayload(f"{name[:64]!r} must be UTF-8 text") from None
        if not name.endswith("[]"):
            self._parts[name] = text
        elif isinstance(texts := self._parts.setdefault(name, []), list):
            texts.append(text)

    def _end(self) -> None:
        self._ended = True


def _no_form() -> InvalidPayload:
    return InvalidPayload("the body is not valid multipart/form-data, or is incomplete")
