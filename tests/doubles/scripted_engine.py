"""A scripted engine for the batcher, and the steps of a test: submit, run, and read the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Delta, Finish, Request, Sampling
from handler.engines.base import EngineRequest, Output, Step
from handler.scheduler.batcher import Batcher

LETTERS = Vocabulary([bytes([code]) for code in range(256)])


@dataclass
class Scripted:
    """Gives each request its own prompt's letters back, one a step; does what it is told to go wrong."""

    ready: bool = True
    active: dict[int, list[int]] = field(default_factory=dict)
    seeds: list[int | None] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)
    fail: Exception | None = None
    refuse: str = ""

    def admits(self, request: Request, prompt: Prompt) -> bool:
        return self.ready

    def continues(self, key: int) -> bool:
        return self.ready

    def add(self, request: EngineRequest) -> None:
        self.active[request.key] = list(request.ids)
        self.left[request.key] = request.sampling.max_new_tokens
        self.seeds.append(request.sampling.seed)

    def cancel(self, key: int) -> None:
        self.active.pop(key, None)
        self.cancelled.append(key)

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None: ...

    def step(self, timeout: float = 0.0) -> list[Step]:
        if self.fail is not None:
            error, self.fail = self.fail, None
            self.active.clear()
            raise error
        step = Step([], [], [], [])
        for key, ids in list(self.active.items()):
            if self.refuse and bytes(ids).decode() == self.refuse:
                step.others.append(Output(key, (), (), Finish.ERROR, error="cannot do that"))
                del self.active[key]
                continue
            self.left[key] -= 1
            id = ids[-1 - self.left[key] % len(ids)]
            if self.left[key]:
                step.keys.append(key)
                step.ids.append(id)
                step.logprobs.append(-0.1)
            else:
                step.others.append(Output(key, [id], [-0.1], Finish.LENGTH))
                del self.active[key]
        return [step]


def prompt(text: str) -> Prompt:
    return Prompt(text, list(text.encode()), LETTERS)


def submit(batcher: Batcher, text: str, **sampling: Any) -> int:
    return batcher.submit(Request(text, Sampling(**sampling)), prompt(text))


def run(batcher: Batcher, steps: int = 50) -> dict[int, list[Delta]]:
    found: dict[int, list[Delta]] = {}
    for _ in range(steps):
        for delta in batcher.step():
            found.setdefault(delta.id, []).append(delta)
    return found


def text(deltas: list[Delta]) -> str:
    return "".join(token.text for delta in deltas for token in delta.tokens)
