"""Call the functions of a user's model.py. Each failure ends one request and names the function."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from handler.core.errors import FormatterFailed, ServingError
from handler.plugins.loading import InputFormatter, OutputFormatter

log = logging.getLogger("handler.formatters")


def run(formatter: InputFormatter | OutputFormatter, *arguments: Any, **keywords: Any) -> Any:
    """Call the function.

    Raises:
        FormatterFailed: it raised; the log has the place.
    """
    try:
        return formatter.function(*arguments, **keywords)
    except BaseException as error:  # SystemExit and its like too
        log.exception("%s failed", formatter.title)
        raise failed(formatter, f"raised {type(error).__name__}", error) from error


@contextlib.contextmanager
def users_objects(formatter: InputFormatter | OutputFormatter) -> Iterator[None]:
    """Guard the use of objects that the user's function made or may have changed.

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
    """Build the error; the text of `error`, which may quote the client, is not in its public message."""
    return FormatterFailed(f"{formatter.title} {what}", "" if error is None else _error_text(error))


def kind(value: Any) -> str:
    """Name the type of a wrong return value."""
    return "None" if value is None else type(value).__name__


def _error_text(error: BaseException) -> str:
    try:
        return str(error)[:500].encode(errors="replace").decode()
    except BaseException:  # its own __str__ is the user's code too
        return ""
