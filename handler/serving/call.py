"""Check a request's headers, parse its body, and turn its prompts into token ids."""

from __future__ import annotations

import contextlib
import hashlib
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from handler.core.media import Medium, Upload, new_uuid
from handler.core.text import Prompt, check_ids, given_prompt
from handler.core.values import Adapter, Request, Task
from handler.engines.base import EngineInfo, Tokenizer
from handler.engines.huggingface.pooling import encode_pooled
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.plugins.custom_messages import CustomReader, FormatterTokenizer, with_formatter
from handler.plugins.functions import AdapterFormatters, Formatters, InputFormatter
from handler.protocols.kernel.body import decode, decode_text
from handler.protocols.kernel.dialect import Dialect, ParsedRequest, Recalled, ServerContext
from handler.protocols.kernel.readers import merge_adapters, named_adapter, quote
from handler.serving.media.loader import place_media
from handler.serving.sessions import Sessions, answer_call, session_call, session_of
from handler.serving.stored_responses import ResponseStore
from handler.serving.turns import LARGE, LargeBodies

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MOST_PARTS = 64  # OpenAI's routes have some ten
_MOST_TEXT = 1 << 20  # bytes of a part that is no file
_MOST_BOUNDARY = 70  # characters: RFC 2046, section 5.1.1


Parts = dict[str, str | Upload | list[str]]


def read_form(body: bytes, content_type: str) -> Parts:
    """Return the parts by name; of two with a name the last counts, as in JSON. Texts of a name with `[]` are a list.

    Raises:
        InvalidPayload: the body is no such form, or has too many parts.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= _MOST_BOUNDARY:
        raise InvalidPayload(f"content type multipart/form-data needs a boundary of 1 to {_MOST_BOUNDARY} characters")
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks)
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError):
        raise InvalidPayload("the body is not of the type multipart/form-data, or breaks off") from None
    if not form.ended:
        raise InvalidPayload("the body is not of the type multipart/form-data, or breaks off")
    return form.parts


class _Form:
    """Gathers what the parser tells of."""

    def __init__(self) -> None:
        self.parts: Parts = {}
        self.ended = False
        self._number = 0
        self._field, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()

    @property
    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_part_data": lambda data, start, end: self._data.extend(memoryview(data)[start:end]),
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

    def _part(self) -> None:
        from python_multipart.multipart import parse_options_header

        options = parse_options_header(self._headers.get(b"content-disposition", b""))[1]
        name = options.get(b"name", b"").decode(errors="replace")
        if not name:
            raise InvalidPayload("a part of the form has no name")
        if b"filename" in options:
            self.parts[name] = Upload(bytes(self._data))
            return
        if len(self._data) > _MOST_TEXT:
            raise InvalidPayload(f"{name[:64]!r}: a form's text may have {_MOST_TEXT} bytes; send a file with a name")
        try:
            text = self._data.decode()
        except UnicodeDecodeError:
            raise InvalidPayload(f"{name[:64]!r} must be UTF-8 text") from None
        if not name.endswith("[]"):
            self.parts[name] = text
        elif isinstance(texts := self.parts.setdefault(name, []), list):
            texts.append(text)

    def _end(self) -> None:
        self.ended = True


# -- whose a request is: the name of its API key's owner, which does not tell the key ----------------------------------


OWNER = "?owner"
"""Where a host puts whose key it has found right, among a request's headers: no header is called so."""


def owner_of(headers: Mapping[str, str]) -> str:
    """Return whose a request is, by its API key, whether or not the host checks keys; "" where it has none."""
    if (owner := headers.get(OWNER)) is not None:
        return owner
    key = headers.get("x-api-key", "").strip() or bearer_token(headers.get("authorization", ""))
    return owner_by_key(key) if key else ""


def owner_by_key(key: str) -> str:
    """Return the name of a key's owner."""
    return digest_of(key).hex()


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def bearer_token(authorization: str) -> str:
    """Return the token of a header `Authorization: Bearer TOKEN`; "" for another one."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


NO_FORMATTERS = Formatters()

Headers = Mapping[str, str]
"""A request's headers, names in lower case."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_JSON_LINES = re.compile(r"application/(x-)?(jsonlines|ndjson|jsonl)")
"""Lines of JSON, of which a request has one: batch transform sends them so, and LMI reads them so."""

