"""One engine of several: its supervisor, its work and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from handler.core.text import Prompt
from handler.core.values import Pooling, Request
from handler.engines.base import EngineRequest, EngineStatistics, Step
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
    """A sequence in an engine.

    Attributes:
        origin: the client's request and its prompt; None for a later part of one.
        began: the number of the engine's steps before it.
        moved_from: the replica that had it before; None where it is the first one.
    """

    request: EngineRequest
    origin: tuple[Request, Prompt] | None
    num_prompt_tokens: int
    num_tokens: int
    began: int
    moved_from: Replica | None = None

    def to_come(self, num_steps: int) -> int:
        """Return an upper bound of the tokens still to compute, of the prompt too before its first step."""
        done = num_steps - self.began
        return max(self.num_tokens - done, 1) if done else self.num_prompt_tokens + self.num_tokens


@dataclass(eq=False)
class Replica:
    """One engine.

    Attributes:
        work: its sequences, by key.
        fresh: the keys of the sequences without any output yet.
        left: the keys of the sequences that moved away while it was silent; later output for them is ignored.
    """

    number: int
    engine: EngineSupervisor
    work: dict[int, Work] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    fd: int | None = None

    def add(
        self, request: EngineRequest, origin: tuple[Request, Prompt] | None, moved_from: Replica | None = None
    ) -> None:
        """Send a sequence to its engine."""
        most = 0 if isinstance(request.parameters, Pooling) else request.parameters.max_new_tokens
        self.work[request.key] = Work(request, origin, len(request.ids), most, self.num_steps, moved_from)
        self.fresh.add(request.key)
        self.engine.add(request)

    def drop(self, key: int) -> Work:
        """Remove a sequence that has finished on this replica, or is about to leave it."""
        work = self.work.pop(key)
        self.fresh.discard(key)
        if work.moved_from is not None:
            work.moved_from.left.discard(key)
        return work

    def read(self, step: Step) -> Step:
        """Record which sequences have output, and return the step without those that moved away."""
        if self.left and not (
            self.left.isdisjoint(step.keys) and self.left.isdisjoint(output.key for output in step.others)
        ):
            step = _without(step, self.left)
        if self.fresh:
            self.fresh.difference_update(step.keys)
            self.fresh.difference_update(output.key for output in step.others)
        return step

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


def _without(step: Step, keys: set[int]) -> Step:
    columns = zip(step.keys, step.ids, step.logprobs, strict=True)
    kept = [column for column in columns if column[0] not in keys]
    others = [output for output in step.others if output.key not in keys]
    return Step([key for key, _, _ in kept], [id for _, id, _ in kept], [score for _, _, score in kept], others)
