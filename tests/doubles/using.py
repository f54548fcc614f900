"""TensorRT-LLM's double in the place of the package, and one LLM of it with what tests say to it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PROMPT = [30, 31, 32]


class Double:
    """One LLM of one version, and what a test says to it."""

    def __init__(self, model: Path, **arguments: Any) -> None:
        import tensorrt_llm
        from tensorrt_llm.executor.utils import RequestError

        self.package, self.refusal = tensorrt_llm, RequestError
        self.llm = tensorrt_llm.LLM(str(model), **arguments)

    def ask(self, inputs: Any = PROMPT, *, streaming: bool = True, more: Any = None, **params: Any) -> Any:
        """Every state of the result, as (ids, finish_reason) of its outputs; and the result."""
        params.setdefault("detokenize", False)

        async def run() -> Any:
            sampling = self.package.SamplingParams(**params)
            result = self.llm.generate_async(inputs, sampling_params=sampling, streaming=streaming, **(more or {}))
            states = []
            async for item in result:
                assert item is result
                states.append([(list(one.token_ids), one.finish_reason) for one in item.outputs])
            return states, result

        return asyncio.run(run())


# -- what the double's model must give, computed by itself -------------------------------------------------------------


def reference(model: Any, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of all ids but the first."""
    found = []
    for at in range(1, len(ids)):
        logits = model.logits(ids[:at]).tolist()
        highest = max(logits)
        found.append(logits[ids[at]] - highest - math.log(math.fsum(math.exp(one - highest) for one in logits)))
    return found


DOUBLES = str(Path(__file__).parent)


@contextlib.contextmanager
def tensorrt_llm(manners: str = "") -> Iterator[None]:
    """Importable here, and in the processes that are started meanwhile; it plays what `manners` says.

    Another one may be in use already: this one is imported anew, and the other is there again afterwards.
    """
    before, others = os.environ.get("TLLM_DOUBLE"), _modules()
    os.environ["TLLM_DOUBLE"] = manners
    sys.path.append(DOUBLES)
    try:
        yield
    finally:
        sys.path.remove(DOUBLES)
        os.environ.pop("TLLM_DOUBLE")
        if before is not None:
            os.environ["TLLM_DOUBLE"] = before
        _modules()
        sys.modules.update(others)


def _modules() -> dict[str, ModuleType]:
    """Those of the double, taken out."""
    names = [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]
    return {name: sys.modules.pop(name) for name in names}
