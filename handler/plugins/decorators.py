"""The decorators of a user's functions, which set the attributes that djl_python's set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def input_formatter(function: F) -> F:
    """Mark the function that reads request bodies."""
    vars(function)["is_input_formatter"] = True
    return function


def output_formatter(function: F) -> F:
    """Mark the function that writes answers."""
    vars(function)["is_output_formatter"] = True
    return function
