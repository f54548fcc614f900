"""Extends vLLM's worker on CPUs, which imports this module, so that steps may compute parts of a prompt with a seed.

After such a step vLLM takes back the draw from the request's generator by its offset, which a CPU's generator lacks.
The worker then ends, and all requests with it (`_bookkeeping_sync` in vllm/v1/worker/gpu_model_runner.py, 0.32).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker import gpu_model_runner


class Generator(torch.Generator):  # type: ignore[misc]
    """A generator that takes back a draw by starting again, since no draw before the answer's first token counts.

    Only a request that was preempted repeats draws.
    """

    def get_offset(self) -> int:
        return 1 << 20  # more than any draw uses

    def set_offset(self, offset: int) -> None:
        self.manual_seed(self.initial_seed())


class RequestState(gpu_model_runner.CachedRequestState):  # type: ignore[misc]
    """A request's state in the worker, with a `Generator` in place of the usual one."""

    generator: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator is not None:
            seed = self.generator.initial_seed()
            self.generator = Generator()
            self.generator.manual_seed(seed)


gpu_model_runner.CachedRequestState = RequestState


class Extension:
    """The class that EngineArgs' `worker_extension_cls` needs."""
