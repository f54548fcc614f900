"""Environment of TensorRT-LLM: MPI's variables, files of models and adapters, GPUs."""

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
    """Make the variables of TensorRT-LLM and its MPI workers."""
    variables = {}
    if not config.options.engine_options.get("usage_stats"):
        # Since 1.3 it reports its use to NVIDIA by default (`is_usage_stats_enabled` in usage/usage_lib.py).
        variables["TRTLLM_NO_USAGE_STATS"] = "1"
    if os.geteuid() == 0:
        # Open MPI 5 starts MPI workers by `prte`, which refuses to run as root; the start would wait for ever. Unlike
        # mpirun it does not read OMPI_ALLOW_RUN_AS_ROOT (src/mca/schizo/prte in PRRTE 3).
        variables |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def leave_mpi(environ: MutableMapping[str, str]) -> None:
    """Remove the variables by which mpirun started this process, as in DJL's mpi_mode.

    With them MPI would take the engine's own workers for that run's, and fail to start them. Variables of networks
    stay; so do all of them under TensorRT-LLM's own launcher.
    """
    if "TLLM_SPAWN_PROXY_PROCESS" in environ or not any(name in environ for name in _LAUNCHED):
        return
    for name in list(environ):
        if name.startswith(("OMPI_", "PMIX_", "PMI_")) and not name.startswith(_NETWORK):
            del environ[name]


def check_rank(directory: Path, max_rank: int) -> None:
    """Check the rank of an adapter against the one that TensorRT-LLM was started with.

    Raises:
        OSError: the adapter has been removed.
        ValueError: TensorRT-LLM would fail when a request names it.
    """
    rank = json.loads((directory / "adapter_config.json").read_text()).get("r")
    if not isinstance(rank, int) or rank > max_rank:
        raise ValueError(f"the adapter's rank is {rank}; option.max_lora_rank={max_rank}")


def max_prompt(arguments: Mapping[str, Any]) -> int:
    """Return the tokens of the longest prompt: without chunked prefill it must fit into one step."""
    step = arguments.get("max_num_tokens") or _MAX_NUM_TOKENS
    limits = [] if arguments.get("enable_chunked_prefill") else [step]
    return min([*limits, *filter(None, (arguments.get("max_input_len"),))], default=1 << 62)


def vocabulary_size(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def visible_gpus(config: EngineConfig) -> int:
    if config.options.tensor_parallel_degree != "max":
        return int(config.options.tensor_parallel_degree)
    from torch import cuda  # counting them does not start CUDA in this process

    return int(cuda.device_count())
