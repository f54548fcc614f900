"""References in JSON schemas: `$ref` with a JSON pointer in the fragment of a URI (RFC 6901)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from handler.core.json_pointer import resolved
from handler.engines.structured_output.keywords import mapped

_MAX_COPIED = 1 << 18  # characters of definitions that may be copied for one schema


def with_plain_references(root: Any) -> Any:
    """Return a schema whose references are lists of names, which servers resolve.

    Servers neither decode `~1`, `~0` and `%20` nor follow indices of lists. What such references lead to is copied to
    `$defs`. References to nothing, and to other documents, stay as they are.

    Raises:
        ValueError: too much would have to be copied.
    """
    copies = _Copies(root)
    try:
        walked = mapped(root, copies.plain)
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

    def plain(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a subschema with a plain reference, if it is one."""
        reference = schema.get("$ref")
        return {**schema, "$ref": self._plain(reference)} if isinstance(reference, str) else schema

    def _plain(self, reference: str) -> str:
        target, is_plain = resolved(reference, self._root)
        if is_plain or target is None or not isinstance(self._root, dict):
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
            self.definitions[name] = mapped(target, self.plain)
        return self._names[reference]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
