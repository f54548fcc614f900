"""Capabilities of the installed TensorRT-LLM with given arguments, without importing it."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from handler.core.errors import ConfigError
from handler.engines.base import NO_LORA, Capabilities
from handler.engines.trtllm.arguments import NEWEST, Release
from handler.engines.trtllm.media import refusals
from handler.engines.trtllm.sampling import SUPPORTS
from handler.engines.trtllm.setup import max_prompt

log = logging.getLogger("handler.engine")

_OLDEST: Release = (1, 0)  # the first whose PyTorch backend is `tensorrt_llm.LLM`
_OF_THE_IMAGE: Release = (1, 2)

SAMPLING_DEFAULTS = MappingProxyType({"top_k": 5, "top_p": 0.85, "temperature": 0.8})
"""LMI's defaults for TensorRT-LLM with do_sample (djl_python of DJL Serving)."""

_OTHER_SAMPLER = "option.sampler_type=TRTLLMSampler has that, but no log-probabilities"
_IGNORES = f"TorchSampler takes it and does nothing before TensorRT-LLM 1.3; {_OTHER_SAMPLER}"
_NO_LOGPROBS = "it has no log-probabilities with option.sampler_type=TRTLLMSampler"

# In 1.1 and 1.2 TorchSampler ignores these. `seed` is among them, as one generator serves all requests: seeds by
# request came with NVIDIA/TensorRT-LLM pull request 17172.
_IGNORED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "seed")


def installed_version() -> str:
    try:
        return importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:  # from a source tree
        return str(importlib.import_module("tensorrt_llm").__version__)


def release_of(version: str) -> Release:
    """Return major and minor number of a version.

    Raises:
        ConfigError: it is too old.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if release < _OLDEST:
        raise ConfigError(f"TensorRT-LLM {version} is installed; the engine trtllm needs 1.0 to 1.3")
    return release


def warn_of_newer(version: str) -> None:
    if release_of(version) > NEWEST:
        log.warning(
            "TensorRT-LLM %s is installed: newer than 1.3, the newest that this engine was written for", version
        )


def installed_release() -> Release:
    """Return the installed version's release; without one that of the image, by which a configuration is checked."""
    return release_of(installed_version()) if find_spec("tensorrt_llm") else _OF_THE_IMAGE


def torch_sampler(arguments: Mapping[str, Any]) -> bool:
    """Whether LLM with these arguments uses TorchSampler, which has log-probabilities.

    TRTLLMSampler reports them as growing lists, which TensorRT-LLM itself takes for increments. It then fails with an
    AssertionError, except in beam search, so none are requested there.
    """
    return not arguments.get("enable_trtllm_sampler") and arguments.get("sampler_type") != "TRTLLMSampler"


def whole_prompts(arguments: Mapping[str, Any], release: Release) -> bool:
    """Whether a request can compute its whole prompt, and none of it comes from the prefix cache.

    Since 1.2 a request can have a cache of its own (`cache_salt`).
    """
    cache = arguments.get("kv_cache_config") or {}
    return release >= (1, 2) or cache.get("enable_block_reuse") is False


def capabilities_of(arguments: Mapping[str, Any], release: Release) -> Capabilities:
    reasons = {"typical_p": "it has no typical decoding"}
    if torch_sampler(arguments):
        reasons["bad_sequences"] = "TorchSampler cannot forbid sequences of tokens"
        if release < (1, 3):
            reasons["bad_sequences"] += f"; {_OTHER_SAMPLER}"
            reasons |= dict.fromkeys(_IGNORED if release >= (1, 2) else (*_IGNORED, "min_p"), _IGNORES)
    else:
        reasons |= {"top_logprobs": _NO_LOGPROBS, "best_of": f"{_NO_LOGPROBS}, by which the best would be chosen"}
    if (arguments.get("max_beam_width") or 1) < 2:
        reasons["num_beams"] = "it was started without option.max_beam_width"
    if not arguments.get("guided_decoding_backend"):
        reasons["structured_output"] = "it was started without option.guided_decoding_backend=xgrammar or llguidance"
    if max_prompt(arguments) < arguments["max_seq_len"]:
        reasons["thinking_token_budget"] = (
            "a prompt with its thought may be too long for a step (option.enable_chunked_prefill=true)"
        )
    if not arguments.get("gather_generation_logits"):
        reasons["return_generation_logits"] = "it was started without option.gather_generation_logits=true"
    if not whole_prompts(arguments, release):
        why = "before TensorRT-LLM 1.2 it needs option.enable_prefix_caching=false"
        reasons |= {"prompt_logprobs": why, "return_context_logits": why}
    lora = arguments.get("enable_lora") or arguments.get("lora_config")
    # Since NVIDIA/TensorRT-LLM pull request 7893, and only by xgrammar; its version has no other styles for sure.
    tags = release >= (1, 2) and arguments.get("guided_decoding_backend") == "xgrammar"
    return Capabilities(
        SUPPORTS,
        reasons,
        no_adapters="" if lora else NO_LORA,
        no_media=refusals(Path(arguments["model"]), own_caches=whole_prompts(arguments, release)),
        sampling_defaults=SAMPLING_DEFAULTS,
        structural_tags=frozenset({"json"} if tags else ()),
    )


def check_prompt(ids: Sequence[int], most: int, vocabulary: int) -> None:
    """Raise ValueError where TensorRT-LLM, started for prompts of `most` tokens, would fail on a prompt."""
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) > most:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, more than the {most} that TensorRT-LLM was started for "
            "(option.max_input_len; option.max_num_batched_tokens without option.enable_chunked_prefill=true)"
        )
    if not all(0 <= id < vocabulary for id in ids):
        raise ValueError(f"the prompt's token ids must be below {vocabulary}")


def background_error(llm: Any) -> Exception | None:
    """Return the first error of a thread or worker of TensorRT-LLM that it has told nobody yet.

    Its executor keeps them in a queue, and raises them with the next request (`_error_queue` in executor/executor.py,
    1.0 to 1.4).
    """
    waiting = getattr(getattr(llm, "_executor", None), "_error_queue", None)
    found = next(iter(tuple(getattr(waiting, "queue", ()))), None)
    return found if isinstance(found, Exception) or found is None else RuntimeError(str(found))
