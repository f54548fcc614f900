"""Serializers with the interface of SageMaker's SDK, whose own serializers also work with `Predictor`."""

from __future__ import annotations

import io
import json
from typing import Any, Protocol


class Serializer(Protocol):
    @property
    def CONTENT_TYPE(self) -> str: ...

    def serialize(self, data: Any) -> bytes | str: ...


class Deserializer(Protocol):
    @property
    def ACCEPT(self) -> tuple[str, ...]: ...

    def deserialize(self, stream: Any, content_type: str) -> Any:
        """Return the value that a body contains. `stream` has the methods `read` and `close`."""


class JSONSerializer:
    """A serializer that converts values to JSON, and does not change bytes or strings."""

    CONTENT_TYPE = "application/json"

    def serialize(self, data: Any) -> bytes | str:
        return data if isinstance(data, bytes | str) else json.dumps(data, ensure_ascii=False)


class JSONDeserializer:
    """A deserializer that returns the value of a JSON response, and the text of any other response."""

    ACCEPT = ("application/json",)

    def deserialize(self, stream: Any, content_type: str) -> Any:
        text = stream.read().decode("utf-8", "replace")
        try:
            return json.loads(text)
        except ValueError:
            return text


class BytesDeserializer:
    ACCEPT = ("*/*",)

    def deserialize(self, stream: Any, content_type: str) -> bytes:
        return bytes(stream.read())


def deserialize_body(deserializer: Deserializer, body: bytes, content_type: str) -> Any:
    return deserializer.deserialize(io.BytesIO(body), content_type)
