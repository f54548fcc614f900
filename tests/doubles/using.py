"""TensorRT-LLM's double in the place of the package, for a while."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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
