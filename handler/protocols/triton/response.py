"""Renders tokens as responses of Triton's generate extension: one object, or a stream with one object per token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.core.framing import JSON, SLOT, Framing, template
from handler.core.values import Delta, Finish, Request, Token
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.reply import SequenceOutput, TokenStream, WholeReply, finish_of, rank_sequences
from handler.protocols.kernel.tensors import Lines, OutputTensors, TensorValues
from handler.protocols.triton.api import EVENTS, TritonExtras, TritonHead

_REASONS = {Finish.LENGTH: "length", Finish.EOS: "stop", Finish.STOP: "stop"}
"""Maps finish reasons to TensorRT-LLM's names."""


class ResponseOptions(NamedTuple):
    """The options of the responses to a request.

    Attributes:
        fixed: the fields that are the same in every response: the model and the request id.
        tensors: the output tensors other than the text, or None if none are requested.
        extras: the names of the requested extra fields, such as finish_reason.
        before: the prompt if the text begins with it, or else "".
        ids_before: the token ids of the prompt if `output_ids` begins with them, or empty.
    """

    request: Request
    fixed: TritonHead
    tensors: OutputTensors | None
    extras: frozenset[str]
    before: str
    ids_before: tuple[int, ...] = ()

    def values(self, texts: str | list[str], tensors: TensorValues | None, extras: TritonExtras) -> Mapping[str, Any]:
        """Return the contents of the requested output tensors by name, in the order of the model."""
        selected = {name: item for name, item in extras.items() if name in self.extras}
        if tensors and self.ids_before:
            tensors["output_ids"] = [[*self.ids_before, *ids] for ids in tensors["output_ids"]]
            tensors["sequence_length"] = [len(self.ids_before) + number for number in tensors["sequence_length"]]
        return {"text_output": texts, **(tensors or {}), **selected}

    def response(
        self, text: str | list[str], values: TensorValues | None = None, extras: TritonExtras | None = None
    ) -> Mapping[str, object]:
        """Build a response whose fields are in alphabetical order.

        Args:
            text: one text, or a list of texts. Like a tensor, a list with one element is written as that element.
            values: the output tensors. A tensor with one element is written as a number, and others as flat lists.
            extras: the extra fields. Only requested fields are included.
        """
        contents = self.values(text, values, extras or {})
        response: Mapping[str, object] = {**self.fixed, **{name: _flat(item) for name, item in contents.items()}}
        return dict(sorted(response.items()))


def _flat(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    _, items = shape_of(value)
    return items[0] if len(items) == 1 else items


def shape_of(value: list[Any]) -> tuple[list[int], list[Any]]:
    """Return the shape of nested lists, and their elements."""
    shape = [len(value)]
    while value and isinstance(value[0], list):
        shape.append(len(value[0]))
        value = list(itertools.chain.from_iterable(value))
    return shape, value


class TritonDocument(WholeReply):
    """One response with the text, or with a list of texts if there are several sequences."""

    def __init__(self, options: ResponseOptions, framing: Framing = JSON) -> None:
        super().__init__(options.request.sampling.num_sequences, framing=framing)
        self._options = options

    def _finish(self, delta: Delta) -> Finish | None:
        return finish_of(self._options.request, delta)

    def _document(self) -> Mapping[str, object]:
        return self._options.response(*self._outputs())

    def _outputs(self) -> tuple[list[str], TensorValues | None, TritonExtras]:
        """Return the texts, the output tensors and the extra fields of the response."""
        options = self._options
        sequences = self._rank()
        texts = [options.before + sequence.text for sequence in sequences]
        lengths = [sequence.num_tokens for sequence in sequences]
        extras: TritonExtras = {
            "finish_reason": [_REASONS.get(sequence.finish) for sequence in sequences],
            "cumulative_logprob": [sequence.logprob for sequence in sequences],
            "num_input_tokens": self._num_prompt_tokens,
            "num_output_tokens": lengths,
        }
        return texts, self._tensors(options.tensors, sequences), extras

    def _rank(self) -> list[SequenceOutput]:
        """Return the sequences to show: with `best_of` or beams the best ones, best first, else all by index."""
        sampling = self._options.request.sampling
        if sampling.num_beams == 1 and sampling.best_of <= sampling.n:
            return self._sequences
        ranked = rank_sequences([sequence.logprob for sequence in self._sequences], sampling)
        count = sampling.n if sampling.n > 1 or sampling.num_beams == 1 else sampling.num_beams
        return [self._sequences[index] for index in ranked[:count]]


class TritonStream(TokenStream):
    """A stream of one event per token."""

    def __init__(self, options: ResponseOptions, errors: ErrorFormat) -> None:
        super().__init__(errors, EVENTS)
        self._options = options
        self._before = options.before
        self._lines = None if options.tensors is None else Lines(options.tensors)
        self._logprob = 0.0

    def _take(self, position: int, delta: Delta) -> None:
        if self._lines is not None:
            self._lines.take(delta)

    def _token(self, position: int, token: Token) -> bytes:
        event = self._event(token, None)
        if self._lines is None and self._options.extras <= {"finish_reason"}:
            self._events[position] = template(EVENTS.encode(self._options.response(SLOT)))
        return event

    def _finish(self, delta: Delta) -> Finish:
        return finish_of(self._options.request, delta) or super()._finish(delta)

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        return self._event(token, finish)

    def _event(self, token: Token, finish: Finish | None) -> bytes:
        text, self._before = self._before + token.text, ""
        self._logprob += token.logprob or 0.0
        extras: TritonExtras = {
            "cumulative_logprob": self._logprob,
            "num_input_tokens": self._num_prompt_tokens,
            "num_output_tokens": int(token.id >= 0),
        }
        if finish is not None:
            extras["finish_reason"] = _REASONS.get(finish)
        return self._render(text, None if self._lines is None else self._lines.line(token), extras, finish)

    def _render(self, text: str, values: TensorValues | None, extras: TritonExtras, finish: Finish | None) -> bytes:
        return EVENTS.encode(self._options.response(text, values, extras))
