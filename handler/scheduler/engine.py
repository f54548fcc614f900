"""The batcher's view of an engine, or of several; the supervisor and the set of replicas implement it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from handler.core.text import Prompt
from handler.core.values import Adapter, Pooling, Request, Sampling
from handler.engines.base import Step


class SteppedEngine(Protocol):
    """Runs requests. `process/supervisor.py` describes the calls."""

    @property
    def ready(self) -> bool: ...

    def admits(self, request: Request, prompt: Prompt) -> bool:
        """Whether it takes a request now; the next calls of `add` bring its sequences."""

    def continues(self, key: int) -> bool:
        """Whether it takes another part of a request that ran in the last step; the next call of `add` brings it."""

    def add(
        self, key: int, ids: Sequence[int], sampling: Sampling | Pooling, adapter: Adapter | None = None
    ) -> None: ...
    def cancel(self, key: int) -> None: ...
    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None: ...
    def step(self, timeout: float = 0.0) -> list[Step]: ...
