"""Functions that look up an engine in `ENGINES` by name and call it.

The module of an engine is `engine.py`, in the folder with the engine's name. It imports the engine's package only
inside functions. The module defines `check`, `prepare`, `capabilities`, `load` and `load_tokenizer`. It also defines
`fetch` if the engine reads a model's files, `conversion` if the engine converts them, `weights` if the engine loads a
single file, and `structured_output_check` if a client's schema or grammar could harm the engine. The functions below
call them.
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
    """Return an engine's entry in `ENGINES`.

    Raises:
        ConfigError: the engine is unknown or not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; known engines: {', '.join(sorted(ENGINES))}")
    engine = ENGINES[name]
    if engine.needs is not None and importlib.util.find_spec(engine.needs) is None:
        raise ConfigError(f"the engine {name!r} is not installed; to install it: {install(engine.package)}")
    return engine


def load(name: str, config: EngineConfig) -> Engine:
    return cast(Engine, _module(name).load(config))


def load_tokenizer(name: str, config: EngineConfig) -> Tokenizer:
    return cast(Tokenizer, _module(name).load_tokenizer(config))


def fetches(name: str) -> bool:
    """Return whether the engine reads a model's files. If so, models on the hub or on S3 are downloaded at startup."""
    return hasattr(module(name), "fetch")


def fetch(name: str, model_id: str | None, config: EngineConfig) -> str | None:
    """Download the model that `option.model_id` names, if it is on the hub or on S3.

    Returns:
        The downloaded directory or file, or `model_id` itself if nothing has to be downloaded.
    """
    fetching = getattr(_module(name), "fetch", None)
    return model_id if fetching is None else cast("str | None", fetching(model_id, config))


def conversion(name: str, model_id: str) -> str:
    """Return a message that describes when `prepare` converts the model after the download, and what this requires.

    The message is empty if the model is never converted.
    """
    telling = getattr(module(name), "conversion", None)
    return "" if telling is None else cast(str, telling(model_id))


def prepare(name: str, model_id: str | None, config: EngineConfig) -> Path | None:
    """Convert the files of `option.model_id` if necessary.

    Args:
        config: configuration of the engine; its `model` is not used.

    Returns:
        The path of the files that the engine loads, or None if it needs no files.
    """
    return cast(Path | None, _module(name).prepare(model_id, config))


def weights(name: str, model_id: str | None) -> Path | None:
    """Return the file with the weights of `option.model_id`, or None if the engine loads only what `prepare` returns.

    Raises:
        ConfigError: the engine loads a file, but there is no such file.
    """
    finding = getattr(_module(name), "weights", None)
    return None if finding is None else cast(Path, finding(model_id))


def check_task(name: str, task: Task, option: str) -> None:
    """Raise ConfigError if the engine does not support the task.

    Args:
        task: the model's task, which is determined from the model if `option.task` is auto.
        option: value of `option.task`.
    """
    if task is Task.TRANSCRIPTION and not ENGINES[name].transcribes:
        able = ", ".join(sorted(name for name, info in ENGINES.items() if info.transcribes))
        raise ConfigError(f"option.task={option}: the engine {name} does not transcribe audio; {able} do")
    if task not in (Task.GENERATION, Task.TRANSCRIPTION) and not ENGINES[name].pools:
        able = ", ".join(sorted(name for name, info in ENGINES.items() if info.pools))
        raise ConfigError(
            f"option.task={option}: {'the model is for ' + task.value + ', but ' if option == 'auto' else ''}"
            f"the engine {name} generates text only; {able} compute embeddings or scores"
        )


def check(name: str, model_id: str | None, config: EngineConfig) -> None:
    """Check the model's files and the options together, without downloading, converting or loading anything.

    The engine does not have to be installed.

    Args:
        config: configuration of the engine; its `model` is not used.

    Raises:
        ConfigError: there are problems; the message lists all of them.
    """
    module(name).check(model_id, config)


def capabilities(name: str, config: EngineConfig) -> Capabilities:
    able = cast(Capabilities, _module(name).capabilities(config))
    return able if config.task is Task.GENERATION else replace(able, no_adapters=NO_POOLED_LORA)


def checks_structured_output(name: str, config: EngineConfig) -> bool:
    """Return whether clients' schemas and grammars are checked before the engine gets them."""
    engine = _module(name)
    decides = getattr(engine, "checks_structured_output", None)
    return hasattr(engine, "structured_output_check") and (decides is None or decides(config))


def structured_output_check(name: str, config: EngineConfig) -> StructuredOutputCheck:
    """Load the engine's checker for schemas and grammars. Call this only in a sandbox process."""
    return cast(StructuredOutputCheck, _module(name).structured_output_check(config))


def module(name: str) -> Any:
    """Import an engine's module. The engine itself does not have to be installed."""
    return importlib.import_module(f"{__name__}.{name}.engine")


def _module(name: str) -> Any:
    entry(name)
    return module(name)
