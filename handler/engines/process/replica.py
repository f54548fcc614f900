"""One engine of several: its supervisor, its work and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from handler.engines.base import EngineStatistics
from handler.engines.process.routing import Load
from handler.engines.process.supervisor import EngineSupervisor

_MAX_SILENCE = 1.0  # seconds that a replica may owe a step and still get requests


class ReplicaReport(NamedTuple):
    """The figures of one replica, since the server's start.

    Attributes:
        num_active: requests of the engine: sequences and beam searches.
        statistics: the engine's own report; None while it has made none.
    """

    number: int
    ready: bool
    num_active: int
    num_requests: int
    num_tokens: int
    restarts: int
    statistics: EngineStatistics | None


class Work(NamedTuple):
    """A sequence in an engine. `began` is the number of the engine's steps before it."""

    num_prompt_tokens: int
    num_tokens: int
    began: int

    def to_come(self, num_steps: int) -> int:
        """Return the most tokens to come, as if each step brought one."""
        done = num_steps - self.began
        return max(self.num_tokens - done, 1) if done else self.num_prompt_tokens + self.num_tokens


@dataclass
class Replica:
    number: int
    engine: EngineSupervisor
    work: dict[int, Work] = field(default_factory=dict)  # by key
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    fd: int | None = None

    def load(self) -> Load:
        return Load(self.number, len(self.work), sum(work.to_come(self.num_steps) for work in self.work.values()))

    def takes(self, num_sequences: int, slots: int) -> bool:
        """Whether it has room, and has not been silent for long: in a long step, or hung."""
        has_room = not self.work or len(self.work) + num_sequences <= slots
        return has_room and self.engine.ready and self.engine.silence < _MAX_SILENCE

    def report(self) -> ReplicaReport:
        return ReplicaReport(
            number=self.number,
            ready=self.engine.ready,
            num_active=len(self.work),
            num_requests=self.num_requests,
            num_tokens=self.num_tokens,
            restarts=self.engine.restarts,
            statistics=self.engine.statistics,
        )
