"""The batcher's view of an engine, or of several, which the supervisor and the set of replicas implement; its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from handler.core.text import Prompt
from handler.core.values import Adapter, Finish, Request
from handler.engines.base import EngineRequest, Output, Step


class SteppedEngine(Protocol):
    """Runs requests. `process/supervisor.py` describes the calls."""

    @property
    def ready(self) -> bool: ...

    def admits(self, request: Request, prompt: Prompt) -> bool:
        """Whether it takes a request now; the next calls of `add` bring its sequences."""

    def continues(self, key: int) -> bool:
        """Whether it takes another part of a request that ran in the last step; the next call of `add` brings it."""

    def add(self, request: EngineRequest) -> None: ...
    def cancel(self, key: int) -> None: ...
    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None: ...
    def step(self, timeout: float = 0.0) -> list[Step]: ...


def join(steps: Sequence[Step]) -> Step:
    """Join steps that waited together: several tokens of a sequence become one output.

    Raises:
        ValueError: a step's columns differ in length.
    """
    if any(not len(step.keys) == len(step.ids) == len(step.logprobs) for step in steps):
        raise ValueError("a step's columns differ in length")
    if len(steps) == 1:
        return steps[0]
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[float | None]] = {}
    others: list[Output] = []
    for step in steps:
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            if key in ids:
                ids[key].append(id)
                logprobs[key].append(logprob)
            else:
                ids[key], logprobs[key] = [id], [logprob]
        for output in step.others:
            if output.key in ids:  # its earlier tokens come first
                earlier = Output(output.key, ids.pop(output.key), logprobs.pop(output.key))
                if output.is_plain and output.finish is not Finish.ERROR:  # else it brings more than tokens
                    all_ids, all_logprobs = [*earlier.ids, *output.ids], [*earlier.logprobs, *output.logprobs]
                    output = output._replace(ids=all_ids, logprobs=all_logprobs)
                else:
                    others.append(earlier)
            others.append(output)
    later = {output.key for output in others}  # whose tokens in columns come after these outputs
    others += [Output(key, ids[key], logprobs[key]) for key in ids if len(ids[key]) > 1 or key in later]
    single = [key for key in ids if len(ids[key]) == 1 and key not in later]
    return Step(single, [ids[key][0] for key in single], [logprobs[key][0] for key in single], others)
