"""Makes OpenVINO GenAI's pipeline, and the scorer of its prompts, by the configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from handler.engines.openvino.ir_files import prefers_f32
from handler.engines.openvino.scorers.logit_scorer import LogitScorer, has_logits
from handler.engines.openvino.scorers.pipeline_scorer import PipelineScorer

TOKENS_PER_STEP = 256  # GenAI prefills all new prompts in one step: the limit keeps other requests' tokens coming

_PROMPT = "The quick brown fox jumps over the lazy dog. 1 + 1 = 2"

_PRECISIONS = {"fp16": "f16", "bf16": "bf16"}


def make_scorer(config: EngineConfig, model: Path) -> LogitScorer | PipelineScorer:
    if has_logits(model):
        return LogitScorer(model, properties(config.options.dtype, model))
    options = replace(config.options, enable_prefix_caching=False, max_rolling_batch_size=1)
    return PipelineScorer(lambda: make_pipeline(replace(config, options=options)))


def make_pipeline(config: EngineConfig) -> Any:
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = config.options.max_rolling_batch_size
    scheduler.max_num_batched_tokens = config.options.max_num_batched_tokens or TOKENS_PER_STEP
    # Not by default: in bf16 a prompt whose beginning is cached has slightly other numbers, so that a seed's answer may
    # not come again. Log-probabilities differed by up to 0.07 on a CPU with AVX512-BF16.
    scheduler.enable_prefix_caching = bool(config.options.enable_prefix_caching)
    if config.options.kv_cache_gib:
        scheduler.cache_size = config.options.kv_cache_gib
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(config.model), scheduler, "CPU", properties(config.options.dtype, config.model)
    )
    if config.options.dtype == "fp16" and config.model is not None and has_logits(config.model):
        _check_numbers(pipeline)
    return pipeline


def _check_numbers(pipeline: Any) -> None:
    """Try a prompt: in fp16 the CPU plugin may compute no numbers, and answers would be noise.

    Raises:
        ConfigError: a token has no probability.
    """
    import openvino_genai

    greedy = openvino_genai.GenerationConfig(max_new_tokens=1, logprobs=1, do_sample=False)
    handle = pipeline.add_request(0, pipeline.get_tokenizer().encode(_PROMPT).input_ids, greedy)
    try:
        while pipeline.has_non_finished_requests():
            pipeline.step()
        is_noise = any(math.isnan(logprob) for output in handle.read_all() for logprob in output.generated_log_probs)
    except RuntimeError as error:
        is_noise = "isnan" in str(error)
        if not is_noise:
            raise
    if is_noise:
        raise ConfigError(
            "option.dtype=fp16: on this CPU the model computes no numbers in it; write bf16 or leave it out"
        )


def properties(dtype: str, model: Path | None = None) -> dict[str, str]:
    """Make the CPU plugin's properties; `auto` depends on the model, where it was converted from GGUF.

    fp32 needs all three: by the precision hint alone, the KV cache and activations beside compressed weights would
    still be quantized. Only then are greedy answers those of transformers, and independent of other requests.
    """
    if dtype == "auto":
        return {"INFERENCE_PRECISION_HINT": "f32"} if model is not None and prefers_f32(model) else {}
    import openvino

    precisions = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if dtype.upper() not in precisions:
        raise ConfigError(f"option.dtype={dtype}: this CPU computes in {', '.join(precisions)}")
    if dtype == "fp32":
        return {
            "EXECUTION_MODE_HINT": "ACCURACY",
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
        }
    return {"INFERENCE_PRECISION_HINT": _PRECISIONS[dtype]}
