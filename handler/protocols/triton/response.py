"""Answers of Triton's generate extension: one response, or one a token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.framing import JSON_TEXTS, SLOT, fill, template
from handler.core.values import NO_TOKEN, Delta, Finish, Request, Token
from handler.protocols.kernel.base import TokenLine
from handler.protocols.kernel.reply import SequenceOutput, WholeReply, finish_of, rank_sequences
from handler.protocols.tensors.outputs import Lines, OutputTensors, TokenRows, document
from handler.protocols.triton.errors import ERRORS, EVENTS

_REASONS = {Finish.LENGTH: "length", Finish.EOS: "stop", Finish.STOP: "stop"}
"""TensorRT-LLM's names of the reasons."""


class ResponseOptions(NamedTuple):
    """The options of a request's responses.

    Attributes:
        fixed: fields that every response repeats: the request's id and the model.
        tensors: output tensors beside the text.
        extras: further fields: finish_reason, cumulative_logprob, num_input_tokens, num_output_tokens.
        before: the prompt, where the text begins with it.
    """

    request: Request
    fixed: Mapping[str, str]
    tensors: OutputTensors | None
    extras: frozenset[str]
    before: str

    def response(self, text: str | Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
        """Build a response, names in alphabetical order; a tensor of one element is that element, others are flat
        lists.
        """
        fields = {**self.fixed, **{name: _flat(value) for name, value in values.items()}, "text_output": text}
        return dict(sorted(fields.items()))


def _flat(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    while value and isinstance(value[0], list):
        value = list(itertools.chain.from_iterable(value))
    return value[0] if len(value) == 1 else value


class ResponseReply(WholeReply):
    """One response: the text, or a list of texts for several sequences."""

    def __init__(self, options: ResponseOptions) -> None:
        super().__init__(options.request.sampling.num_sequences)
        self._options = options

    def _finish(self, delta: Delta) -> Finish | None:
        return finish_of(self._options.request, delta)

    def _document(self) -> dict[str, Any]:
        options = self._options
        sequences = self._rank()
        texts = [options.before + sequence.text for sequence in sequences]
        lengths = [sum(token.id >= 0 for token in sequence.tokens) for sequence in sequences]
        extras: dict[str, Any] = {
            "finish_reason": [_REASONS.get(sequence.finish) for sequence in sequences],
            "cumulative_logprob": [sequence.logprob for sequence in sequences],
            "num_input_tokens": self._num_prompt_tokens,
            "num_output_tokens": lengths,
        }
        values = {name: extras[name] for name in options.extras}
        if options.tensors is not None:
            generated = [TokenRows(sequence.tokens, sequence.rows) for sequence in sequences]
            values |= document(options.tensors, generated, self._context)
        return options.response(texts[0] if len(texts) == 1 else texts, values)

    def _rank(self) -> list[SequenceOutput]:
        """Return the sequences in the order of their seeds; ranked for `best_of`, and as the engine ranks beams."""
        sampling = self._options.request.sampling
        if sampling.num_beams == 1 and sampling.best_of <= sampling.n:
            return self._sequences
        ranked = rank_sequences([sequence.logprob for sequence in self._sequences], sampling)
        count = sampling.n if sampling.n > 1 or sampling.num_beams == 1 else sampling.num_beams
        return [self._sequences[index] for index in ranked[:count]]


class OneEventReply(ResponseReply):
    """The whole response as the only event."""

    content_type = EVENTS.content_type

    def feed(self, index: int, delta: Delta) -> bytes:
        data = super().feed(index, delta)
        return EVENTS.before + data + EVENTS.after if data else b""


class StreamReply:
    """An event a token."""

    content_type = EVENTS.content_type

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._before = options.before
        self._lines = None if options.tensors is None else Lines(options.tensors)
        self._num_prompt_tokens = 0
        self._logprob = 0.0
        self._text_event: bytes | None = None  # the template of an event where nothing but the text changes
        if self._lines is None and options.extras <= {"finish_reason"}:
            self._text_event = template(EVENTS.encode(options.response(SLOT, {})))
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.finish is None and self._text_event is not None and not self._before:
            return fill(self._text_event, delta.tokens)
        self.finished = delta.finish is not None
        if delta.error is not None:
            return EVENTS.encode(ERRORS.tail(delta.error))
        if self._lines is not None:
            self._lines.take(delta)
        if delta.finish is None:
            return b"".join([self._event(token) for token in delta.tokens])
        *tokens, last = delta.tokens or (NO_TOKEN,)
        finish = finish_of(self._options.request, delta)
        return b"".join([*map(self._event, tokens), self._event(last, finish)])

    def token_line(self) -> TokenLine | None:
        event = self._text_event
        return None if event is None or self._before else lambda token: event % JSON_TEXTS[token.text]

    def _event(self, token: Token, finish: Finish | None = None) -> bytes:
        text = token.text
        if self._before:
            text, self._before = self._before + text, ""
        extras = self._options.extras
        self._logprob += token.logprob or 0.0
        values: dict[str, Any] = {} if self._lines is None else self._lines.line(token)
        beside = {
            "cumulative_logprob": self._logprob,
            "num_input_tokens": self._num_prompt_tokens,
            "num_output_tokens": int(token.id >= 0),
        }
        values |= {name: value for name, value in beside.items() if name in extras}
        if finish is not None and "finish_reason" in extras:
            values["finish_reason"] = _REASONS.get(finish)
        return EVENTS.encode(self._options.response(text, values))
