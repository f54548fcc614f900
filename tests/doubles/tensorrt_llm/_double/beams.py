"""Beam search, which the executor does at once."""

from __future__ import annotations

from typing import Any

import numpy
from tensorrt_llm._double.model import log_softmax
from tensorrt_llm._double.request import Request, Sequence
from tensorrt_llm._double.result import Response, entry


def search(engine: Any, request: Request) -> None:
    params, width = request.params, request.params.best_of
    alive: list[tuple[float, list[int], list[Any]]] = [(0.0, [], [])]
    ended: list[tuple[float, list[int], list[Any], str]] = []
    penalty = params.length_penalty or 0.0
    while alive and len(ended) < width:
        found: list[tuple[float, list[int], list[Any]]] = []
        for total, ids, entries in alive:
            logprobs = log_softmax(engine.model.logits([*request.prompt, *ids]))
            for id in numpy.argsort(-logprobs, kind="stable")[: 2 * width].tolist():
                found_entry = entry(logprobs, id, params.logprobs or 1)
                found.append((total + float(logprobs[id]), [*ids, id], [*entries, found_entry]))
        alive = []
        for total, ids, entries in sorted(found, key=lambda one: -one[0])[: 2 * width]:
            sequence = Sequence(None, ids)
            if (finish := engine._finish(request, sequence)) is not None:
                ended.append((total, ids, entries, finish))
            elif len(alive) < width:
                alive.append((total, ids, entries))
    best = sorted(ended, key=lambda one: -one[0] / len(one[1]) ** penalty)[:width]
    engine._active.pop(request.id, None)
    for number, (total, ids, entries, finish) in enumerate(best):
        engine._tokens += len(ids)
        logprobs = entries if params.logprobs else None
        last = number == len(best) - 1
        engine._say(request, Response(number, ids, logprobs, finish, cumulative=total, last=last))
