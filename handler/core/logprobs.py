"""Log-probabilities of given tokens, and of the most likely ones in their places, from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Tops = Sequence[tuple[int, float]]


def score(rows: Any, ids: Sequence[int], num_tops: int) -> tuple[list[float], list[Tops]]:
    """The log-probability of each of `ids`, and the `num_tops` most likely ids in its place, the first one first.

    Args:
        rows: a numpy array [ids, vocabulary] of float32: of what stands before each id.
    """
    import numpy

    if not len(ids):
        return [], []
    highest = rows.max(axis=-1, keepdims=True)
    norms = highest[:, 0] + numpy.log(numpy.exp(rows - highest).sum(axis=-1))
    chosen = (rows[numpy.arange(len(ids)), list(ids)] - norms).tolist()
    if not num_tops:
        return chosen, [()] * len(ids)
    num_tops = min(num_tops, rows.shape[-1])
    best = numpy.argpartition(rows, -num_tops, axis=-1)[:, -num_tops:]
    values = numpy.take_along_axis(rows, best, axis=-1)
    order = numpy.argsort(-values, axis=-1, kind="stable")
    best = numpy.take_along_axis(best, order, axis=-1)
    values = numpy.take_along_axis(values, order, axis=-1) - norms[:, None]
    return chosen, [tuple(zip(*row, strict=True)) for row in zip(best.tolist(), values.tolist(), strict=True)]
