"""The interface of a compared system, and the result of one measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from proof.bench.client import Target, prompt
from proof.bench.load import Result


@dataclass(frozen=True)
class Work:
    """`clients` answers at a time, `rounds` times over: greedy, each of exactly `tokens` tokens.

    Attributes:
        prompt_words: length of every prompt.
        first: number of the first prompt; they are numbered on from there, and no two are alike.
        processes: of the load generator, where there is one.
        timeout: seconds until a request counts as failed.
    """

    clients: int
    rounds: int
    tokens: int
    prompt_words: int
    first: int = 0
    processes: int = 2
    timeout: float = 300.0

    def prompts(self) -> list[str]:
        """Return all prompts, one round after the other."""
        return [prompt(self.first + number, self.prompt_words) for number in range(self.clients * self.rounds)]

    def target(self, kind: type[Target], url: str) -> Target:
        return kind(url, self.tokens, self.prompt_words, self.timeout, self.first)


@dataclass(frozen=True)
class CpuSeconds:
    """CPU seconds of a server.

    Attributes:
        host: by process, without the engine's core and workers.
        engine: of the engine's core and workers.
    """

    host: Mapping[str, float] = field(default_factory=dict)
    engine: float = 0.0


class Sample(NamedTuple):
    """A measurement of a system.

    Attributes:
        tokens, seconds: all tokens, from the first request's start to the last answer's end.
        results: the answers; none from an engine without a server.
        used: CPU; None where it is not measured.
        others: cores that processes outside this run kept busy.
        idle: cores that the idle systems took meanwhile.
    """

    tokens: int
    seconds: float
    results: Sequence[Result] = ()
    used: CpuSeconds | None = None
    others: float = 0.0
    idle: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class System(Protocol):
    """A running system, which can be measured any number of times."""

    pid: int  # its process, whose descendants belong to it
    about: Mapping[str, str]  # its settings

    def measure(self, work: Work) -> Sample:
        """Warm up, then do the work. Failed requests are among the results."""


Start = Callable[[], AbstractContextManager[System]]
"""Starts a system, and stops it."""
