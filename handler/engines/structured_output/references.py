"""References in JSON schemas: `$ref` with a JSON pointer in the fragment of a URI (RFC 6901)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from handler.core.numbers import is_digits

_DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by names, which may be those of keywords."""

_MAX_COPIED = 1 << 18  # characters of definitions that may be copied for one schema
_NONE = object()


def with_plain_references(root: Any) -> Any:
    """Return a schema whose references are lists of names, which servers resolve.

    Servers neither decode `~1`, `~0` and `%20` nor follow indices of lists. What such references lead to is copied to
    `$defs`. References to nothing, and to other documents, stay as they are.

    Raises:
        ValueError: too much would have to be copied.
    """
    copies = _Copies(root)
    try:
        walked = copies.walked(root)
    except RecursionError:  # no server accepts such a schema
        return root
    if not copies.definitions:
        return root
    return {**walked, "$defs": {**_mapping(walked.get("$defs")), **copies.definitions}}


class _Copies:
    """The copies of definitions.

    Attributes:
        definitions: the copies, by name.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        taken = _mapping(root.get("$defs")) if isinstance(root, dict) else {}
        names = map("definition{}".format, itertools.count())
        self._free_names = (name for name in names if name not in taken)
        self._num_characters = 0
        self.definitions: dict[str, Any] = {}

    def walked(self, value: Any) -> Any:
        """Return a part of the schema with plain references."""
        if isinstance(value, list):
            return [self.walked(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {name: self._member(name, item) for name, item in value.items()}

    def _member(self, name: str, value: Any) -> Any:
        if name == "$ref" and isinstance(value, str):
            return self._plain(value)
        if name in _BY_NAME and isinstance(value, dict):
            return {key: self.walked(schema) for key, schema in value.items()}
        return value if name in _DATA else self.walked(value)

    def _plain(self, reference: str) -> str:
        target, is_plain = _resolved(reference, self._root)
        if is_plain or target is _NONE or not isinstance(self._root, dict):
            return reference
        if reference not in self._names:
            self._num_characters += len(json.dumps(target))
            if self._num_characters > _MAX_COPIED:
                raise ValueError(
                    "the schema's references with escaped names or indices lead to too much; use plain ones"
                )
            name = next(self._free_names)
            self._names[reference] = f"#/$defs/{name}"
            self.definitions[name] = True  # it may refer to itself
            self.definitions[name] = self.walked(target)
        return self._names[reference]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _resolved(reference: str, root: Any) -> tuple[Any, bool]:
    """Return the target of a reference or _NONE, and whether servers resolve the reference as it stands."""
    start, *encoded = reference.split("/")
    if start != "#":
        return _NONE, True
    target, is_plain = root, "~" not in reference and "%" not in reference
    for part in encoded:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and len(name) < 10 and is_digits(name) and int(name) < len(target):
            target, is_plain = target[int(name)], False
        elif isinstance(target, Mapping) and name in target:
            target = target[name]
        else:
            return _NONE, is_plain
    return target, is_plain
