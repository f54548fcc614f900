"""What lies around TensorRT-LLM's engine: MPI's environment, a model's and adapters' files, the GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from handler.engines.base import EngineConfig

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
_NETWORK = ("OMPI_MCA_btl_", "OMPI_MCA_oob_")
_MAX_NUM_TOKENS = 8192  # TensorRT-LLM's default


def environment(config: EngineConfig) -> dict[str, str]:
    """Variables that TensorRT-LLM and its MPI workers are to have."""
    found = {}
    if not config.options.get("usage_stats"):
        # From 1.3 on it tells NVIDIA of its use, unless told not to (`is_usage_stats_enabled` in usage/usage_lib.py).
        found["TRTLLM_NO_USAGE_STATS"] = "1"
    if os.geteuid() == 0:
        # Open MPI 5 starts MPI workers by `prte`, which refuses to run as root. The start would then wait for ever, and
        # say nothing. Unlike mpirun it does not read OMPI_ALLOW_RUN_AS_ROOT (src/mca/schizo/prte in PRRTE 3).
        found |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return found


def leave_mpi(environ: MutableMapping[str, str]) -> None:
    """Forget that mpirun started us: MPI would take the engine's own workers for that run's, and fail to start them.

    DJL's mpi_mode starts workers so. Under TensorRT-LLM's own launcher it must stay as it is. What is said of networks
    alone is kept.
    """
    if "TLLM_SPAWN_PROXY_PROCESS" in environ or not any(name in environ for name in _LAUNCHED):
        return
    for name in list(environ):
        if name.startswith(("OMPI_", "PMIX_", "PMI_")) and not name.startswith(_NETWORK):
            del environ[name]


def check_rank(directory: Path, max_rank: int) -> None:
    """Look at what no registering could: the rank that TensorRT-LLM was started for.

    Raises:
        OSError: the adapter is not there any more.
        ValueError: TensorRT-LLM would fail on it when a request names it, or worse.
    """
    rank = json.loads((directory / "adapter_config.json").read_text()).get("r")
    if not isinstance(rank, int) or rank > max_rank:
        raise ValueError(f"the adapter's rank is {rank}; option.max_lora_rank={max_rank}")


def max_prompt(arguments: Mapping[str, Any]) -> int:
    """Tokens of the longest prompt: without chunked prefill it must fit into one step."""
    step = arguments.get("max_num_tokens") or _MAX_NUM_TOKENS
    limits = [] if arguments.get("enable_chunked_prefill") else [step]
    return min([*limits, *filter(None, (arguments.get("max_input_len"),))], default=1 << 62)


def vocabulary_size(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def visible_gpus(config: EngineConfig) -> int:
    if config.devices != "max":
        return int(config.devices)
    from torch import cuda  # counting them does not start CUDA in this process

    return int(cuda.device_count())
