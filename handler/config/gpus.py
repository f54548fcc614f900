"""The GPUs that one engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

STAGES = ("pipeline_parallel_size", "trtllm_pipeline_parallel_size", "pipeline_parallel_degree")
CONTEXTS = ("context_parallel_size", "prefill_context_parallel_size")
"""Names of one number each, in the engines' options and in a deployment's. All else spreads a model over the same GPUs:
vLLM's decode context parallel size divides the tensor parallel degree, as the sizes of experts do."""


class Spread(NamedTuple):
    """How a model is distributed over GPUs.

    Attributes:
        tensor: GPUs per pipeline stage and context part; None for all available.
        stages: the number of pipeline stages.
        contexts: the number of parts into which a prompt's context is split.
    """

    tensor: int | None
    stages: int
    contexts: int

    @property
    def least(self) -> int:
        """The GPUs that it needs at least."""
        return (self.tensor or 1) * self.stages * self.contexts

    def gpus(self, available: int) -> int:
        """Return the GPUs that it takes of those that there are."""
        return available if self.tensor is None else self.least

    def __str__(self) -> str:
        words = ["option.tensor_parallel_degree=" + ("max" if self.tensor is None else str(self.tensor))]
        words += [f"{self.stages} stages"] * (self.stages > 1)
        words += [f"{self.contexts} parts of the context"] * (self.contexts > 1)
        return " and ".join(words)


def spread(degree: str, options: Mapping[str, Any]) -> Spread:
    """Read how a model is spread.

    Args:
        degree: of tensor parallelism, or max.
        options: the engine's. Arguments in vLLM's `engine_args` replace them.
    """
    own = options.get("engine_args")
    given = {**options, **own} if isinstance(own, Mapping) else options
    tensor = _number(given, ("tensor_parallel_size",), None if degree == "max" else int(degree))
    return Spread(tensor, _number(given, STAGES, 1) or 1, _number(given, CONTEXTS, 1) or 1)


def _number(options: Mapping[str, Any], names: tuple[str, ...], default: int | None) -> int | None:
    values = (str(options[name]) for name in names if options.get(name) is not None)
    return next((int(value) for value in values if value.isdecimal() and int(value)), default)
