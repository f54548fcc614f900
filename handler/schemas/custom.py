"""Bodies read and answers written by the functions of a user's model.py; docs/formatters.md is their guide."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from handler.core import Delta, Finish, Request, Token
from handler.errors import FormatterFailed, ServingError
from handler.formatters import Input, TextGenerationOutput, TextInput
from handler.formatters import Sequence as Generated
from handler.formatters import Token as Shown
from handler.formatters.loading import Formatters, InputFormatter, OutputFormatter, Style
from handler.framing import JSON, JSONLINES, SSE
from handler.schemas.base import Answer, Call, Context, Reply, Schema
from handler.schemas.door import Door
from handler.schemas.lmi import Lmi
from handler.schemas.replies import DocumentReply, StreamReply
from handler.schemas.reshaped import Reshaped

log = logging.getLogger("handler.formatters")

_ids = itertools.count()
_NOTHING = Token(-1, "", None, True)  # for an end that came without a token


def run(formatter: InputFormatter | OutputFormatter, *arguments: Any, **keywords: Any) -> Any:
    """Call a user's function.

    Raises:
        FormatterFailed: it raised; where is in the log.
    """
    try:
        return formatter.function(*arguments, **keywords)
    except BaseException as error:  # SystemExit and its like too: it is one request's failure
        what = _named(formatter)
        log.exception("%s failed", what)
        raise FormatterFailed(f"{what} raised {type(error).__name__}", _said(error)) from error


class Formatted(dict[str, Any]):
    """A body that an input formatter made; `given` is its own object, for the output formatter, if it made one."""

    given: Any = None


class CustomReader:
    """From a body's bytes to what a schema parses, by way of the user's input formatter.

    Args:
        formatter: the user's.
        decode: body and headers to the decoded payload, for formatters that take that.
        keywords: what the formatter may ask for by name.
    """

    def __init__(
        self,
        formatter: InputFormatter,
        decode: Callable[[bytes, Mapping[str, str]], Any],
        keywords: Mapping[str, Any],
    ) -> None:
        self._formatter = formatter
        self._decode = decode
        accepts = formatter.accepts
        self._keywords = {name: value for name, value in keywords.items() if accepts is None or name in accepts}

    def read(self, body: bytes, headers: Mapping[str, str]) -> Formatted:
        """The body that the schema is to parse.

        Raises:
            FormatterFailed, InvalidPayload: the formatter failed; the body is not JSON and it wants it decoded.
        """
        formatter = self._formatter
        given = self._decode(body, headers) if formatter.takes_payload else Input(body, headers)
        found = run(formatter, given, **self._keywords)
        if isinstance(found, dict):
            return self._plain(found)
        if getattr(found, "input_text", None) is None:
            raise self._bad(f"returned {_kind(found)}; it must return a RequestInput with input_text, or a dict")
        value = {"inputs": found.input_text, "parameters": getattr(found, "parameters", None)}
        if adapters := getattr(found, "adapters", None):
            value["adapters"] = adapters
        plain = self._plain(value)
        plain.given = found
        return plain

    def _plain(self, value: dict[str, Any]) -> Formatted:
        """As a JSON body would have brought it: the schema must not meet foreign objects, or share the user's."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise self._bad("returned what is not JSON", _said(error)) from None
        return Formatted(json.loads(text))

    def _bad(self, what: str, detail: str = "") -> FormatterFailed:
        return FormatterFailed(f"{_named(self._formatter)} {what}", detail)


class CustomSchema:
    """A schema whose answers the user's output formatter writes, unless a request names a built-in one."""

    def __init__(self, schema: Lmi, formatter: OutputFormatter) -> None:
        self.name = schema.name
        self._schema = schema
        self._formatter = formatter

    def parse(self, body: Any, context: Context) -> Call:
        call = self._schema.parse(body, context)
        parameters = body.get("parameters") or {}
        if parameters.get("output_formatter") is not None:
            return call
        request = call.requests[0]
        if self._formatter.style is Style.VALUE:
            return call._replace(reply=self._reshaped(request, call.streams), foreign=True)
        given = getattr(body, "given", None)
        if given is None:
            given = TextInput(input_text=request.prompt, parameters={**parameters, "stream": call.streams})
        tgi_compat = self.name == "tgi_compat"
        reply = CustomReply(self._schema, request, self._formatter, given, streams=call.streams, tgi_compat=tgi_compat)
        return call._replace(reply=reply, foreign=True)

    def _reshaped(self, request: Request, streams: bool) -> Reply:
        layout = Reshaped(self._schema, functools.partial(run, self._formatter), _named(self._formatter))
        if streams:
            return StreamReply(layout, request, self._schema.stream_framing)
        return DocumentReply(layout, request)

    def refused(self, error: ServingError) -> Answer:
        return self._schema.refused(error)


def with_output(schema: Schema, formatters: Formatters) -> Schema:
    """The schema, its answers to `inputs` written by the user's output formatter if there is one.

    Only LMI's rolling-batch dialects have one; `launch` refuses the rest at start. Chat completions keep their form.
    """
    formatter = formatters.output
    if formatter is None:
        return schema

    def wrap(mode: Schema) -> Schema:
        assert isinstance(mode, Lmi), mode.name
        return CustomSchema(mode, formatter)

    assert isinstance(schema, Door), schema.name
    return schema.with_mode(wrap)


