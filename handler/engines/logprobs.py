"""Log-probabilities of given tokens, and the most likely alternatives, of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handler.engines.base import Alternatives


def score(rows: Any, ids: Sequence[int], num_tops: int) -> tuple[list[float], list[Alternatives]]:
    """Return the log-probability of each of `ids`, and its `num_tops` most likely alternatives, best first.

    Args:
        rows: logits before each id, a numpy array [ids, vocabulary] of float32.
    """
    import numpy

    if not len(ids):
        return [], []
    highest = rows.max(axis=-1, keepdims=True)
    norms = highest[:, 0] + numpy.log(numpy.exp(rows - highest).sum(axis=-1))
    logprobs = (rows[numpy.arange(len(ids)), list(ids)] - norms).tolist()
    if not num_tops:
        return logprobs, [()] * len(ids)
    num_tops = min(num_tops, rows.shape[-1])
    best = numpy.argpartition(rows, -num_tops, axis=-1)[:, -num_tops:]
    values = numpy.take_along_axis(rows, best, axis=-1)
    order = numpy.argsort(-values, axis=-1, kind="stable")
    best = numpy.take_along_axis(best, order, axis=-1)
    values = numpy.take_along_axis(values, order, axis=-1) - norms[:, None]
    return logprobs, [tuple(zip(*row, strict=True)) for row in zip(best.tolist(), values.tolist(), strict=True)]
