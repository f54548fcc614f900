"""Play DJL's Java side in rolling batch to a worker, and measure the worker's CPU time per streamed token."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from djl.worker import Worker

_PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


class Cost(NamedTuple):
    """Cost of a batch of requests from their first to their last token; CPU in seconds.

    Attributes:
        worker: of the worker's process.
        engine: of the processes that it started.
        tokens: lines that all requests got, one a token.
    """

    worker: float
    engine: float
    steps: int
    tokens: int

    @property
    def microseconds(self) -> float:
        return self.worker / self.tokens * 1e6

    @property
    def engine_microseconds(self) -> float:
        return self.engine / self.tokens * 1e6


@dataclass
class _Request:
    """`body` is empty once the worker has taken the request, as Java sends it."""

    body: bytes
    tokens: int = 0
    ended: bool = False


def measure(worker: Worker, size: int, tokens: int, pace: float = 0.0) -> Cost:
    """`size` requests of `tokens` tokens, all at once; at most `pace` steps a second unless that is 0."""
    parameters = {"max_new_tokens": tokens, "details": True}
    body = json.dumps({"inputs": _PROMPT, "parameters": parameters, "stream": True}).encode()
    requests = [_Request(body) for _ in range(size)]
    live, steps = requests, 0
    (worker_before, engine_before), due = worker.cpu(), time.monotonic()
    while live:
        _step(worker, live)
        live = [request for request in live if not request.ended]
        steps += 1
        if pace:
            due = max(due + 1 / pace, time.monotonic() - 1 / pace)
            time.sleep(max(0.0, due - time.monotonic()))
    worker_after, engine_after = worker.cpu()
    if wrong := {request.tokens for request in requests} - {tokens}:
        raise RuntimeError(f"answers of {wrong} tokens instead of {tokens}:\n{worker.log}")
    return Cost(worker_after - worker_before, engine_after - engine_before, steps, size * tokens)


def _step(worker: Worker, live: Sequence[_Request]) -> None:
    """Make a step of DJL's RollingBatch: send all live requests in order of arrival, read answers by position."""
    properties, contents = {"batch_size": str(len(live))}, []
    for index, request in enumerate(live):
        prefix = f"batch_{index:03d}."
        contents.append((f"{prefix}data", request.body))
        if request.body:
            properties[f"{prefix}Content-Type"] = "application/json"
            contents.append((f"{prefix}seed", b"7"))
    reply = worker.call(properties, contents)
    if len(reply.contents) != len(live):
        raise RuntimeError(f"{len(reply.contents)} contents for {len(live)} requests:\n{worker.log}")
    for request, (_, data) in zip(live, reply.contents, strict=True):
        answer = worker.string_map(data)
        if "code" in answer:
            raise RuntimeError(f"a request failed with {answer}:\n{worker.log}")
        request.body = b""
        request.tokens += answer["data"].count("\n")
        request.ended = answer["last"].lower() == "true"
