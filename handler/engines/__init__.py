"""The engines by name, and how one is chosen. Heavy imports happen inside an engine's own functions only."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from handler.core.errors import ConfigError
from handler.engines.base import Capabilities, Engine, EngineConfig, GuideTrial, Tokenizer


@dataclass(frozen=True)
class EngineEntry:
    """One line of the registry.

    Attributes:
        module: has `prepare(model_id, dtype, options) -> Path | None`, `capabilities(config) -> Capabilities`,
            `load(config) -> Engine` and `load_tokenizer(config) -> Tokenizer`; and `guide_trial(config) -> GuideTrial`,
            where a client's guide could harm it.
        needs: the import that shows whether it is installed.
        install: what to run when it is not.
        isolated: runs in a process of its own; a thread will do where stepping costs nothing.
        spreads: a model over several devices.
    """

    module: str
    needs: str | None
    install: str
    isolated: bool = True
    spreads: bool = False


ENGINES = {
    "openvino": EngineEntry(
        "handler.engines.openvino.engine", "openvino_genai", "pip install '.[cpu]' in lmi-handler's directory"
    ),
    "echo": EngineEntry("handler.engines.echo", None, "", isolated=False),
    "trtllm": EngineEntry("handler.engines.trtllm.engine", "tensorrt_llm", "pip install tensorrt-llm", spreads=True),
    "vllm": EngineEntry("handler.engines.vllm.engine", "vllm", "pip install vllm", spreads=True),
}


def entry(name: str) -> EngineEntry:
    """The registry's line for an engine that can run here.

    Raises:
        ConfigError: unknown, or not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; known are {', '.join(sorted(ENGINES))}")
    found = ENGINES[name]
    if found.needs is not None and importlib.util.find_spec(found.needs) is None:
        raise ConfigError(f"the engine {name!r} is not installed; to install it: {found.install}")
    return found


def load(name: str, config: EngineConfig) -> Engine:
    return cast(Engine, _module(name).load(config))


def load_tokenizer(name: str, config: EngineConfig) -> Tokenizer:
    return cast(Tokenizer, _module(name).load_tokenizer(config))


def prepare(name: str, model_id: str | None, dtype: str, options: Mapping[str, Any]) -> Path | None:
    """The files that the engine loads for `option.model_id`: fetched or converted where that is needed."""
    return cast(Path | None, _module(name).prepare(model_id, dtype, options))


def capabilities(name: str, config: EngineConfig) -> Capabilities:
    """What it lacks when it is loaded as `config` says."""
    return cast(Capabilities, _module(name).capabilities(config))


def tries_guides(name: str) -> bool:
    """Whether a guide must be tried before it may have it."""
    return hasattr(_module(name), "guide_trial")


def guide_trial(name: str, config: EngineConfig) -> GuideTrial:
    """What tries guides for an engine that is loaded as `config` says; in a process for that alone."""
    return cast(GuideTrial, _module(name).guide_trial(config))


def _module(name: str) -> Any:
    return importlib.import_module(entry(name).module)