_JSON_TYPES = re.compile(rf"|application/(.+\+)?json|application/x-www-form-urlencoded|{_JSON_LINES.pattern}")
"""What is read as JSON: nothing said, JSON in all its names, and what curl -d says of anything."""

_FORM = "multipart/form-data"

_TARGET_MODEL = "x-amzn-sagemaker-target-model"

ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"

_ADAPTER = ("x-amzn-sagemaker-adapter-identifier", "adapter")
"""SageMaker's and DJL's headers that name the LoRA adapter of a request."""

QUERY_ADAPTER = "?adapter"
"""Where a host puts the adapter that a request's query names, among its headers: no header is called so."""

MAX_LOGITS = 1 << 20  # numbers in an answer: as JSON some 20 MB, of which SageMaker lets 25 through


def in_attributes(headers: Headers, name: str) -> str | None:
    """Return the value of `name=` in SageMaker's custom attributes; None where they lack it.

    DJL's front end reads them itself, and hands them over as headers.
    """
    attributes = headers.get(ATTRIBUTES)
    match = re.search(rf"(?:^|[\s,;]){name}=([^\s,;]*)", attributes) if attributes else None
    return None if match is None else match[1]


def _named_adapters(headers: Headers) -> Iterator[tuple[str, str | None]]:
    """Yield each place that may name an adapter, for messages, with what it says."""
    for name in _ADAPTER:
        yield f"header {name}", headers.get(name)
    yield "header adapter", in_attributes(headers, "adapter")
    yield "query parameter adapter", headers.get(QUERY_ADAPTER)


class Decoded(NamedTuple):
    """A decoded body, what a model.py made of it, and the session's call that it is, if any."""

    value: Any
    given: Any = None
    session_call: str = ""