class CustomReply:
    """An answer of an output formatter that takes a TextGenerationOutput, or LMI 0.28's six arguments.

    It is called for every token as it comes; see docs/formatters.md for how often exactly.
    """

    def __init__(
        self,
        schema: Schema,
        request: Request,
        formatter: OutputFormatter,
        given: Any,
        *,
        streams: bool,
        tgi_compat: bool,
    ) -> None:
        self._schema = schema
        self._request = request
        self._formatter = formatter
        self._streams = streams
        self._unfinished = request.sampling.num_sequences
        self._parts: list[str] = []
        self._num_prompt_tokens = 0
        self._output = TextGenerationOutput(next(_ids), given)
        self._output.sequences = {index: Generated() for index in range(self._unfinished)}
        with contextlib.suppress(AttributeError, TypeError):  # an object of the user's own making
            given.request_id, given.tgi_compat = self._output.request_id, tgi_compat
        self.content_type = formatter.content_type or (JSONLINES if streams else JSON).content_type
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is not None:
            return self._failure(delta.error)
        if delta.prefill is not None:
            self._output.prompt_tokens_details = [_shown(token) for token in delta.prefill]
        tokens = delta.tokens or ((_NOTHING,) if delta.finish is not None else ())
        for place, token in enumerate(tokens, 1):
            self._add(delta.sequence, token, delta.finish if place == len(tokens) else None)
        if self._streams or self.finished:
            text, self._parts = "".join(self._parts), []
            return self._encode(text)
        return b""

    def refused(self, error: ServingError) -> Answer:
        return self._schema.refused(error)

    def _failure(self, error: ServingError) -> bytes:
        """The end of a stream that broke off, without the user's code, which might pass it off as a good end."""
        self.finished = True
        framing = SSE if self.content_type.startswith(SSE.content_type) else JSONLINES
        return framing.encode({"error": error.message, "code": error.status})

    def _add(self, index: int, token: Token, finish: Finish | None) -> None:
        """One token more; the formatter is called for those of the first sequence, and when all is there."""
        output = self._output
        sequence = output.sequences[index]
        shown = _shown(token)
        shown.request_id = output.request_id
        sequence.append(shown, None if finish is None else finish.value)
        if finish is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self._rank()
                output.finished = True
        if index == 0 or output.finished:
            self._call()
        self.finished = output.finished

    def _rank(self) -> None:
        """Says which sequence is best; beams come ranked by the engine."""
        sampling, sequences = self._request.sampling, self._output.sequences
        order = list(sequences)
        if sampling.num_beams == 1:
            order.sort(key=lambda index: -sequences[index].cumulative_log_prob)
        order = order[: sampling.n] if sampling.n > 1 else order
        self._output.best_sequence_index, *self._output.other_sequences_indices = order

    def _call(self) -> None:
        output = self._output
        if self._formatter.style is Style.LEGACY:
            self._parts.append(self._checked(self._call_legacy()))
            return
        sequence = output.sequences[output.best_sequence_index]
        while True:
            taken = sequence.num_taken
            self._parts.append(self._checked(run(self._formatter, output)))
            # Upstream calls a stream's formatter again until all tokens are taken: for ever, where it takes none.
            if not self._streams or not sequence.has_next_token() or sequence.num_taken == taken:
                return

    def _call_legacy(self) -> Any:
        """LMI 0.28: `(token, first_token, last_token, details, generated_text, id)`."""
        output, request = self._output, self._request
        sequence = output.sequences[output.best_sequence_index]
        token, _, first, last = sequence.get_next_token()
        if token is None:
            return ""
        details: dict[str, Any] = {}
        if request.details:
            details = {
                "finish_reason": sequence.finish_reason,
                "tokens": output.get_tokens_as_dict(output.best_sequence_index),
                "generated_tokens": len(sequence.tokens),
                "inputs": request.prompt,
                "parameters": getattr(output.input, "parameters", {}),
                "prompt_tokens": self._num_prompt_tokens,
            }
        text = request.prompt if request.full_text else ""
        if last:
            text += "".join([token.text for token in sequence.tokens])
        return run(self._formatter, token, first, last, details, text, output.request_id)

    def _checked(self, found: Any) -> str:
        if not isinstance(found, str):
            raise FormatterFailed(f"{_named(self._formatter)} returned {_kind(found)}; it must return a string")
        return found

    def _encode(self, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise FormatterFailed(f"{_named(self._formatter)} returned half a surrogate pair") from None


def _shown(token: Token) -> Shown:
    return Shown(token.id, token.text, token.logprob, token.special or None)


def _said(error: BaseException) -> str:
    try:
        return str(error)[:500].encode(errors="replace").decode()
    except Exception:  # its own __str__ is foreign too
        return ""


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _named(formatter: InputFormatter | OutputFormatter) -> str:
    kind = "input" if isinstance(formatter, InputFormatter) else "output"
    return f"{kind} formatter {formatter.name!r} of model.py"
