"""The configuration: every option's value, typed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handler.config.lmi_version import ASYNC_BY_DEFAULT_SINCE, ASYNC_SINCE
from handler.config.options.tables import Options, engine_name
from handler.core.errors import Problem
from handler.core.values import Role


@dataclass(frozen=True)
class Config(Options):
    """Every option, typed and checked; docs/options.md describes them.

    Attributes:
        engine_options: the engine's own options that have a value.
        directory: the one with serving.properties.
        origins: key -> origin of its value.
        settings: key -> value as written, of all sources; a user's `handle` gets it.
        handle_role: what the `handle` function of model.py is to an embedded server.
    """

    engine_options: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    directory: Path | None = field(default=None, compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    settings: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    handle_role: Role = Role.NONE

    @property
    def engine(self) -> str:
        """Name of the engine; "" if llm_engine and rolling_batch contradict each other."""
        return engine_name(self.llm_engine, self.rolling_batch)

    @property
    def label(self) -> str:
        """Name of the model in metrics and traces: the first of option.served_model_name, as in vLLM."""
        return next((name for name in self.served_model_name or () if name != "*"), self.model_name)

    @property
    def async_schema(self) -> bool:
        """Return whether /invocations has the schema of LMI's async mode: since 0.35 also where no mode is chosen.

        Releases before 0.33 have no such schema. AWS's vLLM image, whose variables set `openai_compat`, has another.
        """
        if self.async_mode is not None:
            return self.async_mode and self.lmi_version >= ASYNC_SINCE
        chosen = self.rolling_batch != "auto" or self.batch_size > 1 or self.tgi_compat or self.openai_compat
        return self.lmi_version >= ASYNC_BY_DEFAULT_SINCE and not chosen

    @property
    def stateful_sessions(self) -> bool:
        """Return whether clients may open sessions; by default, they may in LMI's async mode, as in LMI."""
        return self.async_schema if self.enable_stateful_sessions is None else self.enable_stateful_sessions

    @property
    def reasoning(self) -> str:
        """The name of `option.reasoning_parser`, which is auto where it is not set."""
        return self.reasoning_parser or "auto"

    @property
    def stores_responses(self) -> bool:
        return self.responses_store != "off"

    def where(self, key: str) -> str:
        return self.origins.get(key, "default")

    def problem(self, key: str, value: object, why: str) -> Problem:
        """Return the problem with an option's value."""
        return Problem(self.where(key), key, f"{key}={value}: {why}")
