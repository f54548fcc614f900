"""From the fields of Sampling to an engine's own arguments; what an engine's table lacks is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from handler.core.values import Sampling

Rule = str | Callable[..., Mapping[str, Any]]
"""An engine's name for a field; or a function that makes arguments of a Sampling, for one field or several."""


def arguments(table: Mapping[str, Rule], sampling: Sampling, *more: Any) -> dict[str, Any]:
    """Make an engine's arguments.

    Args:
        table: field of Sampling -> rule. A function that stands there several times is called once.
        more: for the functions, after `sampling`.
    """
    made: dict[str, Any] = {}
    for field, rule in table.items():
        if isinstance(rule, str):
            made[rule] = getattr(sampling, field)
    for rule in dict.fromkeys(table.values()):
        if not isinstance(rule, str):
            made |= rule(sampling, *more)
    return made


def unless_neutral(field: str, name: str = "", make: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Make a rule that passes a field on where it has another value than its default.

    Args:
        name: the engine's, by default the field's own.
        make: turns the field's value into the argument's.
    """
    neutral = Sampling._field_defaults[field]

    def rule(sampling: Sampling, *more: Any) -> dict[str, Any]:
        value = getattr(sampling, field)
        return {} if value == neutral else {name or field: make(value)}

    return rule
