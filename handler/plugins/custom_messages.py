"""A reader and replies that call the formatters in a user's model.py (docs/custom-code.md)."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from handler.core.errors import ServingError
from handler.core.framing import JSON, JSONLINES, SSE, Framing, loads
from handler.core.text import Prompt
from handler.core.values import NO_TOKEN, Delta, Finish, Token
from handler.plugins.api import Input, Response, Sequence, Session, TextGenerationOutput, TextInput
from handler.plugins.api import Token as UserToken
from handler.plugins.functions import InputFormatter, OutputFormatter, Style, failed, kind, run, users_objects
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.reply import Reply, WrappedReply, finish_of, rank_sequences

_ids = itertools.count()


def with_formatter(
    call: ParsedRequest,
    formatter: OutputFormatter,
    body: Mapping[str, Any],
    values: Any,
    *,
    tgi_compat: bool,
    session: Session | None = None,
) -> ParsedRequest:
    """Return the request with a reply that calls the user's output formatter if it applies to the request.

    Args:
        call: the parsed request.
        formatter: the user's output formatter.
        body: the body from which `call` was parsed.
        values: the object that the input formatter returned, or None to create a TextInput for the output formatter.
        tgi_compat: whether `option.tgi_compat` is set.
        session: the session of the client, or None if there is none.
    """
    formatted: Reply
    formats = call.formats._replace(title=formatter.title)
    if formatter.style is Style.RESPONSE:
        if call.formats.as_openai is None:
            return call
        formatted = ResponseReply(call.formats.as_openai(), formatter, call)
        return call._replace(reply=formatted, formats=formats, keep_alive=b"")
    if formatter.style is Style.VALUE and call.formats.as_openai is not None:
        return call._replace(reply=ValueReply(call.reply, formatter), formats=formats)
    if not call.formats.of_tokens:
        return call
    if values is None:
        parameters = {**(body.get("parameters") or {}), "stream": call.streams}
        values = TextInput(input_text=call.requests[0].prompt, parameters=parameters)
    output = TextGenerationOutput(next(_ids), values)
    with users_objects(formatter), contextlib.suppress(AttributeError, TypeError):  # its attributes may be read-only
        values.request_id, values.tgi_compat = output.request_id, tgi_compat
        if session is not None:  # otherwise, the user may use the name for another purpose
            values.session = session
    return call._replace(reply=CustomReply(call, formatter, output), formats=formats)


class ValueReply(WrappedReply):
    """A reply that passes its values through a formatter before they are framed.

    A value is either a whole document or a line of a stream. Errors are not passed to the formatter.
    """

    def __init__(self, reply: Reply, formatter: OutputFormatter) -> None:
        super().__init__(reply)
        self._formatter = formatter
        self._framing = _FRAMINGS[reply.content_type]

    def feed(self, index: int, delta: Delta) -> bytes:
        data = super().feed(index, delta)
        if delta.error is not None:
            return data
        return b"".join([self._changed(part) for part in _parts(data, self._framing)])

    def _changed(self, part: bytes) -> bytes:
        """Apply the formatter to an unframed part. A part that is not JSON ends the stream and remains unchanged."""
        framing = self._framing
        try:
            value = loads(part)
        except ValueError:
            return framing.before + part + framing.after
        changed = [self._apply(member) for member in value] if isinstance(value, list) else self._apply(value)
        end = b"\n" if framing is JSON and part.endswith(b"\n") else b""  # as in LMI's async mode
        try:
            return framing.encode(changed) + end
        except TypeError as error:
            raise failed(self._formatter, "returned something that is not JSON", error) from None

    def _apply(self, value: Any) -> Any:
        """Apply the formatter to a value. Omit `generated_text` if it is null: LMI's examples take its length."""
        names = list(value) if isinstance(value, dict) and value.get(_TEXT, "") is None else []
        if names:
            del value[_TEXT]
        result = run(self._formatter, value)
        if names and isinstance(result, dict) and result.keys() >= {*names} - {_TEXT}:  # still the same line
            result = {**{name: result.get(name) for name in names}, **result}
        if result is None:
            raise failed(self._formatter, "returned None; it must return a dict")
        return result


_TEXT = "generated_text"

_FRAMINGS = {framing.content_type: framing for framing in (JSON, JSONLINES, SSE)}


def _parts(data: bytes, framing: Framing) -> list[bytes]:
    """Split the output of a reply into parts without framing. A reply always sends complete parts."""
    if not framing.after:
        return [data] if data else []
    return [part.removeprefix(framing.before) for part in data.split(framing.after)[:-1]]


