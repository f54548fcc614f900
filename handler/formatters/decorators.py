"""Marks on a user's functions: the attributes that djl_python's decorators of the same names set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


def input_formatter(function: F) -> F:
    """Mark the function that reads request bodies."""
    vars(function)["is_input_formatter"] = True
    return function


@overload
def output_formatter(function: F) -> F: ...
@overload
def output_formatter(*, content_type: str | None = None) -> Callable[[F], F]: ...
def output_formatter(function: F | None = None, *, content_type: str | None = None) -> F | Callable[[F], F]:
    """Mark the function that writes answers.

    Args:
        function: the decorated one, when the decorator is written without brackets.
        content_type: what its answers are, where the default does not fit. djl_python's decorator has no such thing.
    """

    def mark(function: F) -> F:
        vars(function).update(is_output_formatter=True, content_type=content_type)
        return function

    return mark if function is None else mark(function)
