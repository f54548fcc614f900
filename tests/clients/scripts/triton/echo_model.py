"""A model of tritonserver's Python backend: it repeats its prompt as the engine echo does, with TensorRT-LLM's tensors.

It fails at the word `<raise>`, as the engine echo does on cue.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy
import triton_python_backend_utils as backend

_CUE = "<raise>"


def _failure() -> Any:
    return backend.InferenceResponse(error=backend.TritonError(f"raised on cue {_CUE}"))


def _value(request: Any, name: str, default: Any) -> Any:
    tensor = backend.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _response(text: str, logprobs: Sequence[float]) -> Any:
    tensors = [backend.Tensor("text_output", numpy.array([text.encode()], dtype=numpy.object_))]
    if logprobs:
        tensors += [
            backend.Tensor("output_log_probs", numpy.array([[logprobs]], numpy.float32)),
            backend.Tensor("cum_log_probs", numpy.array([[sum(logprobs)]], numpy.float32)),
        ]
    return backend.InferenceResponse(output_tensors=tensors)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
        self._is_decoupled = policy.get("decoupled", False)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        if not self._is_decoupled:
            return [self._whole(request) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            if not _value(request, "stream", False):
                sender.send(self._whole(request))
            else:
                for token in self._tokens(request):
                    sender.send(_failure() if _CUE in token else _response(token, []))
                    if _CUE in token:
                        break
            sender.send(flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def _prompt(self, request: Any) -> str:
        return str(_value(request, "text_input", b"").decode(errors="replace"))

    def _tokens(self, request: Any) -> list[str]:
        words = itertools.cycle(self._prompt(request).split())
        return [f" {word}" for word in itertools.islice(words, int(_value(request, "max_tokens", 16)))]

    def _whole(self, request: Any) -> Any:
        tokens = self._tokens(request)
        if any(_CUE in token for token in tokens):
            return _failure()
        before = "" if _value(request, "exclude_input_in_output", False) else self._prompt(request)
        return _response(
            before + "".join(tokens), [0.0] * len(tokens) if _value(request, "return_log_probs", False) else []
        )
