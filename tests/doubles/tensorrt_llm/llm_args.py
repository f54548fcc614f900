"""The arguments of LLM and their validation (llmapi/llm_args.py of TensorRT-LLM 1.0 to 1.3)."""

from __future__ import annotations

import os
from typing import Any

import pydantic
from tensorrt_llm._double.api import API, MANNERS, kind, model

if MANNERS.release >= (1, 3):
    from tensorrt_llm._torch.peft.lora.config import LoraConfig
else:
    from tensorrt_llm.lora_helper import LoraConfig

KvCacheConfig: Any = model("KvCacheConfig", API["KvCacheConfig"]["params"], {})
SchedulerConfig: Any = model("SchedulerConfig", API["SchedulerConfig"]["params"], {})
CudaGraphConfig: Any = model("CudaGraphConfig", API["CudaGraphConfig"]["params"], {})
PeftCacheConfig: Any = model("PeftCacheConfig", API["PeftCacheConfig"]["params"], {})

_KNOWN = {
    "KvCacheConfig": KvCacheConfig,
    "SchedulerConfig": SchedulerConfig,
    "CudaGraphConfig": CudaGraphConfig,
    "PeftCacheConfig": PeftCacheConfig,
    "LoraConfig": LoraConfig,
}
_PARAMETERS = {parameter["name"]: parameter for part in ("params", "common", "torch") for parameter in API["LLM"][part]}
_TRT_ONLY = {parameter["name"] for parameter in API["LLM"]["trt"]} - set(_PARAMETERS)


def checked(name: str, given: dict[str, Any]) -> pydantic.BaseModel:
    """
    Args:
        name: of the class that was called, as messages have it.

    Raises:
        ValueError: unknown, of the wrong type or kind.
        RuntimeError: there are too few GPUs.
    """
    given = {key.removeprefix("_"): value for key, value in given.items() if key not in ("backend", "executor_cls")}
    names = {key.lstrip("_") for key in _PARAMETERS}
    if of_trt := sorted(set(given) & _TRT_ONLY - names):
        raise ValueError(f"{', '.join(of_trt)}: only tensorrt_llm._tensorrt_engine.LLM has these")
    for key in given:
        if key not in names:
            raise ValueError(f"{name} got invalid argument: {key}")
    arguments: Any = model("TorchLlmArgs", list(_PARAMETERS.values()), _KNOWN)(**given)
    if (arguments.stream_interval or 0) < 1:
        raise ValueError("stream_interval must be positive")
    world = arguments.tensor_parallel_size * arguments.pipeline_parallel_size * arguments.context_parallel_size
    if world > max(MANNERS.gpus, 1) and world > 1 and "RAY_LOCAL_WORLD_SIZE" not in os.environ:
        raise RuntimeError(f"Only {MANNERS.gpus} GPUs are available, but {world} are required.")
    return arguments  # type: ignore[no-any-return]


__all__ = ["CudaGraphConfig", "KvCacheConfig", "PeftCacheConfig", "SchedulerConfig", "checked", "kind"]
