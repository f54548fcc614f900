"""The request that an input formatter gets: djl_python's `Input`, with its documented getters."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any


class Content(dict[str, bytes]):
    """The named parts of a body; there is one, `data`."""

    def get_keys(self) -> list[str]:
        return list(self)

    def get_values(self) -> list[bytes]:
        return list(self.values())

    def size(self) -> int:
        return len(self)

    def is_empty(self) -> bool:
        return not self

    def key_at(self, index: int) -> str:
        return self.get_keys()[index]

    def value_at(self, index: int) -> bytes:
        return self.get_values()[index]


class Input:
    """One request.

    Args:
        body: its bytes.
        properties: its HTTP headers, names in lower case.
    """

    def __init__(self, body: bytes = b"", properties: Mapping[str, str] | None = None) -> None:
        self.properties: dict[str, Any] = dict(properties or {})
        self.content = Content(data=body)
        self.function_name = "handle"

    def get_properties(self) -> dict[str, Any]:
        return self.properties

    def get_property(self, key: str) -> Any:
        """Return a header by its name in any case; None when absent."""
        wanted = key.lower()
        return next((value for name, value in self.properties.items() if name.lower() == wanted), None)

    def get_content(self) -> Content:
        return self.content

    def contains_key(self, key: str) -> bool:
        return key in self.content

    def get_as_bytes(self, key: str | None = None) -> bytes:
        return self.content[key or "data"]

    def get_as_string(self, key: str | None = None) -> str:
        return self.get_as_bytes(key).decode()

    def get_as_json(self, key: str | None = None) -> Any:
        return json.loads(self.get_as_string(key))

    def get_as_csv(self, key: str | None = None) -> list[dict[str, Any]]:
        return list(csv.DictReader(io.StringIO(self.get_as_string(key))))

    def get_data(self, key: str | None = None) -> Any:
        """Return the body as its content type says: JSON, text, or bytes."""
        media = self.get_property("content-type") or ""
        if media.startswith("application/json"):
            return self.get_as_json(key)
        return self.get_as_string(key) if media.startswith("text/") else self.get_as_bytes(key)

    def get_function_name(self) -> str:
        return self.function_name

    def is_empty(self) -> bool:
        return self.content.is_empty()

    def is_batch(self) -> bool:
        return False

    def get_batch_size(self) -> int:
        return 1

    def get_batches(self) -> list[Input]:
        return [self]
