"""Answers that the output formatter of a user's model.py writes (docs/formatters.md)."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping
from typing import Any

from handler.core.errors import ServingError
from handler.core.framing import JSON, JSONLINES, dumps
from handler.core.values import NO_TOKEN, Delta, Finish, Token
from handler.plugins.api import Sequence, Session, TextGenerationOutput, TextInput
from handler.plugins.api import Token as UserToken
from handler.plugins.functions import OutputFormatter, Style, failed, kind, run, users_objects
from handler.protocols.kernel.base import ParsedRequest, Reply
from handler.protocols.kernel.reply import finish_of, rank_sequences

_ids = itertools.count()


def with_formatter(
    call: ParsedRequest,
    formatter: OutputFormatter,
    body: Mapping[str, Any],
    given: Any,
    *,
    tgi_compat: bool,
    session: Session | None = None,
) -> ParsedRequest:
    """Return the request with the user's function in its reply, where the function applies.

    Args:
        body: the body that `call` was read from.
        given: the input formatter's own object for the output formatter; None for a new one.
        tgi_compat: `option.tgi_compat`.
        session: the client's.
    """
    if call.postprocess is None:
        return call
    if formatter.style is Style.VALUE:
        return call._replace(reply=call.postprocess(functools.partial(_apply, formatter)), formatter=formatter.title)
    if given is None:
        parameters = {**(body.get("parameters") or {}), "stream": call.streams}
        given = TextInput(input_text=call.requests[0].prompt, parameters=parameters)
    output = TextGenerationOutput(next(_ids), given)
    with users_objects(formatter), contextlib.suppress(AttributeError, TypeError):  # it may take no attributes
        given.request_id, given.tgi_compat = output.request_id, tgi_compat
        if session is not None:  # else the name may be the user's own
            given.session = session
    return call._replace(reply=CustomReply(call, formatter, output), formatter=formatter.title)


def _apply(formatter: OutputFormatter, value: Any) -> Any:
    result = run(formatter, value)
    if result is None:
        raise failed(formatter, "returned None; it must return a dict")
    try:
        dumps(result)
    except TypeError as error:
        raise failed(formatter, "returned what is not JSON", error) from None
    return result


class CustomReply(Reply):
    """The answer of an output formatter that takes a TextGenerationOutput, or LMI 0.28's six arguments.

    The formatter runs for each token as it comes; docs/formatters.md states how often exactly.

    Args:
        call: the request.
        formatter: the user's function.
        output: the formatter's argument, still empty.
    """

    def __init__(self, call: ParsedRequest, formatter: OutputFormatter, output: TextGenerationOutput) -> None:
        (self._request,) = call.requests
        self._streams = call.streams
        self._formatter = formatter
        self._output = output
        self._unfinished = self._request.sampling.num_sequences
        output.sequences = {index: Sequence() for index in range(self._unfinished)}
        self._parts: list[str] = []
        self._num_prompt_tokens = 0
        self._errors = call.errors
        self.content_type = (JSONLINES if call.streams else JSON).content_type
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is not None:
            return self._failure(delta.error)
        if delta.prefill is not None:
            self._output.prompt_tokens_details = [_user_token(token) for token in delta.prefill]
        finish = finish_of(self._request, delta)
        tokens = delta.tokens or ((NO_TOKEN,) if finish is not None else ())
        with users_objects(self._formatter):
            for place, token in enumerate(tokens, 1):
                self._add(delta.sequence, token, finish if place == len(tokens) else None)
        if self._streams or self.finished:
            text, self._parts = "".join(self._parts), []
            return self._encode(text)
        return b""

    def _failure(self, error: ServingError) -> bytes:
        """Render the end of a stream that broke off, without the user's code, which might report it as a success."""
        self.finished = True
        return JSONLINES.encode({"error": error.message, "code": self._errors.status(error)})

    def _add(self, index: int, token: Token, finish: Finish | None) -> None:
        """Add a token. The formatter runs for the first sequence's tokens, and when all sequences have ended."""
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
            # Upstream calls a stream's formatter again until all tokens are taken: for ever, where it takes none.
            if not self._streams or not sequence.has_next_token() or sequence.num_taken == num_taken:
                return

    def _call_legacy(self) -> Any:
        """Call it as LMI 0.28 does: `(token, first_token, last_token, details, generated_text, id)`."""
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

    def _check_text(self, result: Any) -> str:
        if not isinstance(result, str):
            raise failed(self._formatter, f"returned {kind(result)}; it must return a string")
        return result

    def _encode(self, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise failed(self._formatter, "returned half a surrogate pair") from None


def _user_token(token: Token) -> UserToken:
    return UserToken(token.id, token.text, token.logprob, token.special or None)