class ResponseReply(WrappedReply):
    """A reply in LMI's async mode that is written by a formatter.

    The formatter is called with a response object, or with each chunk of a stream as text. It returns the whole body or
    a chunk, which is followed by a line break. A stream ends with an empty line.

    Args:
        reply: the reply in OpenAI's format.
        formatter: the user's output formatter.
        call: the request.
    """

    def __init__(self, reply: Reply, formatter: OutputFormatter, call: ParsedRequest) -> None:
        super().__init__(reply)
        self._formatter = formatter
        self._errors = call.errors
        self._streams = call.streams
        self._framing = _FRAMINGS[reply.content_type]
        self.content_type = (JSONLINES if call.streams else JSON).content_type

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is not None:
            self.finished = True
            return broken_off(self._errors, delta.error)
        data = super().feed(index, delta)
        if not self._streams:
            return self._written(Response(loads(data))) if data else b""
        parts = [part for part in _parts(data, self._framing) if part]
        if self.finished and self._framing is JSONLINES:
            parts.append(b"[DONE]")
        sent = [self._written(f"data: {part.decode()}\n\n") for part in parts]
        return b"".join(sent) + (b"\n" if self.finished else b"")

    def _written(self, value: Response | str) -> bytes:
        formatter = self._formatter
        result = run(formatter, value)
        with users_objects(formatter):
            return f"{self._text(result)}\n".encode()

    def _text(self, result: Any) -> str:
        if isinstance(result, str):
            return result
        if not isinstance(result, dict):
            if callable(dump := getattr(result, "model_dump_json", None)):
                return str(dump())
            if not callable(dump := getattr(result, "model_dump", None)):
                expected = "a chunk" if self._streams else "a response object"
                raise failed(self._formatter, f"returned {kind(result)}; it must return {expected}, a dict or a string")
            result = dump()
        try:
            return json.dumps(result, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise failed(self._formatter, "returned something that is not JSON", error) from None


def broken_off(errors: ErrorFormat, error: ServingError) -> bytes:
    """Return the end of a failed stream in the format of the API, because a formatter might report success."""
    return JSONLINES.encode(errors.tail(error))


class CustomReply(Reply):
    """A reply for an output formatter that takes a TextGenerationOutput, or the six arguments of LMI 0.28.

    The formatter is called for each token as soon as it is generated. docs/custom-code.md describes the calls.

    Args:
        call: the request.
        formatter: the user's function.
        output: the argument for the formatter, which is still empty.
    """

    def __init__(self, call: ParsedRequest, formatter: OutputFormatter, output: TextGenerationOutput) -> None:
        (self._request,) = call.requests
        self._streams = call.streams
        self._formatter = formatter
        self._output = output
        self._unfinished = self._request.sampling.num_sequences
        output.sequences = {index: Sequence(with_index=formatter.unpacks_index) for index in range(self._unfinished)}
        self._parts: list[str] = []
        self._num_prompt_tokens = 0
        self._errors = call.errors
        self.content_type = (JSONLINES if call.streams else JSON).content_type
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is not None:
            self.finished = True
            return broken_off(self._errors, delta.error)
        self._num_prompt_tokens += delta.num_media_tokens
        if delta.prefill is not None:
            self._output.prompt_tokens_details = [_user_token(token) for token in delta.prefill]
        finish = finish_of(self._request, delta)
        tokens = delta.tokens or ((NO_TOKEN,) if finish is not None else ())
        with users_objects(self._formatter):
            for count, token in enumerate(tokens, 1):
                self._add(delta.sequence, token, finish if count == len(tokens) else None)
        if self._streams or self.finished:
            text, self._parts = "".join(self._parts), []
            try:
                return text.encode()
            except UnicodeEncodeError:
                raise failed(self._formatter, "returned a lone surrogate") from None
        return b""

    def _add(self, index: int, token: Token, finish: Finish | None) -> None:
        """Add a token. Call the formatter if the token is from the first sequence, or if all sequences are finished."""
        output = self._output
        sequence = output.sequences[index]
        user_token = _user_token(token)
        user_token.request_id = output.request_id
        sequence.append(user_token, None if finish is None else finish.value)
        if self._request.sampling.top_logprobs:
            sequence.top_tokens.append([_user_token(alternative) for alternative in token.top])
        if finish is not None:
            self._unfinished -= 1
            if not self._unfinished:
                output.finished = True
                logprobs = [each.cumulative_log_prob for each in output.sequences.values()]
                output.best_sequence_index, *output.other_sequences_indices = rank_sequences(
                    logprobs, self._request.sampling
                )
        self.finished = not self._unfinished
        if index == 0 or self.finished:
            self._call()

    def _call(self) -> None:
        output = self._output
        if self._formatter.style is Style.LEGACY:
            self._parts.append(self._check_text(self._call_legacy()))
            return
        sequence = output.sequences[output.best_sequence_index]
        while True:
            num_taken = sequence.num_taken
            self._parts.append(self._check_text(run(self._formatter, output)))
            # Upstream calls the formatter of a stream until it has taken all tokens, which never ends if it takes none.
            if not self._streams or not sequence.has_next_token() or sequence.num_taken == num_taken:
                return

    def _call_legacy(self) -> Any:
        """Call the formatter as in LMI 0.28: `(token, first_token, last_token, details, generated_text, id)`."""
        output = self._output
        sequence = output.sequences[output.best_sequence_index]
        token, *_, first, last = sequence.get_next_token()
        if token is None:
            return ""
        details = self._details() if self._request.details else {}
        text = self._request.text_before
        if last:
            text += "".join([token.text for token in sequence.tokens])
        return run(self._formatter, token, first, last, details, text, output.request_id)

    def _details(self) -> dict[str, Any]:
        """Return the details for an LMI 0.28 formatter."""
        output = self._output
        sequence = output.sequences[output.best_sequence_index]
        return {
            "finish_reason": sequence.finish_reason,
            "tokens": output.get_tokens_as_dict(output.best_sequence_index),
            "generated_tokens": len(sequence.tokens),
            "inputs": self._request.prompt,
            "parameters": getattr(output.input, "parameters", {}),
            "prompt_tokens": self._num_prompt_tokens,
        }

    def _check_text(self, result: Any) -> str:
        if not isinstance(result, str):
            raise failed(self._formatter, f"returned {kind(result)}; it must return a string")
        return result


def _user_token(token: Token) -> UserToken:
    return UserToken(token.id, token.text, token.logprob, token.special or None)


# -- the input formatter -----------------------------------------------------------------------------------------------


class CustomReader:
    """Reads request bodies by calling the user's input formatter.

    Args:
        formatter: the user's function.
        decode: a function to decode the body, for formatters that take the decoded payload.
        keywords: the keyword arguments that a formatter may accept.
    """

    def __init__(
        self,
        formatter: InputFormatter,
        decode: Callable[[bytes], Any],
        keywords: Mapping[str, Any],
    ) -> None:
        self._formatter = formatter
        self._decode = decode
        accepts = formatter.accepts
        self._keywords = {name: value for name, value in keywords.items() if accepts is None or name in accepts}

    def read(
        self, body: bytes, headers: Mapping[str, str], session: Session | None = None
    ) -> tuple[dict[str, Any], Any]:
        """Read a body.

        Returns:
            The body as a dict for the parser of the API, and the object that the formatter returned, or None if that
            was also a dict.

        Raises:
            FormatterFailed: if the formatter failed.
            InvalidPayload: if the formatter takes the decoded payload and the body is not JSON.
        """
        formatter = self._formatter
        item = self._decode(body) if formatter.takes_payload else Input(body, headers, session)
        adapters = item.get("adapters") if isinstance(item, dict) else None
        keywords = self._keywords
        if session is not None and (formatter.accepts is None or "session" in formatter.accepts):
            keywords = {**keywords, "session": session}
        value = run(formatter, item, **keywords)
        with users_objects(formatter):
            read, formatted = self._read(value)
        if adapters is not None:  # LMI reads them before it calls the formatter, which may drop them
            read.setdefault("adapters", adapters)
        return read, formatted

    def _read(self, result: Any) -> tuple[dict[str, Any], Any]:
        formatter = self._formatter
        if isinstance(result, dict):
            return self._plain(result), None
        if getattr(result, "input_text", None) is None:
            raise failed(
                formatter, f"returned {kind(result)}; it must return a RequestInput with input_text, or a dict"
            )
        parameters = getattr(result, "parameters", None)
        value = {"inputs": result.input_text, "parameters": parameters}
        if isinstance(parameters, dict) and "stream" in parameters:  # LMI's own reader copies the body's `stream` there
            value["stream"] = parameters["stream"]
        if adapters := getattr(result, "adapters", None):
            value["adapters"] = adapters
        return self._plain(value), result

    def _plain(self, value: dict[str, Any]) -> dict[str, Any]:
        """Copy the value by encoding it as JSON and decoding it, so that it contains no user-defined objects."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise failed(self._formatter, "returned something that is not JSON", error) from None
        plain: dict[str, Any] = json.loads(text)
        return plain


class FormatterTokenizer:
    """The `tokenizer` argument of input formatters.

    Args:
        encode: the function of the engine to tokenize text. It must be thread-safe.
    """

    def __init__(self, encode: Callable[[str], Prompt]) -> None:
        self._encode = encode

    def encode(self, text: str) -> list[int]:
        return self._encode(text).ids