class Preprocessor:
    """Reads and checks requests. Thread-safe.

    Args:
        dialect: that of the bodies, where a route has none of its own.
        context: what the dialect needs to know of the rest.
        tokenizer: the engine's.
        engine_info: what the engine says of itself; None while it has not been loaded.
        formatters: what a model.py has the bodies read and the answers written by.
        validator: tries what clients send; None where nothing has to be tried.
        sessions: None where they are off.
        of_adapters: formatters of adapters' own.
        store: keeps answers for later requests; None where nothing is kept.
        whole: the host sends whole answers only: a batch of DJL's has one content type.
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
        of_adapters: AdapterFormatters | None = None,
        store: ResponseStore | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.dialect = dialect
        self._sessions = sessions
        self.store = store
        self.large_bodies = LargeBodies()
        self._formatters = formatters
        self._of_adapters = of_adapters or AdapterFormatters()
        self._keywords = {"tokenizer": FormatterTokenizer(tokenizer.encode), "configs": formatters.configs}
        self.context = replace(
            context,
            vocabulary=tokenizer.vocabulary,
            chat_template=tokenizer.chat_template,
            most_tokens=self._most_tokens,
        )
        self._tokenizer = tokenizer
        self._engine_info = engine_info
        self._validator = validator
        self._whole = whole

    def check_headers(self, headers: Headers, dialect: Dialect | None = None) -> None:
        """Turn away, before the body is read, what no body could make good.

        Args:
            dialect: the route's own.

        Raises:
            InvalidPayload, UnsupportedMedia: naming the header.
            BadRequest: of a session that is not there.
        """
        if headers.get(_TARGET_MODEL):
            raise InvalidPayload(f"header {_TARGET_MODEL}: multi-model hosting is not supported by the engine")
        session_of(self._sessions, headers)
        adapter = self._adapter(headers)
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise UnsupportedMedia(f"content-encoding {encoding!r} is not supported")
        media = media_type(headers)
        formatter = self._input_of(adapter)
        any_media = formatter is not None and not formatter.takes_payload
        if any_media if dialect is None else dialect.any_media:
            return
        if media == _FORM and (dialect or self.dialect).forms:
            return
        is_prompt = media == "text/plain" and dialect is None
        if not is_prompt and not _JSON_TYPES.fullmatch(media):
            others = "" if dialect is not None else " or text/plain"
            raise UnsupportedMedia(f"content type {media!r} is not supported; send application/json{others}")

    @property
    def input_formatter(self) -> str:
        """The title of the input formatter, for messages; "" where none reads bodies."""
        if self._of_adapters.read:
            return "input formatter of an adapter's model.py"
        return "" if self._formatters.input is None else self._formatters.input.title

    def decode(self, body: bytes, headers: Headers, dialect: Dialect | None = None) -> Decoded:
        """Decode a body. Call it for a large one by `large_bodies.submit`.

        Args:
            dialect: the route's own, whose bodies no model.py reads.

        Raises:
            NotJson, TooLarge, Unavailable, FormatterFailed, BadRequest.
        """
        try:
            return self._decode(body, headers, dialect)
        except NotJson:
            media = media_type(headers)
            if _JSON_LINES.fullmatch(media) and (num_lines := sum(map(bool, map(bytes.strip, body.splitlines())))) > 1:
                raise NotJson(
                    f"{media}: a request has one line of JSON, this body has {num_lines}: send each as a request of "
                    "its own (batch transform: SplitType=Line, BatchStrategy=SingleRecord)"
                ) from None
            raise

    def _decode(self, body: bytes, headers: Headers, dialect: Dialect | None) -> Decoded:
        if dialect is None and not _is_plain(headers) and (call := session_call(body)):
            return Decoded({}, session_call=call)
        if dialect is None and (formatter := self._input_formatter(body, headers)) is not None:
            reader = CustomReader(formatter, self._read_value, self._keywords)
            return Decoded(*reader.read(body, headers, session_of(self._sessions, headers)))
        if (dialect or self.dialect).forms and media_type(headers) == _FORM:
            return Decoded(read_form(body, headers["content-type"]))
        if len(body) >= LARGE:
            plain = dialect is None and _is_plain(headers)
            unique_keys = (dialect or self.dialect).unique_keys
            return Decoded(self.large_bodies.decode(body, plain=plain, unique_keys=unique_keys))
        return Decoded(decode(body, unique_keys=dialect.unique_keys) if dialect else self._read_value(body, headers))

    def _input_formatter(self, body: bytes, headers: Headers) -> InputFormatter | None:
        """Return what reads a body: the formatter of the adapter that headers or body name, or the model's own."""
        if not self._of_adapters.read:
            return self._input_of(None)
        adapter = self._adapter(headers)
        if adapter is None:
            with contextlib.suppress(ServingError):  # what is not JSON may be for the model's own
                adapter = self._adapter_in(self._read_value(body, headers))
        return self._input_of(adapter)

    def _input_of(self, adapter: Adapter | None) -> InputFormatter | None:
        formatter = self._formatters_of(adapter).input
        return None if formatter is None else formatter.as_in(asynchronous=self.context.config.async_schema)

    def _formatters_of(self, adapter: Adapter | None) -> Formatters:
        return self._of_adapters.of(adapter, self._formatters) if self._of_adapters.exist else self._formatters

    def _adapter_in(self, body: Any) -> Adapter | None:
        """Return the adapter whose formatters a body asks for; None without one. `model` chooses weights alone."""
        if not isinstance(body, dict):
            return None
        named = body.get("adapters")
        name = named[0] if isinstance(named, list) else named
        return self.context.adapters.find(name) if isinstance(name, str) and not self.context.no_adapters else None

    def _read_value(self, body: bytes, headers: Headers) -> Any:
        """Decode a body of the configured dialect."""
        if _is_plain(headers):
            return {"inputs": decode_text(body)}
        return decode(body, unique_keys=self.dialect.unique_keys)

    def close(self) -> None:
        self.large_bodies.close()
        if self._sessions is not None:
            self._sessions.end()
        if self.store is not None:
            self.store.close()

    def parse(
        self, body: Decoded, headers: Headers, dialect: Dialect | None = None, recalled: Recalled | None = None
    ) -> ParsedRequest:
        """Return what a decoded body asks for.

        Args:
            recalled: what it needs of the answers that are kept; None: nothing, nor is its own kept.

        Raises:
            ServingError: what the dialect says of a body that it refuses.
        """
        if body.session_call:
            return answer_call(self._sessions, body.session_call, headers, self.dialect.errors)
        adapter = self._adapter(headers)
        context = self.context if adapter is None else replace(self.context, adapter=adapter)
        if recalled is not None and self.store is not None:
            context = replace(context, keeper=self.store.keeper(owner_of(headers)), recalled=recalled)
        call = (dialect or self.dialect).parse(body.value, context)
        if call.take_prompt is None:  # every model has a prompt's tokens
            for request in call.requests:
                check_task(request, self.context.task)
        if call.streams and self._whole:
            raise InvalidPayload("'stream': DJL's dynamic batches are answered whole; streams need rolling batch")
        if adapter is not None:
            call = call._replace(requests=[_for_adapter(request, adapter) for request in call.requests])
        if (session := session_of(self._sessions, headers)) is not None:
            call = call._replace(requests=[request._replace(session=session.id) for request in call.requests])
        if adapter is None and self._of_adapters.exist:
            adapter = self._adapter_in(body.value)
        formatter = self._formatters_of(adapter).output
        if dialect is not None or formatter is None:
            return call
        compat = self.dialect.name == "tgi_compat"
        return with_formatter(call, formatter, body.value, body.given, tgi_compat=compat, session=session)

    def encode(self, request: Request, media: Sequence[Medium] = ()) -> tuple[Request, Prompt]:
        """Return what is left of the request, its length settled, and the prompt, cut as asked, within the limits.

        Raises:
            InvalidPayload, InvalidParameter: engines clamp or fail late where we refuse at once.
        """
        if request.pooling is not None:
            return encode_pooled(request, self._tokenizer, self._engine_info(), self.context.config.max_input_len)
        prompt = self.tokenize(request, media)
        if request.read_prompt is not None:
            request = request.read_prompt(request, prompt.text)
        self._check(request, prompt)
        return self._filled(request, prompt), prompt

    def tokenize(self, request: Request, media: Sequence[Medium] = ()) -> Prompt:
        """Return the prompt's ids and `media`, cut as asked.

        Raises:
            InvalidPayload, InvalidParameter, PromptTooLong: naming the field.
        """
        if request.pooling is not None:
            return encode_pooled(request, self._tokenizer)[1]
        if request.prompt_ids is not None:
            prompt = given_prompt(request, request.prompt_ids, self._tokenizer.vocabulary)
        elif request.messages:
            prompt = self._tokenizer.encode_chat(request.messages, request.tools, request.template)
            if media:
                return place_media(request, prompt, media, self._tokenizer.media_tokens)
        else:
            try:
                prompt = self._tokenizer.encode(request.prompt)
            except PromptTooLong as error:
                raise error.named(request.names.prompt) from None
        if request.truncation is None:
            return prompt
        most = request.truncation.most or self._room(request)
        return prompt if most is None else prompt._replace(ids=prompt.ids[-most:])

    def _room(self, request: Request) -> int | None:
        """Return how many tokens of a prompt fit beside the answer; None where nothing was ever loaded."""
        limit = self._most_tokens()
        if limit is None:
            return None
        free = 1 if request.fill_context else _needed(request)
        return max(1, min(limit - free, self.context.config.max_input_len or limit))

    def try_structured_output(self, request: Request) -> Future[str] | None:
        """Have the request's structured output tried; None where there is nothing to wait for.

        `check_structured_output` reads the outcome.
        """
        output = request.sampling.structured_output
        return None if output is None or self._validator is None else self._validator.check(output)

    def _adapter(self, headers: Headers) -> Adapter | None:
        """Return the adapter that the headers name; None where they name none."""
        found = None
        for place, given in _named_adapters(headers):
            if not given:
                continue
            try:
                one = named_adapter(given, self.context)
            except ValueError as error:
                raise InvalidPayload(f"{place}: {quote(given)}: {error}") from None
            found = merge_adapters(found, one, place)
        return found

    def _check(self, request: Request, prompt: Prompt) -> None:
        num_prompt, names = len(prompt.ids), request.names
        if not num_prompt:
            raise InvalidPayload(f"'{names.prompt}' has no tokens")
        sampling, vocabulary = request.sampling, prompt.vocabulary
        check_ids(names.stop_token_ids, sampling.stop_token_ids, vocabulary)
        check_ids(names.bad_token_ids, sampling.bad_token_ids, vocabulary)
        check_ids(names.logit_bias, [id for id, _ in sampling.logit_bias], vocabulary)
        rows = num_prompt * sampling.return_context_logits
        rows += sampling.max_new_tokens * sampling.num_sequences * sampling.return_generation_logits
        if rows * len(vocabulary) > MAX_LOGITS:
            raise InvalidParameter(
                f"{names.logits}: {rows} rows of {len(vocabulary)} logits are too many for an answer; at most "
                f"{MAX_LOGITS // len(vocabulary)} by a shorter prompt or a smaller {names.max_new_tokens}"
            )
        info = self._engine_info()
        if info is None:  # nothing was ever loaded: the host turns requests away
            return
        limit = info.max_total_tokens
        most = min(limit - 1, self.context.config.max_input_len or limit)
        if num_prompt > most:
            raise PromptTooLong(names.prompt, num_prompt, most)
        needed = _needed(request)
        if num_prompt + needed > limit and not request.fill_context:
            raise AnswerTooLong(names.max_new_tokens, num_prompt, needed, limit)

    def _filled(self, request: Request, prompt: Prompt) -> Request:
        request = request._replace(messages=(), media=(), tools=())  # the prompt has taken their place
        limit, wanted = self._most_tokens(), request.sampling.max_new_tokens
        if limit is None or wanted <= (left := limit - len(prompt.ids)):
            return request
        return request._replace(sampling=request.sampling._replace(max_new_tokens=left))

    def _most_tokens(self) -> int | None:
        info = self._engine_info()
        return None if info is None else info.max_total_tokens


