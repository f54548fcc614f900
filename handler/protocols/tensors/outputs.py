"""GptManager's output tensors in `outputs` of an answer, as nested lists (TensorRT-LLM, "Inference Request").

A document has a row for each returned sequence, padded to the longest. A line of a stream has its one token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.values import Delta, Token

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


def document(names: OutputTensors, sequences: Sequence[TokenRows], context: Rows | None) -> dict[str, Any]:
    """Build `outputs` of a whole answer; `context` holds the prompt's rows of logits."""
    tokens = [[token for token in sequence.tokens if token.id >= 0] for sequence in sequences]
    longest = max(map(len, tokens), default=0)

    def padded(values: Sequence[Any], pad: Any) -> list[Any]:
        return [*values, *[pad] * (longest - len(values))]

    def generation() -> Any:
        rows = [_lists(sequence.rows[: len(own)]) for sequence, own in zip(sequences, tokens, strict=True)]
        size = max((len(row) for row in itertools.chain(*rows)), default=0)
        return [[padded(own, [0.0] * size) for own in rows]]

    make: dict[str, Callable[[], Any]] = {
        "output_ids": lambda: [padded([token.id for token in own], names.pad) for own in tokens],
        "sequence_length": lambda: [len(own) for own in tokens],
        "output_log_probs": lambda: [[padded([token.logprob for token in own], 0.0) for own in tokens]],
        "cum_log_probs": lambda: [[sum(token.logprob or 0.0 for token in own) for own in tokens]],
        "context_logits": lambda: [_lists(context or ())],
        "generation_logits": generation,
    }
    return {name: make[name]() for name in names.names}


class Lines:
    """The `outputs` of a stream's lines, in order."""

    def __init__(self, names: OutputTensors) -> None:
        self._names = names
        self._total = 0.0
        self._context: Rows | None = None
        self._rows: Iterator[Sequence[float]] = iter(())

    def take(self, delta: Delta) -> None:
        """Take the delta whose tokens come next."""
        if delta.logits is not None:
            self._context = delta.logits.context if delta.logits.context is not None else self._context
            self._rows = iter(delta.logits.generation or ())

    def line(self, token: Token) -> dict[str, Any]:
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


def _lists(rows: Rows) -> list[list[float]]:
    """Turn rows of any array type into lists."""
    return [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
