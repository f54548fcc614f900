"""A model's generation_config.json: its end tokens, and values for the sampling parameters that clients leave out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handler.config.config import Config
from handler.config.model_files import read_json
from handler.core.errors import ConfigError, Problem

FILE = "generation_config.json"
KEY, OVERRIDE = "option.generation_config", "option.override_generation_config"

_MODELS_OWN = ("auto", "vllm", "trtllm")
"""Values of the option that name no directory. `vllm` and `trtllm` are those engines' names for neutral defaults."""


def directory(config: Config) -> Path | None:
    """Return the directory of `option.generation_config`; None where it names none.

    Raises:
        ConfigError: it has no generation_config.json.
    """
    given = config.generation_config
    if given in _MODELS_OWN:
        return None
    homes = [home / given for home in (config.directory, Path()) if home is not None]
    found = next((home for home in homes if (home / FILE).is_file()), None)
    if found is None:
        message = f"{KEY}={given}: must be auto, vllm, or a directory with a {FILE}"
        raise ConfigError(Problem(config.where(KEY), KEY, message))
    return found


def file_values(config: Config, model: Path | None) -> dict[str, Any]:
    """Return the values of the option's directory, else of the model's own file; empty without a file.

    Args:
        model: the model's directory or file; None where there is none.

    Raises:
        ConfigError: as `directory`; or the file does not hold a JSON object.
    """
    file = _file(config, model)
    return {} if file is None else read_json(file)


def sampling_values(config: Config, model: Path | None) -> Mapping[str, Any]:
    """Return the file's values, unless the option turns them off, under those of the override.

    Raises:
        ConfigError: as `file_values`.
    """
    own = file_values(config, model) if _has_sampling(config) else {}
    return {**own, **(config.override_generation_config or {})}


def limits_answers(config: Config) -> bool:
    """Whether `max_new_tokens` limits every answer, and not only those without a limit of their own.

    It does where the operator has chosen it, by a directory or an override, as in vLLM.
    """
    by_override = (config.override_generation_config or {}).get("max_new_tokens") is not None
    return by_override or config.generation_config not in _MODELS_OWN


def origin(config: Config, model: Path | None) -> str:
    """Say where the values of `sampling_values` come from."""
    file = _file(config, model) if _has_sampling(config) else None
    return " and ".join([*([str(file)] if file else []), *([OVERRIDE] if config.override_generation_config else [])])


def wrong_value(config: Config, model: Path | None, name: str, value: Any, why: str) -> Problem:
    """Return the problem of a value that cannot be used; it names the file or the option that has it."""
    said = f"{name}={json.dumps(value, ensure_ascii=False)[:80]}: {why}"
    if name in (config.override_generation_config or {}):
        return Problem(config.where(OVERRIDE), OVERRIDE, f"{OVERRIDE}: {said}")
    return Problem(str(_file(config, model)), "", f"{said}; correct it, or write {KEY}=vllm")


def _has_sampling(config: Config) -> bool:
    return config.generation_config not in ("vllm", "trtllm")


def _file(config: Config, model: Path | None) -> Path | None:
    home = directory(config) or model
    return None if home is None or not (home / FILE).is_file() else home / FILE
