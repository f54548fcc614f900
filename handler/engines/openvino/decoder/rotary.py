"""Rotary position embeddings as transformers computes them (modeling_rope_utils.py): frequencies by config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on the number of tokens."""


class Rotary(NamedTuple):
    """Positions of a layer: `parameters` are those of config.json, with `rope_theta`."""

    size: int  # of a head
    parameters: Mapping[str, Any]
    context: int  # max_position_embeddings

    @property
    def kind(self) -> str:
        return str(self.parameters.get("rope_type") or self.parameters.get("type") or "default")

    def frequencies(self) -> tuple[Any, float]:
        """Return the frequencies (half as many as a head has numbers, float32), and the factor of sine and cosine."""
        import numpy as np

        theta = float(self.parameters["rope_theta"])
        plain = 1 / np.float32(theta) ** (np.arange(0, self.size, 2, dtype=np.float32) / np.float32(self.size))
        if self.kind == "default":
            return plain, 1.0
        factor = float(self.parameters["factor"])
        if self.kind == "linear":
            return plain / np.float32(factor), 1.0
        original = float(self.parameters.get("original_max_position_embeddings") or self.context)
        if self.kind == "llama3":
            return _llama3(plain, factor, original, self.parameters), 1.0
        return _yarn(plain, factor, original, self.parameters, theta), _attention_factor(factor, self.parameters)


def _llama3(plain: Any, factor: float, original: float, parameters: Mapping[str, Any]) -> Any:
    """Slow frequencies are divided, fast ones stay; between them it changes gradually (Llama 3.1)."""
    import numpy as np

    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = original * plain / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - smooth) * plain / factor + smooth * plain).astype(np.float32)


def _yarn(plain: Any, factor: float, original: float, parameters: Mapping[str, Any], theta: float) -> Any:
    """As `_llama3`, but gradual by the frequency's number (arXiv 2309.00071)."""
    import numpy as np

    size = 2 * len(plain)

    def number_with(turns: float) -> float:
        """Return the number of the frequency that makes so many turns in the original context."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = number_with(float(parameters.get("beta_fast") or 32))
    high = number_with(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    divided = np.clip((np.arange(size // 2) - low) / ((high - low) or 0.001), 0, 1)
    return (plain / factor * divided + plain * (1 - divided)).astype(np.float32)


def _attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return mscale(float(above)) / mscale(float(below)) if above and below else mscale(1)
