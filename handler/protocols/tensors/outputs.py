"""GptManager's output tensors in `outputs` of an answer, as nested lists (TensorRT-LLM, "Inference Request").

A document has a row for each returned sequence, padded to the longest. A line of a stream has its one token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypedDict, TypeVar

from handler.core.values import NO_EXTRAS, Delta, Token
from handler.protocols.kernel.schema.types import Count

OUTPUTS = {
    "output_ids": "",
    "sequence_length": "",
    "output_log_probs": "return_log_probs",
    "cum_log_probs": "return_log_probs",
    "context_logits": "return_context_logits",
    "generation_logits": "return_generation_logits",
}
"""Name -> the input tensor that asks for it; "" where only `outputs` does."""

LOGITS = {"context_logits", "generation_logits"}
"""Tensors that the engine must compute: naming them asks the engine for them."""

Rows = Sequence[Sequence[float]]


Numbers = list[list[list[float | None]]]
"""A batch of one; a row for each sequence, a number for each token; null where it is not finite."""


class TensorValues(TypedDict, total=False):
    """`outputs` of an answer."""

    output_ids: list[list[int]]
    sequence_length: list[Count]
    output_log_probs: Numbers
    cum_log_probs: list[list[float | None]]
    context_logits: Numbers
    generation_logits: list[Numbers]


class OutputTensors(NamedTuple):
    """The output tensors of a request; `pad` fills the ids of shorter sequences."""

    names: tuple[str, ...]
    pad: int = -1


def select_tensors(named: Sequence[str], flags: Mapping[str, bool | None], pad: int) -> OutputTensors | None:
    """Return the output tensors that the request selects; None if it selects none.

    Args:
        named: `outputs`.
        flags: input tensor -> its value, where it was set.
    """
    names = tuple(name for name, flag in OUTPUTS.items() if name in named or flags.get(flag))
    return OutputTensors(names, pad) if names else None


class TokenRows(NamedTuple):
    """One sequence: its tokens and, for each, a row of logits of the vocabulary's size, or no rows."""

    tokens: Sequence[Token]
    rows: Rows = ()


def document(tensors: OutputTensors, sequences: Sequence[TokenRows], context: Rows | None) -> TensorValues:
    """Build `outputs` of a whole answer; `context` holds the prompt's rows of logits."""
    tokens = [[token for token in sequence.tokens if token.id >= 0] for sequence in sequences]
    longest, names = max(map(len, tokens), default=0), tensors.names
    values: TensorValues = {}
    if "output_ids" in names:
        values["output_ids"] = [_padded([token.id for token in own], longest, tensors.pad) for own in tokens]
    if "sequence_length" in names:
        values["sequence_length"] = [len(own) for own in tokens]
    if "output_log_probs" in names:
        values["output_log_probs"] = [[_padded([token.logprob for token in own], longest, 0.0) for own in tokens]]
    if "cum_log_probs" in names:
        values["cum_log_probs"] = [[sum(token.logprob or 0.0 for token in own) for own in tokens]]
    if "context_logits" in names:
        values["context_logits"] = [_lists(context or ())]
    if "generation_logits" in names:
        rows = [_lists(sequence.rows[: len(own)]) for sequence, own in zip(sequences, tokens, strict=True)]
        size = max((len(row) for row in itertools.chain(*rows)), default=0)
        values["generation_logits"] = [[_padded(own, longest, [0.0] * size) for own in rows]]
    return values


Value = TypeVar("Value")


def _padded(values: list[Value], size: int, pad: Value) -> list[Value]:
    return [*values, *[pad] * (size - len(values))]


class Lines:
    """The `outputs` of a stream's lines, in order."""

    def __init__(self, names: OutputTensors) -> None:
        self._names = names
        self._total = 0.0
        self._context: Rows | None = None
        self._rows: Iterator[Sequence[float]] = iter(())

    def take(self, delta: Delta) -> None:
        """Take the delta whose tokens come next."""
        extras = delta.extras or NO_EXTRAS
        self._context = self._context if extras.context_logits is None else extras.context_logits
        self._rows = iter(extras.generation_logits or ())

    def line(self, token: Token) -> TensorValues:
        """Build `outputs` of one line. `cum_log_probs` sums up to this token; the prompt's logits come in the first
        line only.
        """
        self._total += token.logprob or 0.0
        row = next(self._rows, None)
        rows = TokenRows((token,), () if row is None else (row,))
        outputs = document(self._names, (rows,), self._context)
        if "cum_log_probs" in outputs:
            outputs["cum_log_probs"] = [[self._total]]
        if self._context is None:
            outputs.pop("context_logits", None)
        self._context = None
        return outputs


def _lists(rows: Rows) -> list[list[float | None]]:
    """Turn rows of any array type into lists."""
    return [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
