"""The configuration: the typed and checked values of all options."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handler.config.lmi_version import ASYNC_BY_DEFAULT_SINCE, ASYNC_SINCE
from handler.config.options.tables import Options, engine_name
from handler.core.errors import Problem
from handler.core.user_functions import Role


@dataclass(frozen=True)
class Config(Options):
    """The typed and checked values of all options, which docs/options.md describes.

    Attributes:
        engine_options: values of the engine-specific options, by name. Options without a value are omitted.
        warnings: warnings about the options, for the log.
        directory: the directory of serving.properties, or None if there is no such file.
        origins: the origin of each option value, by option key.
        settings: the values from all sources as written, by key. They are passed to a user-defined `handle` function.
        handle_role: how an embedded server uses the function `handle` of model.py.
    """

    engine_options: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    directory: Path | None = field(default=None, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    settings: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    handle_role: Role = Role.NONE

    @property
    def engine(self) -> str:
        """The name of the engine, or "" if llm_engine and rolling_batch contradict each other."""
        return engine_name(self.llm_engine, self.rolling_batch)

    @property
    def name(self) -> str:
        """The primary name of the model: the first name in option.model_name."""
        return self.model_name[0]

    @property
    def label(self) -> str:
        """The model name in metrics and traces: the first in option.served_model_name except `*`, or else `name`."""
        return next((name for name in self.served_model_name or () if name != "*"), self.name)

    @property
    def async_schema(self) -> bool:
        """Return whether /invocations uses the schema of LMI's async mode.

        LMI has supported async mode since 0.33, and has used it by default since 0.35. It is not the default if other
        options select rolling or dynamic batching, TGI's schema, or `openai_compat`, which is set by the variables of
        AWS's vLLM image.
        """
        if self.async_mode is not None:
            return self.async_mode and self.lmi_version >= ASYNC_SINCE
        chosen = self.rolling_batch != "auto" or self.batch_size > 1 or self.of_tgi or self.openai_compat
        return self.lmi_version >= ASYNC_BY_DEFAULT_SINCE and not chosen

    @property
    def of_tgi(self) -> bool:
        """Return whether responses on /invocations have TGI's format."""
        return self.tgi_compat or self.tgi_version is not None

    @property
    def stateful_sessions(self) -> bool:
        """Return whether clients may open sessions. As in LMI, the default is true in async mode."""
        return self.async_schema if self.enable_stateful_sessions is None else self.enable_stateful_sessions

    @functools.cached_property
    def reasoning(self) -> str:
        """The value of `option.reasoning_parser`, or auto if it is not set."""
        return self.reasoning_parser or "auto"

    @property
    def stores_responses(self) -> bool:
        return self.responses_store != "off"

    def where(self, key: str) -> str:
        return self.origins.get(key, "default")

    def problem(self, key: str, value: object, reason: str) -> Problem:
        """Return a problem with the value of an option. `reason` explains what is wrong with the value."""
        return Problem(self.where(key), key, f"{key}={value}: {reason}")
