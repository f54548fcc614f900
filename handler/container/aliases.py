"""TGI's and SageMaker's names that LMI's image takes too, made the handler's (contract djl.md, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from handler.config.loader import engine_name
from handler.core.errors import ConfigError

_ALIASES = {
    "HF_MODEL_QUANTIZE": "OPTION_QUANTIZE",
    "HF_MODEL_TRUST_REMOTE_CODE": "OPTION_TRUST_REMOTE_CODE",
    "HF_TRUST_REMOTE_CODE": "OPTION_TRUST_REMOTE_CODE",
    "SM_NUM_GPUS": "TENSOR_PARALLEL_DEGREE",
    "MAX_CONCURRENT_REQUESTS": "SERVING_JOB_QUEUE_SIZE",
    "MAX_BATCH_PREFILL_TOKENS": "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS",
    "MAX_BATCH_SIZE": "OPTION_MAX_ROLLING_BATCH_SIZE",
    "HUGGING_FACE_HUB_TOKEN": "HF_TOKEN",
    "HUGGINGFACE_HUB_TOKEN": "HF_TOKEN",
    "HF_API_TOKEN": "HF_TOKEN",
}

_MEMORY = {"trtllm": "OPTION_KV_CACHE_FREE_GPU_MEM_FRACTION", "vllm": "OPTION_GPU_MEMORY_UTILIZATION"}

_WITHOUT_EFFECT = {
    "MAX_INPUT_LENGTH": "OPTION_MAX_INPUT_LEN (trtllm)",
    "MAX_INPUT_TOKENS": "OPTION_MAX_INPUT_LEN (trtllm)",
    "MAX_TOTAL_TOKENS": "OPTION_MAX_MODEL_LEN",
    "MAX_BATCH_TOTAL_TOKENS": "OPTION_KV_CACHE_GIB",
    "MAX_CLIENT_BATCH_SIZE": "SERVING_BATCH_SIZE",
}
"""TGI's names that LMI's image does not take either, and what says nearly the same."""

_SAME = (("HF_MODEL_ID", "OPTION_MODEL_ID"), ("TENSOR_PARALLEL_DEGREE", "OPTION_TENSOR_PARALLEL_DEGREE"))
"""Two names of one option, of which the handler would take the second."""

_SECRET = frozenset({"HF_TOKEN"})


class Translated(NamedTuple):
    """`lines` are for the log, one for each name that was understood or let be."""

    environ: Mapping[str, str]
    lines: tuple[str, ...]


def translate(environ: Mapping[str, str]) -> Translated:
    """The environment with the handler's own names beside the others'; an empty value counts as none, as there.

    Raises:
        ConfigError: two names of one thing say different things.
    """
    found = dict(environ)
    lines: list[str] = []
    for alias, name, value in _renamed(environ):
        _agree(alias, value, name, found.get(name))
        found[name] = value
        if name in _SECRET:
            del found[alias]  # DJL Serving's log shows HF_* but for HF_TOKEN
        lines.append(f"{alias} is understood as {name}{'' if name in _SECRET else '=' + value}")
    for weak, strong in _SAME:
        if found.get(weak):
            _agree(weak, found[weak], strong, found.get(strong))
    lines += [f"{name} has no effect here; see {to}" for name, to in _WITHOUT_EFFECT.items() if environ.get(name)]
    return Translated(found, tuple(lines))


def _renamed(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for alias, name in _ALIASES.items():
        if value := environ.get(alias):
            yield alias, name, value
    engine = engine_name(environ.get("OPTION_LLM_ENGINE", "auto"), environ.get("OPTION_ROLLING_BATCH", "auto"))
    if (value := environ.get("CUDA_MEMORY_FRACTION")) and engine in _MEMORY:
        yield "CUDA_MEMORY_FRACTION", _MEMORY[engine], value
    if value := environ.get("ENABLE_CUDA_GRAPHS"):
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"environment variable ENABLE_CUDA_GRAPHS={value}: must be true or false")
        if engine == "vllm":
            yield "ENABLE_CUDA_GRAPHS", "OPTION_ENFORCE_EAGER", "false" if value.lower() == "true" else "true"
        elif engine == "trtllm":
            yield "ENABLE_CUDA_GRAPHS", "OPTION_USE_CUDA_GRAPH", value.lower()


def _agree(one: str, value: str, other: str, known: str | None) -> None:
    if known and known != value:
        values = "" if {one, other} & _SECRET else f" ({value} and {known})"
        raise ConfigError(f"environment variables {one} and {other} contradict each other{values}: leave one out")
