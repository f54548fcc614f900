"""The unchanged upstream TensorRT-LLM handler with an engine that costs nothing, so that only the handler is measured.

This is the model.py of a worker. Packages that the handler imports and that need a GPU are replaced with stand-ins.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class Generation:
    """A token in both forms that handlers read: an object with attributes, or a pair of text and whether it is last."""

    __slots__ = ("cum_logprob", "finished", "seq_length", "token_id", "token_text")

    def __init__(self, position: int, last: int) -> None:
        self.token_id = self.seq_length = position
        self.token_text = " word"
        self.cum_logprob = -0.5 * position
        self.finished = position >= last

    def __iter__(self) -> Iterator[object]:
        return iter((self.token_text, self.finished))


class Response:
    def __init__(self, last: int) -> None:
        self._position, self._last = 0, last

    def fetch(self) -> Generation:
        self._position += 1
        return Generation(self._position, self._last)


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return [1] * max(1, len(text) // 4)


class Model:
    tokenizer = Tokenizer()

    def generate(self, text: str, *, request_output_len: int, **parameters: Any) -> Response:
        return Response(request_output_len)


def init_inference(model: str, **properties: Any) -> Model:
    return Model()


class Nothing:
    """A stand-in for classes that are only imported or passed to isinstance."""


def _stand_in(name: str, **content: Any) -> None:
    # A spec is needed, because transformers asks importlib whether torch is installed.
    sys.modules[name] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
    vars(sys.modules[name]).update(content)


_stand_in("torch", Tensor=Nothing)
_stand_in("tensorrt_llm")
_stand_in("tensorrt_llm.llmapi", **dict.fromkeys(("KvCacheConfig", "QuantConfig", "CalibConfig", "QuantAlgo"), Nothing))
_stand_in("tensorrt_llm_toolkit", init_inference=init_inference)

# Imported last, because it imports the stand-ins.
_handler: ModuleType = importlib.import_module("djl_python.tensorrt_llm")


def handle(inputs: Any) -> Any:
    if inputs.is_empty():
        inputs.get_properties()["mpi_mode"] = "true"  # lets the handler start without mpirun
    return _handler.handle(inputs)
