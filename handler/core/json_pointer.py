"""References in JSON schemas: `$ref` with a JSON pointer in the fragment of a URI (RFC 6901)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from handler.core.numbers import is_digits


def resolved(reference: str, root: Any) -> tuple[Any, bool]:
    """Return the target of a reference, and whether its names stand in it as they are, without escapes and indices.

    The target is None if the root does not contain it, or if it is in another document.
    """
    start, *encoded = reference.split("/")
    if start != "#":
        return None, True
    target, is_plain = root, "~" not in reference and "%" not in reference
    for part in encoded:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and len(name) < 10 and is_digits(name) and int(name) < len(target):
            target, is_plain = target[int(name)], False
        elif isinstance(target, Mapping) and name in target:
            target = target[name]
        else:
            return None, is_plain
    return target, is_plain


def target_of(reference: str, root: Any) -> Any:
    """Return the target of a reference. See `resolved`."""
    return resolved(reference, root)[0]
