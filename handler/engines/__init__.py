"""The engines by name, and how one is chosen. Heavy imports happen inside an engine's own functions only."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from handler.engines.base import Capabilities, Engine, EngineConfig, Tokenizer
from handler.errors import ConfigError


@dataclass(frozen=True)
class EngineEntry:
    """One line of the registry.

    Attributes:
        module: has `prepare(model, dtype) -> Path | None`, `CAPABILITIES`,
            `load(config) -> Engine` and `load_tokenizer(config) -> Tokenizer`.
        needs: the import that shows whether it is installed.
        install: what to run when it is not.
        isolated: runs in a process of its own; a thread will do where stepping costs nothing.
    """

    module: str | None
    needs: str | None
    install: str
    isolated: bool = True


ENGINES = {
    "openvino": EngineEntry("handler.engines.openvino", "openvino_genai", "pip install 'lmi-handler[cpu]'"),
    "echo": EngineEntry("handler.engines.echo", None, "", isolated=False),
    "trtllm": EngineEntry(None, "tensorrt_llm", "pip install tensorrt-llm"),
    "vllm": EngineEntry(None, "vllm", "pip install vllm"),
}


def entry(name: str) -> EngineEntry:
    """The registry's line for an engine that can run here.

    Raises:
        ConfigError: unknown, not installed, or not part of this version.
    """
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; known are {', '.join(sorted(ENGINES))}")
    found = ENGINES[name]
    missing = found.needs is not None and importlib.util.find_spec(found.needs) is None
    how = f" is not installed; to install it: {found.install}" if missing else ""
    if found.module is None:
        raise ConfigError(f"the engine {name!r}{how or ' is installed'}; but this version cannot drive it yet")
    if missing:
        raise ConfigError(f"the engine {name!r}{how}")
    return found


def load(name: str, config: EngineConfig) -> Engine:
    return cast(Engine, _module(name).load(config))


def load_tokenizer(name: str, config: EngineConfig) -> Tokenizer:
    return cast(Tokenizer, _module(name).load_tokenizer(config))


def prepare(name: str, model_id: str | None, dtype: str) -> Path | None:
    """The files that the engine loads for `option.model_id`: fetched or converted where that is needed."""
    return cast(Path | None, _module(name).prepare(model_id, dtype))


def capabilities(name: str) -> Capabilities:
    return cast(Capabilities, _module(name).CAPABILITIES)


def _module(name: str) -> Any:
    module = entry(name).module
    assert module is not None
    return importlib.import_module(module)
