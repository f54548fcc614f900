"""Extends vLLM's CPU worker, so that the prompt of a request with a seed may take several steps.

vLLM's worker imports this module. After a step that computes only a part of a prompt, vLLM undoes the random draw by
restoring the generator's offset. A CPU generator has no offset, so without this module, the worker would crash and all
requests would fail (`_bookkeeping_sync` in vllm/v1/worker/gpu_model_runner.py, 0.32).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker import gpu_model_runner


class Generator(torch.Generator):  # type: ignore[misc]
    """A generator that undoes a draw by starting again from its seed.

    Usually, only draws before the first output token are undone, and they have no effect. After a preemption, the
    draws for earlier tokens are undone too, so later tokens repeat these draws.
    """

    def get_offset(self) -> int:
        return 1 << 20  # more than any draw uses

    def set_offset(self, offset: int) -> None:
        self.manual_seed(self.initial_seed())


class RequestState(gpu_model_runner.CachedRequestState):  # type: ignore[misc]
    """A request's state in the worker, with a `Generator` in place of torch's own generator."""

    generator: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator is not None:
            seed = self.generator.initial_seed()
            self.generator = Generator()
            self.generator.manual_seed(seed)


gpu_model_runner.CachedRequestState = RequestState


class Extension:
    """An empty class, because EngineArgs' `worker_extension_cls` must name a class."""
