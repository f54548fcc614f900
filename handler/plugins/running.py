"""Calls the functions of a user's model.py: whatever they do is one request's failure, and names the function."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from handler.core.errors import FormatterFailed, ServingError
from handler.plugins.loading import InputFormatter, OutputFormatter

log = logging.getLogger("handler.formatters")


def run(formatter: InputFormatter | OutputFormatter, *arguments: Any, **keywords: Any) -> Any:
    """Call it.

    Raises:
        FormatterFailed: it raised; where is in the log.
    """
    try:
        return formatter.function(*arguments, **keywords)
    except BaseException as error:  # SystemExit and its like too
        log.exception("%s failed", formatter.title)
        raise failed(formatter, f"raised {type(error).__name__}", error) from error


@contextlib.contextmanager
def users_objects(formatter: InputFormatter | OutputFormatter) -> Iterator[None]:
    """Around our use of objects that the function could change, or that are of its own making.

    Raises:
        FormatterFailed: they cannot be used.
    """
    try:
        yield
    except ServingError:
        raise
    except BaseException as error:  # their attributes may be code of the user's, too
        log.exception("%s left what cannot be used", formatter.title)
        raise failed(formatter, f"left objects that raise {type(error).__name__}", error) from error


def failed(
    formatter: InputFormatter | OutputFormatter, what: str, error: BaseException | None = None
) -> FormatterFailed:
    """What a client is told; what `error` says may be the client's own text."""
    return FormatterFailed(f"{formatter.title} {what}", "" if error is None else _said(error))


def kind(value: Any) -> str:
    """Of a value that should not have been returned."""
    return "None" if value is None else type(value).__name__


def _said(error: BaseException) -> str:
    try:
        return str(error)[:500].encode(errors="replace").decode()
    except BaseException:  # its own __str__ is the user's code too
        return ""
