"""Calls of the engines by name (`ENGINES`). An engine's package is imported only inside the engine's own functions.

An engine's module is `engine.py` in the folder of its name. It has `check`, `prepare`, `capabilities`, `load` and
`load_tokenizer`, as the functions below call them; `fetch`, where it reads a model's files; `conversion`, where it
converts some; and `structured_output_check`, where a client's schema or grammar could harm the engine.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from handler.config.engines import ENGINES, EngineEntry
from handler.core.errors import ConfigError
from handler.core.package import install
from handler.core.values import Task
from handler.engines.base import Capabilities, Engine, EngineConfig, StructuredOutputCheck, Tokenizer
from handler.engines.huggingface.pooling import NO_POOLED_LORA


def entry(name: str) -> EngineEntry:
    """Look up an engine.

    Raises:
        ConfigError: the engine is unknown, or not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; known: {', '.join(sorted(ENGINES))}")
    engine = ENGINES[name]
    if engine.needs is not None and importlib.util.find_spec(engine.needs) is None:
        raise ConfigError(f"the engine {name!r} is not installed; to install it: {install(engine.package)}")
    return engine


def load(name: str, config: EngineConfig) -> Engine:
    return cast(Engine, _module(name).load(config))


def load_tokenizer(name: str, config: EngineConfig) -> Tokenizer:
    return cast(Tokenizer, _module(name).load_tokenizer(config))


def fetches(name: str) -> bool:
    """Return whether the engine reads a model's files, so that a start fetches those of the hub and of S3."""
    return hasattr(module(name), "fetch")


def fetch(name: str, model_id: str | None, config: EngineConfig) -> str | None:
    """Fetch a model of the hub or of S3 where `option.model_id` names one.

    Returns:
        Its directory or file, else `model_id` as it is.
    """
    fetching = getattr(_module(name), "fetch", None)
    return model_id if fetching is None else cast("str | None", fetching(model_id, config))


def conversion(name: str, model_id: str) -> str:
    """Say what `prepare` will convert of a model that is not here yet, and what that takes; "" if nothing."""
    telling = getattr(module(name), "conversion", None)
    return "" if telling is None else cast(str, telling(model_id))


def prepare(name: str, model_id: str | None, config: EngineConfig) -> Path | None:
    """Convert the files of `option.model_id` where that is needed; return those that the engine loads.

    Args:
        config: its `model` is not read.
    """
    return cast(Path | None, _module(name).prepare(model_id, config))


def check_task(name: str, task: Task, option: str) -> None:
    """Raise ConfigError where the engine does not compute `task`, which `option.task` says, or by auto the model."""
    if task is Task.TRANSCRIPTION and not ENGINES[name].transcribes:
        able = ", ".join(sorted(name for name, one in ENGINES.items() if one.transcribes))
        raise ConfigError(f"option.task={option}: the engine {name} does not transcribe audio; {able} do")
    if task not in (Task.GENERATION, Task.TRANSCRIPTION) and not ENGINES[name].pools:
        able = ", ".join(sorted(name for name, one in ENGINES.items() if one.pools))
        raise ConfigError(
            f"option.task={option}: {'the model is for ' + task.value + ', but ' if option == 'auto' else ''}"
            f"the engine {name} generates text only; {able} compute embeddings or scores"
        )


def check(name: str, model_id: str | None, config: EngineConfig) -> None:
    """Check the model's files and the options together; fetch, convert and load nothing. The engine may be missing.

    Args:
        config: its `model` is not read.

    Raises:
        ConfigError: with all problems.
    """
    module(name).check(model_id, config)


def capabilities(name: str, config: EngineConfig) -> Capabilities:
    able = cast(Capabilities, _module(name).capabilities(config))
    return able if config.task is Task.GENERATION else replace(able, no_adapters=NO_POOLED_LORA)


def checks_structured_output(name: str) -> bool:
    return hasattr(_module(name), "structured_output_check")


def structured_output_check(name: str, config: EngineConfig) -> StructuredOutputCheck:
    """Load the engine's check; only in a sandbox process."""
    return cast(StructuredOutputCheck, _module(name).structured_output_check(config))


def module(name: str) -> Any:
    """Import an engine's module, whether the engine is installed or not."""
    return importlib.import_module(f"{__name__}.{name}.engine")


def _module(name: str) -> Any:
    entry(name)
    return module(name)
