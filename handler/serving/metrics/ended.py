"""The numbers of requests that have ended, and Triton's statistics of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class EndedRequest(NamedTuple):
    """The numbers of a request that has ended. They keep none of its texts in memory.

    Attributes:
        outcome, finish, num_prompt_tokens, num_tokens, queue, started, first, total: as in `RequestRecord`.
        at: time of the end, in seconds since 1970.
        num_sequences: number of sequences that the client wanted.
        limits: `n` and the maximum number of new tokens of each prompt for which text is generated.
        adapters: names of the LoRA adapters that the prompts use.
        opened: whether TGI would have counted the request at its start.
        num_questions: number of questions to decide, or 0 if the request is for anything else.
    """

    outcome: str
    finish: str
    num_prompt_tokens: int
    num_tokens: int
    queue: float | None
    started: float
    first: float
    total: float
    at: float
    num_sequences: int
    limits: Sequence[tuple[int, int]]
    adapters: Collection[str]
    opened: bool
    num_questions: int

    @property
    def num_later(self) -> int:
        """The number of tokens that are not the first of their sequence, or a negative number or 0 without any."""
        return self.num_tokens - self.num_sequences

    @property
    def per_token(self) -> float:
        """The mean seconds between the tokens of a sequence, if there are any that are not the first."""
        return (self.total - self.first) * self.num_sequences / self.num_later


class Ended:
    """Counts and durations of finished requests that reached the engine, as in Triton's statistics.

    Source: triton-inference-server/server, docs/protocol/extension_statistics.md.
    """

    def __init__(self) -> None:
        self._numbers = {"success": 0, "fail": 0}
        self._seconds = {"success": 0.0, "fail": 0.0, "queue": 0.0, "compute_infer": 0.0}
        self._last = 0.0

    def count(self, requests: Iterable[EndedRequest]) -> None:
        """Count requests, in order of their ends."""
        seconds = self._seconds
        for request in requests:
            outcome = "success" if request.outcome == "ok" else "fail"
            self._last = request.at
            self._numbers[outcome] += 1
            seconds[outcome] += request.total
            seconds["queue"] += request.queue or 0.0
            seconds["compute_infer"] += max(request.total - request.started, 0.0)

    @property
    def last(self) -> int:
        """The time at which the last request ended, in milliseconds since 1970, or 0."""
        return round(self._last * 1000)

    @property
    def durations(self) -> dict[str, dict[str, int]]:
        """The number of requests and their total duration in nanoseconds, by Triton's name for the outcome or phase."""
        ended = sum(self._numbers.values())
        numbers = dict.fromkeys(("queue", "compute_input", "compute_infer", "compute_output"), ended)
        numbers = {**self._numbers, **numbers, "cache_hit": 0, "cache_miss": 0}
        return {name: {"count": n, "ns": round(self._seconds.get(name, 0.0) * 1e9)} for name, n in numbers.items()}
