"""GptManager's output tensors (seed 000) as `outputs` of an answer: the seed's shapes, as nested lists.

Of a document they have a row for each sequence that the client gets, the shorter ones padded; of a line of a stream
they are about its one token.
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
"""Name -> the input tensor that asks for it; "" where `outputs` alone does."""

LOGITS = {"context_logits", "generation_logits"}
"""Those that only the engine has, so that naming them asks it for them."""

Rows = Sequence[Sequence[float]]


class OutputTensors(NamedTuple):
    """What of `OUTPUTS` is asked for; `pad` fills the ids of sequences that are shorter than the longest."""

    names: tuple[str, ...]
    pad: int = -1


def select_tensors(named: Sequence[str], flags: Mapping[str, bool | None], pad: int) -> OutputTensors | None:
    """None when nothing is.

    Args:
        named: `outputs`.
        flags: the input tensors that are set.
    """
    names = tuple(name for name, flag in OUTPUTS.items() if name in named or flags.get(flag))
    return OutputTensors(names, pad) if names else None


class TokenRows(NamedTuple):
    """One sequence of an answer: its tokens and, for each, its row of logits where there are any."""

    tokens: Sequence[Token]
    rows: Rows = ()


def document(names: OutputTensors, sequences: Sequence[TokenRows], context: Rows | None) -> dict[str, Any]:
    """`outputs` of a whole answer; `context` are the prompt's rows of logits."""
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
    """`outputs` of the lines of a stream, in order."""

    def __init__(self, names: OutputTensors) -> None:
        self._names = names
        self._total = 0.0
        self._context: Rows | None = None
        self._rows: Iterator[Sequence[float]] = iter(())

    def take(self, delta: Delta) -> None:
        """The delta whose tokens come next."""
        if delta.logits is not None:
            self._context = delta.logits.context if delta.logits.context is not None else self._context
            self._rows = iter(delta.logits.generation or ())

    def line(self, token: Token) -> dict[str, Any]:
        """`cum_log_probs` goes up to this token; the prompt's logits stand in the first line only."""
        self._total += token.logprob or 0.0
        row = next(self._rows, None)
        one = TokenRows((token,), () if row is None else (row,))
        found = document(self._names, (one,), self._context)
        if "cum_log_probs" in found:
            found["cum_log_probs"] = [[self._total]]
        if self._context is None:
            found.pop("context_logits", None)
        self._context = None
        return found


def _lists(rows: Rows) -> list[list[float]]:
    """Rows as JSON's encoder takes them, whatever the engine made them of."""
    return [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
