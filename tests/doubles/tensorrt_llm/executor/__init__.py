"""Results, adapters and errors."""

from tensorrt_llm._double.result import CompletionOutput, GenerationResult, Logprob
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.utils import CppExecutorError, RequestError

__all__ = ["CompletionOutput", "CppExecutorError", "GenerationResult", "LoRARequest", "Logprob", "RequestError"]
