"""Sampling parameters for requests that leave them out: those of the model's generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class GenerationDefaults(NamedTuple):
    """What holds where a client leaves a parameter out.

    Attributes:
        sampling: fields of Sampling; without those that the engine does not support.
        max_new_tokens: of an answer that would otherwise fill the context; None lets it.
        most_new_tokens: of every answer, whatever its client asks for; None: any number.
    """

    sampling: Mapping[str, Any] = MappingProxyType({})
    max_new_tokens: int | None = None
    most_new_tokens: int | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The values by their names in generation_config.json."""
        length = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return {**self.sampling, **length}


NO_DEFAULTS = GenerationDefaults()