def _needed(request: Request) -> int:
    """Return how many tokens must be left for the answer."""
    wanted = request.sampling.max_new_tokens
    return wanted if request.min_free_tokens is None else min(wanted, request.min_free_tokens)


def check_structured_output(request: Request, why: str) -> None:
    """Raise InvalidParameter where `why` says what is wrong with the structured output that was tried."""
    if why:
        raise InvalidParameter(f"{request.names.structured_output}: the engine cannot follow it: {why}")


_ROUTES = {
    Task.GENERATION: "/v1/chat/completions, /generate and their like",
    Task.EMBEDDING: "/v1/embeddings, /embed and their like",
    Task.CLASSIFICATION: "/predict",
    Task.RERANK: "/rerank and its like",
    Task.TRANSCRIPTION: "/v1/audio/transcriptions, /v1/audio/translations",
}
_KINDS = {"embed": Task.EMBEDDING, "score": Task.RERANK, "classify": Task.CLASSIFICATION}


def check_task(request: Request, task: Task) -> None:
    """Raise InvalidPayload where the model computes something else than is asked for."""
    generated = Task.TRANSCRIPTION if request.transcribes else Task.GENERATION
    wanted = generated if request.pooling is None else _KINDS[request.pooling.kind]
    if wanted is not task:
        raise InvalidPayload(
            f"this server is for {task.value} (option.task): it answers {_ROUTES[task]}; this is {wanted.value}"
        )


def _for_adapter(request: Request, adapter: Adapter) -> Request:
    return request._replace(adapter=merge_adapters(adapter, request.adapter, "the body"))


def request_id(headers: Headers) -> str:
    """Return DJL's or SageMaker's id, or the client's where it is harmless, else a new one."""
    for name in ("requestid", "x-amzn-sagemaker-inference-id", "x-request-id"):
        if (given := headers.get(name)) and _REQUEST_ID.fullmatch(id := given.strip()):
            return id
    return new_uuid()


def media_type(headers: Headers) -> str:
    """Return the content type without its parameters, in lower case; "" where there is none."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the answer's header that lists ignored parameters.

    The names are the client's text: quoted, so that they fit a header, and cut to what SageMaker lets through.
    """
    if not names:
        return {}
    quoted = ", ".join(urllib.parse.quote(name[:64], safe="._-[]") for name in names[:32])
    return {"x-lmi-ignored-parameters": quoted[:1024]}


def _is_plain(headers: Headers) -> bool:
    return media_type(headers) == "text/plain"
