"""Paths and query strings of requests, read in linear time on the event loop.

`urllib.parse` needs several milliseconds for 8 KiB of `%`, on every request and before keys are checked.
"""

from __future__ import annotations

import re

from starlette.types import Scope

from handler.core.errors import BadRequest

_MAX_PARAMETERS = 1000
_ESCAPES = re.compile(rb"(?:%[0-9A-Fa-f]{2})+")


def unquoted(text: bytes, errors: str = "replace") -> str:
    """Return a text with its percent-escapes decoded. A `%` that begins no escape remains.

    Args:
        errors: how bytes that are not UTF-8 are decoded, as for `bytes.decode`.
    """
    if b"%" in text:
        text = _ESCAPES.sub(_bytes_of, text)
    return text.decode(errors=errors)


def _bytes_of(escapes: re.Match[bytes]) -> bytes:
    return bytes.fromhex(escapes[0].replace(b"%", b"").decode())


def query_of(scope: Scope, errors: str = "replace") -> list[tuple[str, str]]:
    """Return the names and values in the query string, in order. A field without `=` has the value "".

    Args:
        errors: as for `unquoted`.

    Raises:
        BadRequest: the query has too many parameters.
    """
    fields = scope["query_string"].replace(b"+", b" ").split(b"&")
    if len(fields) > _MAX_PARAMETERS:
        raise BadRequest(f"the query has more than {_MAX_PARAMETERS} parameters")
    pairs = (field.partition(b"=") for field in fields if field)
    return [(unquoted(name, errors), unquoted(value, errors)) for name, _, value in pairs]
