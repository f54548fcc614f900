"""Whether a text is the JSON that its request asked for."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import orjson

_SLOW = ("pattern", "patternProperties")  # somebody's regular expressions, which may take for ever


def has_validator() -> bool:
    """Whether schemas are checked; without jsonschema only that a text is JSON."""
    return importlib.util.find_spec("jsonschema") is not None


def fits(text: str, schema: Mapping[str, Any] | None) -> bool:
    """Whether a text is JSON, and has the schema. Regular expressions in it are not checked; a broken schema fits."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if schema is None or not has_validator():
        return True
    check = _validator(orjson.dumps(schema, option=orjson.OPT_SORT_KEYS))
    return check is None or bool(check(value))


@functools.lru_cache(maxsize=256)
def _validator(schema: bytes) -> Any:
    import jsonschema
    import referencing

    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {name: lambda *_: () for name in _SLOW})(
        orjson.loads(schema), registry=referencing.Registry()
    )

    def check(value: Any) -> bool:
        try:
            return bool(validator.is_valid(value))
        except Exception:  # the schema is foreign: a reference that leads nowhere, a type that does not exist
            return True

    return check
