"""A config.json that somebody else wrote: numbers are checked before anything is computed from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deploy.errors import SpecError

LARGEST_FILE = 16 << 20
"""Bytes of a config.json that is read: a list of modules that stay unquantized can have megabytes."""

_LARGEST = 100_000_000
_MOST_LAYERS = 4096
_ADVICE = "Set model.shape in the specification."


def parse(name: str, content: bytes) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        SpecError: it is none, or nested too deep.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise SpecError(f"the model's {name} is nested too deep", _ADVICE) from None
    except ValueError as error:
        raise SpecError(f"the model's {name} is not JSON: {error}", _ADVICE) from None
    if not isinstance(value, dict):
        raise SpecError(f"the model's {name} is not a JSON object", _ADVICE)
    return value


class Config:
    """The part of a config.json that describes the language model, by transformers' names."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        parts = (whole.get(key) for key in ("text_config", "llm_config"))
        text: Mapping[str, Any] = next((part for part in parts if isinstance(part, Mapping)), {})
        self._values = {**whole, **text}
        self.type = str(self._values.get("model_type", ""))

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """Return a value of any type, unchecked; None: there is none."""
        return self._values.get(name)

    def number(self, *names: str, default: int | None = None, largest: int = _LARGEST) -> int:
        """Return the first of the values that is there and not 0.

        Raises:
            SpecError: there is none and no default, or it is not a whole number from 0 to `largest`.
        """
        for name in names:
            if (value := whole_number(name, self._values.get(name), largest)) > 0:
                return value
        if default is None:
            raise SpecError(f"config.json has no {names[0]}", _ADVICE)
        return default

    def layers(self) -> int:
        listed = len(self.words()) or None
        names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        return self.number(*names, default=listed, largest=_MOST_LAYERS)

    def words(self) -> tuple[str, ...]:
        """Return what config.json calls each layer, where it lists them; empty: it does not."""
        for name in ("layer_types", "layers_block_type"):
            if self.list(name):
                return tuple(map(str, self.list(name)))
        letters = self._values.get("hybrid_override_pattern")
        return tuple(letters[:_MOST_LAYERS]) if isinstance(letters, str) else ()

    def flag(self, name: str) -> bool:
        return bool(self._values.get(name))

    def part(self, name: str) -> Mapping[str, Any]:
        """Return an object within; empty: there is none."""
        return part(self._values, name)

    def list(self, name: str) -> tuple[Any, ...]:
        value = self._values.get(name)
        return tuple(value[:_MOST_LAYERS]) if isinstance(value, list) else ()


def part(value: object, name: str) -> Mapping[str, Any]:
    """Return an object within an object; empty: there is none."""
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def whole_number(name: str, value: object, largest: int = _LARGEST) -> int:
    """Return a number of a config.json; 0: it is null, or per-layer values of which the largest counts.

    Raises:
        SpecError: it is negative, too large, or no number.
    """
    if value is None or value is False:
        return 0
    if isinstance(value, list) and 0 < len(value) <= _MOST_LAYERS and not any(isinstance(item, list) for item in value):
        return max(whole_number(name, item, largest) for item in value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        shown = repr(value)
        shown = shown if len(shown) <= 40 else f"{shown[:40]}…"
        raise SpecError(f"config.json: {name}: {shown} is not a whole number from 0 to {largest}", _ADVICE)
    return value
