"""Sub-configurations, and what is imported from here."""

from __future__ import annotations

from typing import Any

import pydantic
from tensorrt_llm._double.api import API, model
from tensorrt_llm.executor import CompletionOutput, LoRARequest, RequestError
from tensorrt_llm.llm import LLM, RequestOutput
from tensorrt_llm.llm_args import CudaGraphConfig, KvCacheConfig, PeftCacheConfig, SchedulerConfig
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams


class _Any(pydantic.BaseModel):
    """A configuration whose fields the double does not know: it accepts any."""

    model_config = pydantic.ConfigDict(extra="allow")


class MoeConfig(_Any):
    backend: str = "CUTLASS"


class NGramDecodingConfig(_Any):
    max_draft_len: int | None = None


class MTPDecodingConfig(_Any):
    num_nextn_predict_layers: int = 1


__all__ = [
    "API", "LLM", "Any", "CompletionOutput", "CudaGraphConfig", "GuidedDecodingParams", "KvCacheConfig", "LoRARequest",
    "MTPDecodingConfig", "MoeConfig", "NGramDecodingConfig", "PeftCacheConfig", "RequestError", "RequestOutput",
    "SamplingParams", "SchedulerConfig", "model",
]  # fmt: skip
