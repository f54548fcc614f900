"""The sampling parameters that hold where clients leave them out: those of the model's generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from handler.config import generation_config
from handler.config.config import Config
from handler.core.errors import Problems
from handler.core.values import Sampling
from handler.engines.base import Capabilities
from handler.protocols.kernel.generation import GenerationDefaults
from handler.protocols.kernel.parameters import MODEL_DEFAULTS

log = logging.getLogger("handler.launch")

_LENGTH = "max_new_tokens"


def generation_defaults(config: Config, model: Path | None, able: Capabilities) -> GenerationDefaults:
    """Read the model's defaults, and log which hold. One that the engine does not support is left out with a warning.

    Raises:
        ConfigError: as `read_defaults`.
    """
    values = read_defaults(config, model)
    length = values.pop(_LENGTH, None)
    for name, why in ((name, _unsupported(name, value, able)) for name, value in [*values.items()]):
        if why:
            log.warning("the model's default %s=%s has no effect: %s", name, values.pop(name), why)
    if unread := [name for name in config.override_generation_config or () if name not in MODEL_DEFAULTS]:
        log.warning("%s: %s has no effect", generation_config.OVERRIDE, ", ".join(unread))
    limits = generation_config.limits_answers(config)
    found = GenerationDefaults(values, length, length if limits else None)
    if found.shown:
        said = ", ".join(f"{name}={value:g}" for name, value in found.shown.items())
        log.info(
            "sampling parameters that clients leave out: %s (%s; %s=vllm turns the model's off)",
            said,
            generation_config.origin(config, model),
            generation_config.KEY,
        )
    return found


def read_defaults(config: Config, model: Path | None) -> dict[str, Any]:
    """Read the fields of Sampling that generation_config.json and `option.override_generation_config` set.

    Raises:
        ConfigError: with all values that are wrong, or as `generation_config.sampling_values`.
    """
    values, problems = generation_config.sampling_values(config, model), Problems()
    read: dict[str, Any] = {}
    for name, reader in MODEL_DEFAULTS.items():
        if (value := values.get(name)) is None:
            continue
        try:
            read[name] = reader(value)
        except ValueError as error:
            problems.append(generation_config.wrong_value(config, model, name, value, str(error)))
    problems.check()
    return read


def _unsupported(name: str, value: Any, able: Capabilities) -> str:
    """Return why the engine cannot follow a default; "" where it can, or where the value changes nothing."""
    if value == Sampling._field_defaults[name]:
        return ""
    if why := able.unsupported.get(name):
        return f"the engine lacks it: {why}"
    most = able.limits.get(name)
    return f"the engine takes at most {most:g}" if most is not None and value > most else ""
