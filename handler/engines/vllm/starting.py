"""Starts vLLM's LLMEngine, whose core runs in a process of its own."""

from __future__ import annotations

import os
from typing import Any

from handler.engines.base import EngineConfig, EngineInfo
from handler.engines.process.process_group import end_with_this_process
from handler.engines.vllm import lmcache
from handler.engines.vllm.arguments import construct, engine_arguments, environment
from handler.engines.vllm.patches.sync_client import patch_sync_client


def start_engine(config: EngineConfig, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return the engine, and the arguments that it was made of.

    Args:
        more: arguments that beat those of the options.
    """
    os.environ.update(environment(config, os.environ))
    end_with_this_process()
    import vllm
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = engine_arguments(config, current_platform.device_count() or 1, cpu=current_platform.is_cpu()) | more
    os.environ.update(lmcache.environment(config, os.environ, arguments["tensor_parallel_size"]))
    # By this vLLM chooses how many tokens a step computes.
    context = UsageContext.OPENAI_API_SERVER
    with patch_sync_client():
        made = vllm.EngineArgs(**construct(arguments, vllm.EngineArgs))
        return LLMEngine.from_engine_args(made, context, enable_multiprocessing=True), arguments


def engine_info(engine: Any) -> EngineInfo:
    import vllm
    from vllm.platforms import current_platform

    model = engine.model_config
    return EngineInfo(
        name="vllm",
        version=vllm.__version__,
        device=str(current_platform.device_name),
        dtype=str(model.dtype).removeprefix("torch."),
        max_total_tokens=model.max_model_len,
    )
